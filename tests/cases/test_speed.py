"""The speed case: what it counts, and under which knobs it times. No time is judged here."""

from __future__ import annotations

import pytest
import torch

from bench.run.registry import load_backend
from cases.speed.attention import Params, SpeedAttention, operations

TINY = {"batch": 1, "heads": 2, "kv_heads": 1, "tokens": 16, "head_dim": 16, "rounds": 3}


def test_operations_are_the_usual_count() -> None:
    params = Params(**TINY, causal=False)
    pair = 2 * 16 * 16 * 16  # H T^2 D
    assert operations(params, 1, "forward") == 4 * pair
    assert operations(params, 1, "backward") == 10 * pair
    assert operations(params, 2, "both") == 28 * pair
    assert operations(Params(**TINY, causal=True), 1, "both") == 7 * pair


@pytest.mark.parametrize("deterministic", [False, True])
def test_timed_calls_see_the_algorithms_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    backend = load_backend("cpu")
    kernel = backend.kernels()["sdpa-math/stock"]
    seen = set()

    def time_ms(run: object, rounds: int) -> list[float]:
        knobs = torch.utils.deterministic
        seen.add((torch.are_deterministic_algorithms_enabled(), knobs.fill_uninitialized_memory))
        run()  # type: ignore[operator]
        return [1.0] * rounds

    monkeypatch.setattr(backend, "time_ms", time_ms, raising=False)
    params = Params(**TINY, deterministic=deterministic)
    with backend.deterministic():
        found = SpeedAttention().run(kernel, backend, SpeedAttention().problem(params, torch.bfloat16, 1))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory
    assert seen == {(deterministic, False)}
    assert found.metrics["forward_tflops"] == operations(params, 1, "forward") / 1e-3 / 1e12
