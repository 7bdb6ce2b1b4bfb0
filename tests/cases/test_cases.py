"""Each case, small, on the CPU: the known findings come out, and every verdict can be reached."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from backends.base import Call, Forward, Kernel, KernelOptions
from backends.cpu import CpuBackend
from backends.kernels.eager_kernels import FusedKernel
from bench.measure.inputs import digest
from cases import CASES, load_case
from cases.base import Case, CaseParams, Measurement
from cases.bias.bf16_addition import table_mismatches
from cases.bias.low_rank import step_gradients
from cases.bias.output_bias import BiasParams, bias_verdict
from cases.bias.shift_range import find_limit, row_maxima

CPU = CpuBackend()
# eager-ladder is for training in float32 (test_crash.py).
FAMILIES = ("eager-stored/", "eager-fused/", "sdpa-")
KERNELS = {n: kernel for n, kernel in CPU.kernels().items() if n.startswith(FAMILIES)}
NAN, INF = math.nan, math.inf


def case_and_params(name: str, **params: Any) -> tuple[Case, CaseParams]:
    case = load_case(name)
    return case, case.Params(**params)


def run(
    name: str,
    kernel: Kernel | str,
    *,
    seeds: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    options: dict[str, Any] | None = None,
    **params: Any,
) -> tuple[dict[str, float], str, Measurement]:
    """Metrics, verdict and everything else of one small run."""
    case, values = case_and_params(name, **params)
    chosen = KERNELS[kernel] if isinstance(kernel, str) else kernel
    with CPU.deterministic():
        found = case.run(chosen.configure(**options or {}), CPU, case.problem(values, dtype, seeds))
    return found.metrics, case.verdict(values, found.metrics), found


def verdict(name: str, metrics: dict[str, float], **params: Any) -> str:
    case, values = case_and_params(name, **params)
    return case.verdict(values, metrics)


# ---- bias/tie_break ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "params", "low", "high", "expected"),
    [
        ("eager-stored/stock", {}, 0.199, 0.239, "biased"),
        ("eager-stored/stock", {"row_jitter": 0.0}, 0.199, 0.239, "biased"),
        ("eager-stored/stock", {"repeats": 1}, -0.02, 0.02, "pass"),
        ("eager-stored/stock", {"repeats": 1, "gap": 6.0}, -0.02, 0.02, "pass"),
        ("eager-stored/stock", {"repeats": 3}, 0.12, 0.16, "biased"),
        ("eager-stored/stabilized", {}, -0.03, 0.03, "pass"),
        ("eager-stored/stabilized", {"row_jitter": 0.0}, 0.04, 0.10, "biased"),
        ("eager-stored/stabilized", {"repeats": 3, "gap": 6.0, "row_jitter": 0.0}, -0.48, -0.42, "biased"),
        ("eager-fused/stock", {}, -0.035, 0.005, "pass"),
        ("eager-fused/stabilized", {}, 0.05, 0.11, "biased"),
        ("eager-fused/stabilized", {"row_jitter": 0.0}, -0.24, -0.20, "biased"),
        ("eager-fused/stabilized+consistent_l", {"row_jitter": 0.0}, -0.035, 0.005, "pass"),
        ("eager-fused/shift_const", {}, -0.35, -0.25, "biased"),
        ("eager-fused/shift_const", {"repeats": 1, "gap": 6.0}, -0.30, -0.22, "biased"),
        ("eager-fused/stochastic", {}, -0.01, 0.01, "pass"),
        ("sdpa-math/stock", {}, -0.035, 0.005, "pass"),
    ],
)
def test_tie_break_figures(
    kernel: str, params: dict[str, Any], low: float, high: float, expected: str
) -> None:
    metrics, found, _ = run("bias/tie_break", kernel, **params)
    assert low < metrics["aligned_ulp_mean"] < high
    assert found == expected
    assert metrics["nonfinite_fraction"] == 0
    assert metrics["repeated_max_fraction"] == (0 if params.get("repeats") == 1 else 1)


def test_tie_break_of_stock_errs_in_every_row_to_one_side() -> None:
    metrics, _, _ = run("bias/tie_break", "eager-stored/stock")
    assert metrics["delta_coherence"] > 0.999
    assert metrics["aligned_ulp_z"] > 20
    # Σ P̄V of two values is a tie half of the time; the exact O rounded once has no such bias.
    assert abs(metrics["ideal_aligned_ulp_mean"]) < 0.03
    assert metrics["max_p_mean"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("sign", "factor"), [("negative", -1), ("positive", 1)])
def test_tie_break_follows_the_sign_of_the_values(sign: str, factor: int) -> None:
    metrics, _, _ = run("bias/tie_break", "eager-stored/stock", value_sign=sign)
    assert metrics["signed_ulp_mean"] * factor == pytest.approx(metrics["aligned_ulp_mean"])
    mixed, _, _ = run("bias/tie_break", "eager-stored/stock")
    assert abs(mixed["signed_ulp_mean"]) < 0.05
    assert mixed["aligned_ulp_mean"] == pytest.approx(metrics["aligned_ulp_mean"], abs=0.01)


def test_tie_break_vanishes_in_float32_and_is_found_with_seven_of_its_bits() -> None:
    wide, _, _ = run("bias/tie_break", "eager-stored/stock", dtype=torch.float32, seeds=2)
    assert wide["max_p_mean"] > 0.49
    narrow, _, _ = run(
        "bias/tie_break", "eager-stored/stock", dtype=torch.float32, seeds=2, options={"mantissa_bits": 7}
    )
    # Both in ulps of FP32: 2^-16 of those of BF16. Values of 24 bits make fewer ties than BF16's.
    assert abs(wide["aligned_ulp_mean"]) < 1
    assert narrow["aligned_ulp_mean"] * 2.0**-16 > 0.05


def test_one_seed_is_inconclusive() -> None:
    metrics, found, _ = run("bias/tie_break", "eager-stored/stock", seeds=1)
    assert math.isnan(metrics["aligned_ulp_z"])
    assert found == "inconclusive"


def test_digests_are_those_of_the_inputs_and_of_the_outputs() -> None:
    _, _, found = run("bias/tie_break", "eager-fused/stock", seeds=2)
    case, params = case_and_params("bias/tie_break")
    x = [case.inputs(params, torch.bfloat16, seed) for seed in (0, 1)]
    q, k, v = (torch.cat([getattr(p, name) for p in x]) for name in "qkv")
    out = KERNELS["eager-fused/stock"].forward(q, k, v, causal=False, scale=x[0].scale)
    assert found.digests["o"] == digest(out.o)
    assert out.lse is not None
    assert found.digests["lse"] == digest(out.lse)
    _, _, again = run("bias/tie_break", "sdpa-math/stock", seeds=2)
    assert set(again.digests) == {"o"}


@pytest.mark.parametrize(
    ("mean", "z", "expected"),
    [
        (0.05, 100, "pass"),  # at the floor
        (-0.05, -100, "pass"),
        (0.0500001, 5, "biased"),  # z at its threshold
        (-0.2, -5, "biased"),
        (0.2, 4.999, "pass"),
        (-0.2, -4.999, "pass"),
        (0.2, INF, "biased"),
        (0.2, NAN, "inconclusive"),
        (0.01, NAN, "pass"),
        (0.0, 0.0, "pass"),
    ],
)
@pytest.mark.parametrize("name", ["bias/tie_break", "bias/tile_size"])
def test_bias_verdict(name: str, mean: float, z: float, expected: str) -> None:
    metrics = {
        "aligned_ulp_mean": mean,
        "aligned_ulp_z": z,
        "nonfinite_fraction": 0.0,
        "abs_ulp_mean": 0.25,
    }
    assert verdict(name, metrics) == expected
    assert bias_verdict(BiasParams(), metrics) == expected
    assert verdict(name, metrics | {"nonfinite_fraction": 1e-9}) == "out_of_range"
    for error in (16.1, NAN, INF):
        assert verdict(name, metrics | {"abs_ulp_mean": error}) == "out_of_range"


def test_bias_verdict_takes_its_thresholds_from_the_parameters() -> None:
    metrics = {
        "aligned_ulp_mean": 0.2,
        "aligned_ulp_z": 8.0,
        "nonfinite_fraction": 0.0,
        "abs_ulp_mean": 0.25,
    }
    assert verdict("bias/tie_break", metrics, floor_ulp=0.2) == "pass"
    assert verdict("bias/tie_break", metrics, min_z=8.1) == "pass"
    assert verdict("bias/tie_break", metrics, floor_ulp=0.19, min_z=8.0) == "biased"
    metrics = {"aligned_ulp_mean": NAN, "aligned_ulp_z": NAN, "nonfinite_fraction": 0.5}
    assert verdict("bias/tie_break", metrics) == "out_of_range"


# ---- bias/tile_size ---------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [64, 128, 0])
def test_the_bias_needs_no_tiling(tile: int) -> None:
    metrics, found, _ = run("bias/tile_size", "eager-stored/stock", seeds=2, options={"tile": tile})
    assert 0.18 < metrics["aligned_ulp_mean"] < 0.30
    assert found == "biased"


@pytest.mark.parametrize("policy", ["stored", "fused"])
def test_the_shift_cannot_see_sinks_in_two_tiles(policy: str) -> None:
    def o(fix: str, placement: str, tile: int) -> str:
        _, _, found = run(
            "bias/tile_size", f"eager-{policy}/{fix}", seeds=2, placement=placement, options={"tile": tile}
        )
        return found.digests["o"]

    assert o("stabilized", "across_tiles", 128) == o("stock", "across_tiles", 128)
    assert o("stabilized", "across_tiles", 0) != o("stock", "across_tiles", 0)
    assert o("stabilized", "same_tile", 128) != o("stock", "same_tile", 128)


# ---- bias/leak --------------------------------------------------------------------------------


def test_leak_of_stock() -> None:
    metrics, found, measurement = run("bias/leak", "eager-stored/stock")
    assert metrics["leak_mean"] == pytest.approx(-2.1e-3, abs=1.5e-4)
    assert metrics["leak_coherence"] > 0.99
    assert metrics["leak_reference_rms"] < 1e-14
    assert metrics["true_dq_abs_mean"] < 1e-6
    assert found == "leaks"
    assert {"o", "dq", "dk", "dv"} <= set(measurement.digests)


@pytest.mark.parametrize(
    ("kernel", "bound", "expected"),
    [
        ("eager-stored/delta_fp32", 1e-6, "pass"),
        ("eager-fused/delta_fp32", 1e-6, "pass"),
        ("eager-fused/delta_dp", 1e-6, "pass"),
        ("sdpa-math/stock", 1e-7, "pass"),
        ("eager-fused/stochastic", 5e-5, "pass"),
    ],
)
def test_kernels_that_do_not_leak(kernel: str, bound: float, expected: str) -> None:
    metrics, found, _ = run("bias/leak", kernel)
    assert abs(metrics["leak_mean"]) < bound
    assert found == expected


def test_one_sink_does_not_leak_in_stock() -> None:
    for policy in ("stored", "fused"):
        metrics, found, _ = run("bias/leak", f"eager-{policy}/stock", repeats=1)
        assert abs(metrics["leak_over_delta"]) < 1e-4
        assert found == "pass"


def test_what_breaks_the_ties_decides_the_leak() -> None:
    same, _, _ = run("bias/leak", "eager-stored/stock")
    quiet, found, _ = run("bias/leak", "eager-stored/stock", other_values="quiet")
    assert found == "leaks"
    assert same["leak_mean"] < 2 * quiet["leak_mean"] < 0


@pytest.mark.parametrize(
    ("share", "z", "expected"),
    [
        (1e-4, 100, "pass"),  # at the floor
        (1.01e-4, 5, "leaks"),
        (-1.01e-4, -5, "leaks"),
        (1.0, 4.99, "pass"),
        (1.0, NAN, "inconclusive"),
        (1e-5, NAN, "pass"),
        (NAN, NAN, "out_of_range"),
        (NAN, INF, "out_of_range"),
    ],
)
def test_leak_verdict(share: float, z: float, expected: str) -> None:
    metrics = {"leak_over_delta": share, "leak_z": z, "abs_ulp_mean": 0.25}
    assert verdict("bias/leak", metrics) == expected


@pytest.mark.parametrize("error", [16.1, float("nan"), float("inf")])
def test_a_small_leak_of_a_wrong_output_is_no_pass(error: float) -> None:
    metrics = {"leak_over_delta": 1e-15, "leak_z": 0.0, "abs_ulp_mean": error}
    assert verdict("bias/leak", metrics) == "out_of_range"


def test_an_infinite_leak_is_out_of_range() -> None:
    metrics = {"leak_over_delta": float("inf"), "leak_z": float("inf"), "abs_ulp_mean": 0.25}
    assert verdict("bias/leak", metrics) == "out_of_range"


def test_leak_verdict_takes_its_thresholds() -> None:
    metrics = {"leak_over_delta": 0.01, "leak_z": -8.0, "abs_ulp_mean": 0.25}
    assert verdict("bias/leak", metrics, floor=0.01) == "pass"
    assert verdict("bias/leak", metrics, min_z=9.0) == "pass"
    assert verdict("bias/leak", metrics, floor=0.009, min_z=8.0) == "leaks"


# ---- bias/low_rank ----------------------------------------------------------------------------


def test_low_rank_of_stock_grows_like_n() -> None:
    metrics, found, measurement = run("bias/low_rank", "eager-stored/stock", seeds=2)
    assert metrics["growth_exponent_mean"] > 0.95
    assert metrics["rank1_share"] > 0.9
    assert metrics["drift_over_delta"] > 1e-3
    assert found == "biased"
    norm = measurement.series["norm"]
    assert len(norm) == 64
    assert norm[63] == pytest.approx(64 * metrics["drift_per_step"])
    assert norm[63] / norm[15] == pytest.approx(4, rel=0.1)


def test_low_rank_of_stochastic_rounding_averages_out() -> None:
    metrics, found, _ = run("bias/low_rank", "eager-fused/stochastic", seeds=2)
    assert 0.3 < metrics["growth_exponent_mean"] < 0.65
    assert found == "pass"


def test_low_rank_is_judged_by_its_size_too() -> None:
    # The residual leaves an error a thousandth as large; how it grows does not matter then.
    metrics, found, _ = run("bias/low_rank", "eager-stored/delta_fp32", seeds=2)
    assert metrics["drift_over_delta"] < 1e-5
    assert found == "pass"


def test_step_gradients_by_hand() -> None:
    case, params = case_and_params("bias/low_rank")
    problem = case.problem(params, torch.bfloat16, 1)
    inputs, ref = problem.inputs, problem.reference
    assert inputs.q.shape == (64, 1, 64, 64)
    x = torch.randn(1, 64, 64, 3, generator=torch.Generator().manual_seed(0)).double()
    delta = torch.randn(64, 1, 64, generator=torch.Generator().manual_seed(1)).double()
    found = step_gradients(delta, ref, x)
    assert found.shape == (1, 64, 64, 3)
    step = 5
    pk = ref.p[step, 0] @ ref.k[step, 0]
    expected = sum(ref.scale * delta[step, 0, t] * torch.outer(pk[t], x[0, step, t]) for t in range(64))
    torch.testing.assert_close(found[0, step], expected)


@pytest.mark.parametrize(
    ("exponent", "drift", "expected"),
    [
        (0.76, 2e-4, "biased"),
        (0.75, 2e-4, "pass"),  # at the threshold
        (0.99, 1e-4, "pass"),  # at the floor
        (0.5, 1.0, "pass"),
        (0.99, NAN, "out_of_range"),
        (NAN, INF, "out_of_range"),
        (NAN, 0.0, "pass"),  # no error at all: 0/0
    ],
)
def test_low_rank_verdict(exponent: float, drift: float, expected: str) -> None:
    metrics = {"growth_exponent_mean": exponent, "drift_over_delta": drift}
    assert verdict("bias/low_rank", metrics) == expected


# ---- bias/bf16_addition -----------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["eager-stored/stock", "eager-fused/stock", "sdpa-math/stock"])
@pytest.mark.parametrize(("residue", "expected"), [("same_sign", 0.47), ("opposite_sign", -0.46)])
def test_bf16_addition_follows_the_residue(kernel: str, residue: str, expected: float) -> None:
    metrics, found, _ = run("bias/bf16_addition", kernel, seeds=8, residue=residue)
    assert metrics["aligned_ulp_mean"] == pytest.approx(expected, abs=0.02)
    assert metrics["ideal_aligned_ulp_mean"] == pytest.approx(metrics["aligned_ulp_mean"], abs=1e-3)
    assert metrics["table_mismatches"] == 0
    assert found == "follows_residue"


def test_bf16_addition_is_broken_by_a_shift() -> None:
    metrics, found, _ = run("bias/bf16_addition", "eager-stored/stabilized", seeds=8)
    assert abs(metrics["aligned_ulp_mean"]) < 0.05
    assert found == "pass"


def test_every_pair_is_an_exact_tie() -> None:
    case, params = case_and_params("bias/bf16_addition")
    for seed in range(4):
        v = case.inputs(params, torch.bfloat16, seed).v[0, 0].double()
        total = v[0] + v[1]
        assert ((total.abs() >= 4) & (total.abs() < 8)).all()
        assert (total / 2.0**-5 % 1 == 0.5).all()
        assert (v[2].sign() == total.sign()).all()
    assert v[0, 0] == -2.40625
    assert v[1, 0] == -2.296875


def test_table_mismatches_finds_a_wrong_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert table_mismatches(torch.device("cpu")) == 0
    # Ties away from zero, as some hardware does: only the two exact ties differ.
    monkeypatch.setattr(
        "cases.bias.bf16_addition.round_mantissa",
        lambda x, bits: ((x.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32),
    )
    assert table_mismatches(torch.device("cpu")) == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "follows_residue"),
        ({"aligned_ulp_mean": -0.47, "aligned_ulp_z": -9.0}, "follows_residue"),
        ({"aligned_ulp_mean": 0.05}, "pass"),
        ({"aligned_ulp_z": NAN}, "inconclusive"),
        ({"nonfinite_fraction": 0.1}, "out_of_range"),
        ({"table_mismatches": 1.0}, "mismatch"),
        ({"table_mismatches": 1.0, "nonfinite_fraction": 1.0}, "mismatch"),
    ],
)
def test_bf16_addition_verdict(changes: dict[str, float], expected: str) -> None:
    metrics = {
        "aligned_ulp_mean": 0.47,
        "aligned_ulp_z": 50.0,
        "nonfinite_fraction": 0.0,
        "table_mismatches": 0.0,
        "abs_ulp_mean": 0.25,
    }
    assert verdict("bias/bf16_addition", metrics | changes) == expected


# ---- bias/normalizer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "params", "low", "high", "expected"),
    [
        ("eager-fused/stock", {}, 0, 0, "pass"),
        ("sdpa-flash/stock", {}, 0, 0, "pass"),
        ("eager-fused/stabilized+consistent_l", {"row_jitter": 0.0}, 0, 0, "pass"),
        ("eager-fused/shift_const", {}, -3.5e-3, -2e-3, "biased"),
        ("eager-fused/stabilized", {}, -1e-3, -3e-4, "biased"),
        # One and the same P̄ in every row: half an ulp below 1, every time.
        ("eager-fused/stabilized", {"row_jitter": 0.0}, -(2.0**-8), -(2.0**-8), "biased"),
        ("eager-stored/stock", {}, -1e-4, 1e-4, "inexact"),
    ],
)
def test_normalizer(kernel: str, params: dict[str, Any], low: float, high: float, expected: str) -> None:
    metrics, found, _ = run("bias/normalizer", kernel, **params)
    assert low <= metrics["normalizer_error_mean"] <= high
    assert found == expected
    assert (metrics["normalizer_exact_fraction"] == 1) == (expected == "pass")
    assert (metrics["normalizer_error_max"] == 0) == (expected == "pass")


@pytest.mark.parametrize(
    ("largest", "exact", "z", "expected"),
    [
        (0.0, 1.0, 0.0, "pass"),
        (0.01, 0.99, 4.99, "inexact"),
        (0.01, 0.99, -5.0, "biased"),
        (0.01, 0.0, INF, "biased"),
        (0.01, 0.99, NAN, "inexact"),  # one seed
        (NAN, 0.5, NAN, "out_of_range"),
        (NAN, 0.5, INF, "out_of_range"),
    ],
)
def test_normalizer_verdict(largest: float, exact: float, z: float, expected: str) -> None:
    metrics = {
        "normalizer_error_max": largest,
        "normalizer_exact_fraction": exact,
        "normalizer_error_z": z,
        "normalizer_error_mean": 1e-3,
    }
    assert verdict("bias/normalizer", metrics) == expected
    if expected == "biased":
        assert verdict("bias/normalizer", metrics, floor=0.01) == "inexact"


# ---- bias/shift_range -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "beta", "low", "high"),
    [
        ("eager-stored/stabilized", 2.0, 23.75, 23.75),  # (23 + ln 2)/(β − 1) = 23.7
        ("eager-stored/stabilized", 7.0, 3.953125, 3.953125),  # 3.949
        ("eager-fused/stabilized", 2.0, 80, 104),
        ("eager-fused/stabilized+consistent_l", 2.0, 80, 104),
    ],
)
@pytest.mark.parametrize("sign", ["positive", "negative"])
def test_shift_range_limits(kernel: str, beta: float, low: float, high: float, sign: str) -> None:
    metrics, found, _ = run("bias/shift_range", kernel, seeds=1, sign=sign, options={"beta": beta})
    if sign == "negative" and beta == 7:
        # The shift is 0 for negative maxima, whatever β.
        low = high = 23.75
    assert low <= metrics["row_max_limit"] <= high
    assert metrics["row_max_limit"] <= metrics["row_max_finite_limit"]
    assert metrics["wrong_fraction"] > 0.1
    assert found == "out_of_range"


@pytest.mark.parametrize("name", sorted(n for n in KERNELS if "stabilized" not in n))
@pytest.mark.parametrize("sign", ["positive", "negative"])
def test_other_kernels_have_no_limit(name: str, sign: str) -> None:
    metrics, found, _ = run("bias/shift_range", name, seeds=1, sign=sign)
    assert metrics["row_max_limit"] == metrics["row_max_finite_limit"] == INF
    assert metrics["wrong_fraction"] == 0
    assert metrics["monotone"] == 1
    assert found == "pass"


def test_one_maximum_never_shifts() -> None:
    metrics, found, _ = run("bias/shift_range", "eager-stored/stabilized", seeds=1, repeats=1)
    assert (metrics["row_max_limit"], found) == (INF, "pass")


@pytest.mark.parametrize(
    ("ok", "limit", "monotone"),
    [
        ([1, 1, 1, 1], INF, True),
        ([1, 1, 0, 0], 1 + 1 / 128, True),
        ([1, 1, 1, 0], 1 + 2 / 128, True),
        ([0, 0, 0, 0], 0.0, True),
        ([1, 0, 1, 1], 1.0, False),
        ([1, 0, 1, 0], 1.0, False),
        ([0, 1, 1, 1], 0.0, False),
        ([0, 1, 1, 0], 0.0, False),
        ([1, 1, 0, 1], 1 + 1 / 128, False),
        ([1], INF, True),
        ([0], 0.0, True),
    ],
)
def test_find_limit(ok: list[int], limit: float, monotone: bool) -> None:
    assert find_limit(torch.tensor(ok, dtype=torch.bool)) == (limit, monotone)


@pytest.mark.parametrize("first", [0, 1, 127, 128, 500, 1023])
def test_find_limit_over_all_rows(first: int) -> None:
    values = row_maxima()
    assert len(values) == 1024
    assert values[0] == 1
    assert values[-1] == 255
    ok = torch.arange(1024) < first
    assert find_limit(ok) == (float(values[first - 1]) if first else 0.0, True)
    hole = ok.clone()
    hole[-1] = True
    assert find_limit(hole)[1] == (first == 1023)  # then nothing fails at all


def test_row_maxima_are_every_bfloat16_value_in_their_range() -> None:
    start, stop = (int(torch.tensor(x).bfloat16().view(torch.int16)) for x in (1.0, 256.0))
    patterns = torch.arange(start, stop, dtype=torch.int16).view(torch.bfloat16)
    assert row_maxima().tolist() == patterns.double().tolist()


@pytest.mark.parametrize(
    ("limit", "expected"), [(23.75, "out_of_range"), (0.0, "out_of_range"), (INF, "pass")]
)
def test_shift_range_verdict(limit: float, expected: str) -> None:
    assert verdict("bias/shift_range", {"row_max_limit": limit}) == expected


# ---- determinism ------------------------------------------------------------------------------

TINY: dict[str, Any] = {"tokens": 32, "head_dim": 16}


@pytest.mark.parametrize("name", KERNELS)
def test_run_to_run_of_every_kernel(name: str) -> None:
    metrics, found, measurement = run("determinism/run_to_run", name, seeds=1, repeats=3, **TINY)
    assert metrics["distinct_max"] == 1
    outputs = {"o", "dq", "dk", "dv"} | ({"lse"} if name.startswith("eager") else set())
    assert set(metrics) == {f"distinct_{x}" for x in outputs} | {"distinct_max"}
    assert set(measurement.digests) == outputs
    assert found == "pass"


@pytest.mark.parametrize("name", KERNELS)
def test_batch_invariance_of_every_kernel(name: str) -> None:
    metrics, found, _ = run("determinism/batch_invariance", name, seeds=1, **TINY)
    if "stochastic" in name:  # its random bits come from the position in the batch
        assert metrics["alone_o"] > 0.1
        assert metrics["reversed_o"] > 0.1
        assert metrics["differing_max"] == max(metrics.values())
        assert found == "batch_dependent"
    else:
        assert set(metrics.values()) == {0.0}
        assert found == "pass"


@dataclass
class FakeKernel:
    """Eager-fused attention with one fault."""

    fault: str
    name: str = "fake/stock"
    fix: str = "stock"
    dtypes: frozenset[torch.dtype] = KERNELS["eager-fused/stock"].dtypes
    options: KernelOptions = field(default_factory=KernelOptions)
    option_names: frozenset[str] = frozenset()
    calls: int = 0

    version: int = 1
    strict: bool = False
    draws: bool = False

    def configure(self, **options: Any) -> FakeKernel:
        return self

    def reseeded(self, key: int) -> FakeKernel:
        return self

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        o = KERNELS["eager-fused/stock"](q, k, v, causal=causal, scale=scale)
        self.calls += 1
        change = torch.zeros_like(o)
        if self.fault == "third_call" and self.calls == 3:
            change[0, 0, 0, 0] = 1
        elif self.fault == "batch_size" and len(q) > 1:
            change[1, 0, 0, 0] = 1
        elif self.fault == "position":
            change[len(q) - 1, 0, 0, :8] = 1
        elif self.fault == "nan":
            return o * math.nan  # and NaN gradients
        return o + change

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Forward:
        lse = q.sum(-1).float()
        if self.fault == "lse":
            self.calls += 1
            lse = lse + self.calls
        return Forward(self(q, k, v, causal=causal, scale=scale), lse)

    def launch_facts(self, call: Call) -> dict[str, Any]:
        return {}


def test_run_to_run_finds_one_differing_call() -> None:
    # Each repeat calls twice; the third call is the second repeat's.
    for repeats in (2, 4):
        fake = FakeKernel("third_call")
        metrics, found, measurement = run("determinism/run_to_run", fake, seeds=1, repeats=repeats, **TINY)
        assert (metrics["distinct_o"], metrics["distinct_dq"]) == (2, 1)
        assert metrics["distinct_max"] == 2
        assert found == "nondeterministic"
        assert fake.calls == 2 * repeats
        _, _, sound = run("determinism/run_to_run", "eager-fused/stock", seeds=1, repeats=2, **TINY)
        assert measurement.digests["o"] == sound.digests["o"], "the first call's is recorded"


def test_run_to_run_looks_at_lse() -> None:
    metrics, found, _ = run("determinism/run_to_run", FakeKernel("lse"), seeds=1, repeats=5, **TINY)
    assert metrics["distinct_lse"] == metrics["distinct_max"] == 5
    assert metrics["distinct_o"] == 1
    assert found == "nondeterministic"


def test_batch_invariance_finds_dependence_on_the_batch_size() -> None:
    metrics, found, _ = run("determinism/batch_invariance", FakeKernel("batch_size"), seeds=1, **TINY)
    total = 4 * 4 * 32 * 16
    assert metrics["alone_o"] == 1 / total
    assert metrics["reversed_o"] == 2 / total
    assert metrics["alone_dq"] == 0
    assert found == "batch_dependent"


def test_batch_invariance_finds_dependence_on_the_position() -> None:
    metrics, found, _ = run("determinism/batch_invariance", FakeKernel("position"), seeds=1, **TINY)
    assert metrics["alone_o"] == 3 * 8 / (4 * 4 * 32 * 16)  # alone, everyone is last
    assert metrics["reversed_o"] == 2 * 8 / (4 * 4 * 32 * 16)
    assert metrics["differing_max"] == metrics["alone_o"]
    assert found == "batch_dependent"


def test_nan_outputs_are_the_same_everywhere() -> None:
    _, found, _ = run("determinism/batch_invariance", FakeKernel("nan"), seeds=1, **TINY)
    assert found == "pass"
    metrics, found, _ = run("bias/tie_break", FakeKernel("nan"), seeds=2)
    assert found == "out_of_range"
    assert metrics["nonfinite_fraction"] == 1
    limits, _, _ = run("bias/shift_range", FakeKernel("nan"), seeds=1)
    assert limits["row_max_limit"] == limits["row_max_finite_limit"] == 0


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("bias/")])
@pytest.mark.parametrize("seeds", [1, 2])
def test_a_kernel_that_gives_nan_is_out_of_range(name: str, seeds: int) -> None:
    assert run(name, FakeKernel("nan"), seeds=seeds)[1] == "out_of_range"


@pytest.mark.parametrize(
    ("distinct", "expected"), [(1.0, "pass"), (2.0, "nondeterministic"), (20.0, "nondeterministic")]
)
def test_run_to_run_verdict(distinct: float, expected: str) -> None:
    assert verdict("determinism/run_to_run", {"distinct_max": distinct}) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, "pass"), (1e-9, "batch_dependent"), (1.0, "batch_dependent"), (NAN, "batch_dependent")],
)
def test_batch_invariance_verdict(share: float, expected: str) -> None:
    assert verdict("determinism/batch_invariance", {"differing_max": share}) == expected


# ---- parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "match"),
    [
        ("bias/tie_break", {"repeat": 2}, "repeat"),
        ("bias/tie_break", {"repeats": 0}, "repeats"),
        ("bias/tie_break", {"repeats": 2.5}, "repeats"),
        ("bias/tie_break", {"repeats": "2"}, "repeats"),
        ("bias/tie_break", {"gap": -1.0}, "gap"),
        ("bias/tie_break", {"gap": NAN}, "gap"),
        ("bias/tie_break", {"value_sign": "both"}, "value_sign"),
        ("bias/leak", {"floor": 2.0}, "floor"),
        ("bias/shift_range", {"sign": "zero"}, "sign"),
        ("bias/bf16_addition", {"residue": "none"}, "residue"),
        ("bias/tile_size", {"placement": "anywhere"}, "placement"),
        ("determinism/run_to_run", {"repeats": 1}, "repeats"),
        ("determinism/run_to_run", {"heads": 3, "kv_heads": 2}, "heads: 3"),
        ("determinism/batch_invariance", {"batch": 1}, "batch"),
    ],
)
def test_parameters_are_strict(name: str, params: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        load_case(name).Params(**params)


@cache
def sinks_of(placement: str) -> Tensor:
    case, params = case_and_params("bias/tile_size", placement=placement)
    k = case.inputs(params, torch.bfloat16, 0).k
    return (k[0, 0, :, 1] == 4).nonzero().flatten()


def test_sinks_stand_where_they_should() -> None:
    assert sinks_of("same_tile").tolist() == [0, 1]
    assert sinks_of("across_tiles").tolist() == [0, 511]
    case, params = case_and_params("bias/leak", repeats=3)
    x = case.inputs(params, torch.bfloat16, 0)
    assert torch.equal(x.k[:, :, 0], x.k[:, :, 2])  # alike
    assert not torch.equal(x.v[:, :, 0], x.v[:, :, 2])  # but not their values
    assert (x.q[..., 0] == 0).all()
    assert (x.k[..., 0] == 4).all()
    scores = 0.125 * (x.q.double() @ x.k.double().mT)
    assert (scores.amax(-1) == scores[..., 0]).all()
    assert scores[..., 0].mean() == pytest.approx(12, abs=0.1)
    assert scores[..., 0].std() == pytest.approx(0.5, abs=0.05)


class Stop(Exception):
    """Raised by a kernel that has seen enough."""


class Recorder(FusedKernel):
    """Refuses its first call, which it names."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        raise Stop(Call.with_tensors(q, k, causal))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Forward:
        raise Stop(Call.with_tensors(q, k, causal))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_the_call_that_launch_facts_are_of_is_the_first(name: str, dtype: torch.dtype) -> None:
    case, seeds = load_case(name), 1 if name in ("crash/ladder", "crash/gpt2") else 2
    small = {"crash/drift": {"steps": 10}, "crash/ladder": {"heads": 2}, "speed/attention": TINY}
    params = case.Params(**small.get(name, {}))
    problem = case.problem(params, dtype, seeds)
    with pytest.raises(Stop) as stopped:
        case.run(Recorder("stock"), CPU, problem)
    assert stopped.value.args[0] == case.call(problem, CPU.device)
