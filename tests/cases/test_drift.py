"""`crash/drift`: exact arithmetic leaves the planted channel alone, δ errors move it, and eps decides which."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from backends.base import Call, Forward, Kernel, KernelOptions
from backends.cpu import CpuBackend
from bench.measure.inputs import Inputs, key_of, signs
from bench.measure.reference import attention_reference
from cases import load_case
from cases.base import Measurement
from cases.bias.leak import PROBE_KEY
from cases.crash.drift import (
    DELTA,
    FEATURES,
    TOKENS,
    Layer,
    Params,
    Path,
    descend,
    drift_metrics,
    plain_attention,
    plant_layer,
)
from cases.sinks import HEAD_DIM, SCALE, SINK

CPU = CpuBackend()
KERNELS = CPU.kernels()
CASE = load_case("crash/drift")
BF16 = torch.bfloat16
SEEDS = 8
NAN, INF = math.nan, math.inf


def measure(
    kernel: Kernel, *, seeds: int = SEEDS, dtype: torch.dtype = BF16, **params: Any
) -> tuple[Measurement, str]:
    values = Params(**params)
    with CPU.deterministic():
        found = CASE.run(kernel, CPU, CASE.problem(values, dtype, seeds))
    return found, CASE.verdict(values, found.metrics)


@cache
def run(name: str, **params: Any) -> tuple[Measurement, str]:
    return measure(KERNELS[name], **params)


@dataclass(frozen=True)
class Fake:
    """A kernel out of a function of q, k, v; autograd does the backward pass."""

    function: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    name: str = "eager-fused/stock"
    fix: str = "stock"
    dtypes: frozenset[torch.dtype] = frozenset({BF16})
    options: KernelOptions = field(default_factory=KernelOptions)
    option_names: frozenset[str] = frozenset()

    version: int = 1
    strict: bool = False
    draws: bool = False

    def configure(self, **options: Any) -> Fake:
        return self

    def reseeded(self, key: int) -> Fake:
        return self

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        assert scale is not None
        return self.function(q, k, v, scale)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Forward:
        return Forward(self(q, k, v, causal=causal, scale=scale), None)

    def launch_facts(self, call: Call) -> dict[str, Any]:
        return {}


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """FP64 attention, rounded once; its gradient knows of no rounding."""
    o = torch.softmax(scale * (q.double() @ k.double().mT), -1) @ v.double()
    return o.to(q.dtype)


# ---- known answers ----------------------------------------------------------------------------


def test_exact_arithmetic_leaves_the_channel_alone() -> None:
    found, verdict = measure(Fake(exact))
    assert found.metrics["drift_abs_mean"] < 1e-12
    assert found.metrics["leak_over_delta_rms"] < 1e-14
    assert found.metrics["row_max_growth"] == pytest.approx(0, abs=0.02)
    assert verdict == "holds"


def test_fp32_dust_does_not_move_it() -> None:
    found, _ = run("eager-fused/stock")
    assert 0 < found.metrics["fp32_drift_abs_mean"] < 1e-4


@pytest.mark.parametrize(
    ("kernel", "params", "low", "high"),
    [
        ("eager-stored/stock", {}, 0.85, 0.95),
        ("eager-fused/stock", {}, -0.55, -0.35),
        ("eager-fused/stock", {"other_values": "quiet"}, -0.95, -0.80),
        ("eager-fused/shift_const", {}, -0.97, -0.90),
        ("eager-stored/delta_dp", {}, 0.35, 0.45),
    ],
)
def test_kernels_that_drift(kernel: str, params: dict[str, Any], low: float, high: float) -> None:
    found, verdict = run(kernel, **params)
    assert low < found.metrics["drift_mean"] < high
    assert verdict == "drifts"
    assert found.metrics["walk_ratio"] > 5
    assert found.metrics["drift_over_fp32"] > 5000
    # The leak has the other sign: AdamW goes down the gradient. Scores follow the drift.
    assert found.metrics["leak_over_delta_mean"] * found.metrics["drift_mean"] < 0
    if not params:
        assert found.metrics["row_max_growth"] * found.metrics["drift_mean"] > 0
        assert found.metrics["w_q_norm_growth"] * found.metrics["drift_mean"] > 0


@pytest.mark.parametrize(
    "kernel", ["eager-stored/delta_fp32", "eager-fused/delta_fp32", "eager-fused/delta_dp", "sdpa-math/stock"]
)
def test_kernels_that_hold(kernel: str) -> None:
    for params in ({}, {"values": "fixed"}):
        found, verdict = run(kernel, **params)
        assert found.metrics["drift_abs_mean"] < 0.01
        assert verdict == "holds"


def test_one_sink_does_not_drift_in_stock() -> None:
    for policy in ("stored", "fused"):
        found, verdict = run(f"eager-{policy}/stock", repeats=1)
        assert found.metrics["drift_abs_mean"] < 0.01
        assert verdict == "holds"


def test_unbiased_rounding_wanders() -> None:
    for values in ("fresh", "fixed"):
        found, verdict = run("eager-fused/stochastic", values=values)
        assert 0.003 < found.metrics["drift_abs_mean"] < 0.1
        assert found.metrics["walk_ratio"] < 2
        assert verdict == "wanders"


def test_an_error_that_repeats_drifts_whatever_its_sign() -> None:
    """With the same keys and values in every step stored/shift_const goes up in one seed, down in another."""
    fresh, verdict = run("eager-stored/shift_const")
    assert verdict == "wanders"
    fixed, verdict = run("eager-stored/shift_const", values="fixed")
    assert verdict == "drifts"
    assert fixed.metrics["walk_ratio"] > 5 > fresh.metrics["walk_ratio"]
    assert abs(fixed.metrics["drift_mean"]) < 0.6 * fixed.metrics["drift_abs_mean"]


def test_the_same_kernel_in_float32_holds() -> None:
    for kernel in ("eager-stored/stock", "sdpa-flash/stock"):
        found, verdict = run(kernel, dtype=torch.float32)
        assert found.metrics["drift_over_fp32"] < 50
        assert verdict == "holds"


def test_a_directed_drift_keeps_its_speed() -> None:
    """Five times the steps are five times the drift; curves have a point every fourth step."""
    found, _ = run("eager-stored/stock")
    drift, step = found.series["drift"], found.series["step"]
    assert drift[-1] / step[-1] == pytest.approx(drift[4] / step[4], rel=0.1)
    assert step == [4.0 * i for i in range(1, 26)]
    assert {len(curve) for curve in found.series.values()} == {25}


# ---- eps --------------------------------------------------------------------------------------


def test_dust_drifts_when_eps_is_below_it() -> None:
    dust = {
        eps: run("eager-fused/delta_fp32", eps=eps)[0].metrics["fp32_drift_abs_mean"]
        for eps in (1e-10, 1e-8, 1e-6, 2.0**-13)
    }
    assert dust[1e-10] > 0.03, "a random walk at full speed is about 0.08"
    assert dust[1e-8] > 0.01
    assert dust[1e-6] < 0.005
    assert dust[2.0**-13] < 1e-4
    _, verdict = run("eager-fused/delta_fp32", eps=1e-8)
    assert verdict == "inconclusive", "FP32 itself moves: nobody can be said to hold"


def inputs_and_layer(params: Params, seeds: int) -> tuple[Inputs, Layer]:
    stacked = CASE.problem(params, BF16, seeds).inputs
    layers = [plant_layer("crash/drift", params, seed) for seed in range(seeds)]
    return stacked, Layer(
        *(torch.stack([getattr(x, n) for x in layers]) for n in ("tokens", "w_q", "direction"))
    )


def planted_error(params: Params, size: Tensor) -> Path:
    """A run whose gradient is nothing but a relative δ error; size [steps, seeds]."""
    inputs, layer = inputs_and_layer(params, size.shape[1])

    def gradient(step: int, problem: Inputs) -> tuple[Tensor, Tensor]:
        dq = torch.zeros_like(problem.q, dtype=torch.float64)
        dq[..., 0] = size[step][:, None, None] * SCALE * PROBE_KEY * DELTA
        return problem.q, dq

    return descend(layer, inputs, gradient, params, BF16)


@pytest.mark.parametrize("error", [1e-6, 2.0**-13, -1e-3])
def test_a_constant_error_moves_by_adams_formula(error: float) -> None:
    """m̂ = g and √v̂ = |g| from the first step on, so each step is lr·g/(|g| + eps), with g = e·X̄."""
    params = Params(values="fixed", steps=20)
    path = planted_error(params, torch.full((20, 2), error, dtype=torch.float64))
    _, layer = inputs_and_layer(params, 2)
    drift = path.drift(layer.direction, params.lr)[-1] / params.steps
    expected = -error / (abs(error) + params.eps)
    torch.testing.assert_close(drift, torch.full((2,), expected).double(), rtol=0.03, atol=1e-4)
    torch.testing.assert_close(path.leak, torch.full((20, 2, TOKENS), error).double())
    assert torch.equal(path.w_q[-1][..., 1:], layer.w_q[..., 1:]), "no gradient, no move"


def test_walk_ratio_tells_a_walk_from_a_direction() -> None:
    params, steps, seeds = Params(values="fixed"), 100, 16
    coin = torch.from_numpy(signs(key_of("test_drift", "coin"), (steps, seeds)))
    metrics = {}
    for name, size in (
        ("walk", 1e-3 * coin),
        ("one_way", 1e-3 * torch.ones_like(coin)),
        ("either_way", 1e-3 * coin[:1].expand(steps, seeds)),
        ("slow", 2e-6 * torch.ones_like(coin)),
    ):
        path = planted_error(params, size)
        _, layer = inputs_and_layer(params, seeds)
        drift = path.drift(layer.direction, params.lr)[-1] / steps
        found = drift_metrics(path, drift, torch.full((seeds,), 1e-5).double())
        metrics[name] = found | {"abs_ulp_mean": 0.3}
    assert metrics["walk"]["walk_ratio"] == pytest.approx(1, abs=0.5)
    assert metrics["one_way"]["walk_ratio"] == pytest.approx(10)
    assert metrics["either_way"]["walk_ratio"] == pytest.approx(10)
    assert metrics["either_way"]["drift_abs_mean"] == pytest.approx(0.89, abs=0.02)
    assert abs(metrics["either_way"]["drift_mean"]) < 0.6
    verdicts = {name: CASE.verdict(params, found) for name, found in metrics.items()}
    assert verdicts == {
        "walk": "wanders",
        "one_way": "drifts",
        "either_way": "drifts",
        "slow": "creeps",
    }


# ---- the planted problem ----------------------------------------------------------------------


@pytest.mark.parametrize("values", ["fresh", "fixed"])
def test_the_gradient_of_the_channel_is_zero_wherever_w_q_is(values: str) -> None:
    params = Params(values=values, steps=10)
    inputs, layer = inputs_and_layer(params, 2)
    ref = attention_reference(inputs)
    assert len(inputs.q) == (20 if values == "fresh" else 2)
    assert (ref.scores >= ref.row_max).sum(-1).eq(2).all(), "two sinks hold each row's maximum"
    assert float(ref.row_max.mean()) == pytest.approx(params.gap, abs=0.1)
    assert float(ref.row_max.std()) == pytest.approx(0.53, abs=0.05)
    assert (layer.w_q[..., 0] == 0).all()
    assert (inputs.k[..., 0] == PROBE_KEY).all()
    moved = inputs.q.clone()
    moved[..., 0] = 3.0
    shifted = attention_reference(Inputs(moved, inputs.k, inputs.v, inputs.do, False, SCALE))
    torch.testing.assert_close(shifted.o, ref.o, rtol=0, atol=1e-13)
    assert float(shifted.dq[..., 0].abs().max()) < 1e-15
    # Almost no true gradient in the other channels either, and δ as large as the scale says.
    assert float(ref.dq[..., 1:].abs().mean()) < 1e-6
    assert float(ref.delta.abs().mean()) == pytest.approx(DELTA, rel=0.02)


def test_tokens_lie_around_their_direction_and_q_is_exact() -> None:
    params = Params(steps=10)
    layer = plant_layer("crash/drift", params, 3)
    assert layer.tokens.shape == (10, TOKENS, FEATURES)
    assert layer.w_q.shape == (FEATURES, HEAD_DIM)
    torch.testing.assert_close(layer.tokens.mean((0, 1)), layer.direction, rtol=0, atol=0.05)
    assert (layer.w_q[:, 2:8] == 0).all()
    torch.testing.assert_close(layer.direction @ layer.w_q[:, 1], torch.tensor(12 / (SCALE * SINK)).double())
    backwards = torch.flip(layer.tokens, [-1]) @ torch.flip(layer.w_q, [0])
    assert torch.equal(layer.tokens @ layer.w_q, backwards), "no order of summation rounds"
    assert torch.equal(layer.tokens.bfloat16().double(), layer.tokens)


def test_plain_attention_is_attention() -> None:
    inputs, _ = inputs_and_layer(Params(steps=10), 2)
    ref = attention_reference(inputs)
    o, dq = plain_attention(inputs)
    assert o.dtype == dq.dtype == torch.float32
    torch.testing.assert_close(o.double(), ref.o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dq.double(), ref.dq, rtol=1e-4, atol=1e-6)


def test_seeds_and_parameters_make_other_inputs_and_training_does_not() -> None:
    def inputs(**params: Any) -> str:
        return CASE.problem(Params(**params), BF16, 2).digest

    digests = {
        inputs(),
        inputs(values="fixed"),
        inputs(other_values="quiet"),
        inputs(repeats=3),
        inputs(gap=10.0),
        inputs(steps=20),
        CASE.problem(Params(), BF16, 3).digest,
        CASE.problem(Params(), torch.float16, 2).digest,
    }
    assert len(digests) == 8
    assert inputs(eps=1e-8, lr=1e-2, max_ratio=10.0, min_walk=4.0) == inputs()


def test_a_longer_run_stays_within_the_plans_bound() -> None:
    params = Params(steps=500)
    made = CASE.inputs(params, BF16, 0)
    layer = plant_layer("crash/drift", params, 0)
    tensors = (made.q, made.k, made.v, made.do, layer.tokens, layer.w_q)
    assert CASE.values(params) == sum(t.numel() for t in tensors)


# ---- determinism, verdicts, faults ------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["eager-stored/stock", "eager-fused/stochastic"])
def test_two_runs_give_the_same_weights_bit_for_bit(kernel: str) -> None:
    first, _ = measure(KERNELS[kernel], seeds=2, steps=20)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        second, _ = measure(KERNELS[kernel], seeds=2, steps=20)
        assert torch.get_num_threads() == threads + 1, "put back"
    finally:
        torch.set_num_threads(threads)
    assert first.digests == second.digests
    assert first.metrics == second.metrics
    assert set(first.digests) == {"w_q"}


def test_random_bits_follow_the_kernels_seed() -> None:
    kernel = KERNELS["eager-fused/stochastic"]
    first, other = (measure(kernel.configure(seed=seed), seeds=2, steps=20)[0].digests for seed in (0, 1))
    assert first["w_q"] != other["w_q"]


METRICS = {
    "drift_abs_mean": 0.5,
    "drift_abs_sem": 0.01,
    "drift_over_fp32": 5e4,
    "walk_ratio": 9.0,
    "fp32_drift_abs_mean": 1e-5,
    "abs_ulp_mean": 0.3,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "drifts"),
        ({"walk_ratio": 2.49}, "wanders"),
        ({"walk_ratio": 2.5}, "drifts"),
        ({"drift_abs_mean": 0.04}, "drifts"),
        ({"drift_abs_mean": 0.039}, "creeps"),
        ({"drift_abs_mean": 0.039, "walk_ratio": 2.0}, "wanders"),
        ({"drift_over_fp32": 500.0}, "holds"),
        ({"drift_over_fp32": 500.1}, "drifts"),
        ({"drift_over_fp32": INF}, "drifts"),
        ({"drift_over_fp32": 3.0, "fp32_drift_abs_mean": 2.01e-4}, "inconclusive"),
        ({"fp32_drift_abs_mean": 2.01e-4}, "drifts"),
        ({"drift_abs_sem": NAN}, "inconclusive"),
        ({"drift_abs_sem": NAN, "drift_over_fp32": 3.0}, "holds"),
        ({"drift_abs_mean": NAN, "drift_over_fp32": NAN}, "out_of_range"),
        ({"drift_abs_mean": INF}, "out_of_range"),
        ({"abs_ulp_mean": 16.1, "drift_over_fp32": 1.0}, "out_of_range"),
        ({"abs_ulp_mean": NAN, "drift_over_fp32": 1.0}, "out_of_range"),
    ],
)
def test_verdict(change: dict[str, float], expected: str) -> None:
    assert CASE.verdict(Params(), METRICS | change) == expected


def test_verdict_takes_its_thresholds() -> None:
    assert CASE.verdict(Params(max_ratio=1e5), METRICS) == "inconclusive"
    assert CASE.verdict(Params(max_ratio=1e5), METRICS | {"fp32_drift_abs_mean": 1e-7}) == "holds"
    assert CASE.verdict(Params(min_walk=9.1), METRICS) == "wanders"
    assert CASE.verdict(Params(min_speed=0.51), METRICS) == "creeps"


def test_nan_is_a_result() -> None:
    broken = Fake(lambda q, k, v, scale: exact(q, k, v, scale) * NAN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, verdict = measure(broken, seeds=2, steps=20)
    assert verdict == "out_of_range"
    assert math.isnan(found.metrics["w_q_norm"])


def test_a_wrong_output_does_not_hold() -> None:
    silent = Fake(lambda q, k, v, scale: 0 * exact(q, k, v, scale))
    _, verdict = measure(silent, seeds=2, steps=20)
    assert verdict == "out_of_range"


@pytest.mark.parametrize(
    "bad",
    [
        {"gap": 0.0},
        {"steps": 9},
        {"steps": 501},
        {"eps": 0.0},
        {"lr": 0.0},
        {"values": "new"},
        {"repeats": 0},
        {"min_walk": 0.5},
        {"sinks": 2},
    ],
)
def test_parameters_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Params(**bad)
