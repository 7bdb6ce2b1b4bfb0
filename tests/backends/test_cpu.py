"""The CPU backend: facts, and knobs that are set and put back."""

from __future__ import annotations

import torch

from backends.base import Backend
from backends.cpu import CpuBackend


def test_it_is_a_backend_with_an_accelerator_name() -> None:
    backend = CpuBackend()
    assert isinstance(backend, Backend)
    facts = backend.facts().identity
    assert "cores" in facts["accelerator"]
    assert facts["knobs"]["deterministic_algorithms"] is True


def test_knobs_are_set_and_put_back() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    try:
        with CpuBackend().deterministic():
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")


def test_time_ms_gives_one_figure_a_round() -> None:
    calls: list[int] = []
    times = CpuBackend().time_ms(lambda: calls.append(1), 5)
    assert len(times) == 5
    assert len(calls) == 6, "one call warms up"
    assert all(t >= 0 for t in times)
