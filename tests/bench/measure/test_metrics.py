"""Metrics on errors made by hand: what is put in must come out, in ulps and with its sign."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.measure.inputs import Inputs
from bench.measure.metrics import (
    coherence,
    input_metrics,
    leak_metrics,
    output_metrics,
    over_seeds,
    per_seed,
)
from bench.measure.numerics import FORMATS, ulp
from bench.measure.reference import Reference, attention_reference

BF16 = FORMATS[torch.bfloat16]
SEEDS = 4


def one_key(values: Tensor, do: Tensor | None = None) -> Reference:
    """A problem with one key, so that O = V exactly: values and do are [seeds, 1, T, D] with T = 1."""
    q = torch.zeros(*values.shape[:3], values.shape[3])
    return attention_reference(Inputs(q, q, values, torch.ones_like(values) if do is None else do))


def signed_values() -> Tensor:
    """[SEEDS, 1, 1, 8], half of them negative, over several binades; all on the BF16 grid."""
    values = torch.tensor([1.0, -1.0, 1.5, -1.5, 4.0, -4.0, 0.25, -0.25])
    return values.repeat(SEEDS, 1)[:, None, None].contiguous()


# ---- aggregation ------------------------------------------------------------------------------


def test_over_seeds_known_answer() -> None:
    found = over_seeds("x", torch.tensor([1.0, 2.0, 3.0, 6.0]))
    sem = math.sqrt((4 + 1 + 0 + 9) / 3) / 2
    assert found == {
        "x_mean": 3.0,
        "x_sem": pytest.approx(sem, rel=1e-12),
        "x_z": pytest.approx(3 / sem, rel=1e-12),
    }
    assert over_seeds("x", torch.tensor([-1.0, -3.0]))["x_z"] == pytest.approx(-2)


def test_over_seeds_of_one_seed_has_no_error() -> None:
    found = over_seeds("x", torch.tensor([0.25]))
    assert found["x_mean"] == 0.25
    assert math.isnan(found["x_sem"])
    assert math.isnan(found["x_z"])


@pytest.mark.parametrize(("value", "z"), [(0.5, math.inf), (-0.5, -math.inf), (0.0, 0.0)])
def test_over_seeds_without_spread(value: float, z: float) -> None:
    found = over_seeds("x", torch.full((5,), value))
    assert found == {"x_mean": value, "x_sem": 0.0, "x_z": z}


@pytest.mark.parametrize("values", [[math.nan, 1.0], [math.nan, math.nan], [math.nan]])
def test_over_seeds_of_nan_is_nan(values: list[float]) -> None:
    found = over_seeds("x", torch.tensor(values))
    assert all(math.isnan(value) for value in found.values()), found


def test_over_seeds_averages_in_float64() -> None:
    values = torch.tensor([2.0**24, 1.0, 1.0, 1.0], dtype=torch.float32)
    assert over_seeds("x", values)["x_mean"] == (2.0**24 + 3) / 4


def test_per_seed_keeps_a_seed_together() -> None:
    x = torch.arange(12).reshape(4, 1, 3)  # two seeds of batch two
    assert per_seed(x, 2).tolist() == [list(range(6)), list(range(6, 12))]


def test_coherence_known_answers() -> None:
    same, mixed = torch.full((2, 1, 4), -0.5), torch.tensor([[[1.0, -1.0, 1.0, -1.0]]])
    assert coherence(same, 2) == 1
    assert coherence(mixed, 1) == 0
    assert coherence(torch.tensor([[[3.0, -1.0]]]), 1) == 0.5
    # Within a seed, then averaged: two seeds that err to opposite sides are both coherent.
    assert coherence(torch.tensor([[[1.0, 1.0]], [[-1.0, -1.0]]]), 2) == 1
    assert coherence(torch.cat([same[:1], mixed]), 2) == 0.5
    assert coherence(torch.zeros(2, 1, 4), 2) == 0


def test_coherence_of_nan_is_nan() -> None:
    assert math.isnan(coherence(torch.tensor([[[1.0, math.nan]]]), 1))


# ---- output -----------------------------------------------------------------------------------


def test_quarter_ulp_away_from_zero() -> None:
    ref = one_key(signed_values())
    o = ref.o + 0.25 * ulp(ref.o, BF16) * ref.o.sign()
    found = output_metrics(o, ref, BF16, SEEDS)
    assert found["aligned_ulp_mean"] == 0.25
    assert found["aligned_ulp_sem"] == 0
    assert found["aligned_ulp_z"] == math.inf
    assert found["signed_ulp_mean"] == 0  # as many positive values as negative ones
    assert found["abs_ulp_mean"] == found["abs_ulp_p99"] == found["abs_ulp_max"] == 0.25
    assert found["nonfinite_fraction"] == 0
    # do = 1: the δ error of a row is the sum of its errors, which cancel here.
    assert found["delta_coherence"] == 0


def test_quarter_ulp_upward_and_toward_zero() -> None:
    ref = one_key(signed_values())
    up = output_metrics(ref.o + 0.25 * ulp(ref.o, BF16), ref, BF16, SEEDS)
    assert up["signed_ulp_mean"] == 0.25
    assert up["aligned_ulp_mean"] == 0
    assert up["delta_coherence"] == 1
    shrunk = ref.o - 0.5 * ulp(ref.o, BF16) * ref.o.sign()
    assert output_metrics(shrunk, ref, BF16, SEEDS)["aligned_ulp_mean"] == -0.5


def test_the_unit_is_the_ulp_of_the_storage_format() -> None:
    ref = one_key(signed_values())
    o = ref.o + 2.0**-10 * ref.o.abs().log2().floor().exp2()
    for dtype, expected in ((torch.float16, 1.0), (torch.bfloat16, 2.0**-3)):
        assert output_metrics(o, ref, FORMATS[dtype], SEEDS)["signed_ulp_mean"] == expected


def test_standard_error_comes_from_seeds() -> None:
    ref = one_key(signed_values())
    step = torch.tensor([0.0, 0.25, 0.5, 0.25], dtype=torch.float64)[:, None, None, None]
    found = output_metrics(ref.o + step * ulp(ref.o, BF16) * ref.o.sign(), ref, BF16, SEEDS)
    assert found["aligned_ulp_mean"] == 0.25
    sem = math.sqrt(2 * 0.25**2 / 3) / 2
    assert found["aligned_ulp_sem"] == pytest.approx(sem, rel=1e-12)


def test_worst_value_and_quantile() -> None:
    values = torch.ones(1, 1, 1, 200)
    ref = one_key(values)
    error = torch.zeros(200, dtype=torch.float64)
    error[:3] = torch.tensor([0.125, 0.25, 0.5])
    error[77] = -3.0
    found = output_metrics(ref.o + error * 2.0**-7, ref, BF16, 1)
    assert found["abs_ulp_max"] == 3
    assert found["abs_ulp_max_index"] == 77
    assert found["abs_ulp_p99"] == 0.25  # the 198th smallest of 200
    assert found["signed_ulp_mean"] == pytest.approx(-2.125 / 200)


def test_delta_coherence_weighs_errors_with_do() -> None:
    # Two rows; the errors are alike but do turns one of them around.
    values = torch.ones(2, 1, 1, 4)
    do = torch.ones(2, 1, 1, 4)
    do[1] = -1
    ref = one_key(values, do)
    o = ref.o + 2.0**-7
    assert output_metrics(o, ref, BF16, seeds=2)["delta_coherence"] == 1  # each seed on its own
    assert output_metrics(o, ref, BF16, seeds=1)["delta_coherence"] == 0


def test_exact_output_has_no_error() -> None:
    ref = one_key(signed_values())
    found = output_metrics(ref.o.bfloat16(), ref, BF16, SEEDS)
    for name in ("signed_ulp_mean", "aligned_ulp_mean", "aligned_ulp_z", "abs_ulp_max"):
        assert found[name] == 0, name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_outputs_are_counted_and_found(bad: float) -> None:
    ref = one_key(signed_values())
    o = ref.o.clone()
    o[1, 0, 0, 3] = bad
    found = output_metrics(o, ref, BF16, SEEDS)
    assert found["nonfinite_fraction"] == 1 / 32
    assert found["abs_ulp_max_index"] == 8 + 3
    assert not math.isfinite(found["abs_ulp_max"])
    assert not math.isfinite(found["signed_ulp_mean"])
    assert not math.isfinite(found["aligned_ulp_mean"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_counts_as_the_largest_error_in_the_quantile(bad: float) -> None:
    ref = one_key(torch.ones(1, 1, 1, 200))
    o = ref.o.clone()
    o[..., 0] = bad
    assert output_metrics(o, ref, BF16, 1)["abs_ulp_p99"] == 0
    o[..., :3] = bad
    assert output_metrics(o, ref, BF16, 1)["abs_ulp_p99"] == math.inf


# ---- inputs -----------------------------------------------------------------------------------


def with_o(o: Tensor, lse: Tensor | None = None) -> Reference:
    ref = replace(one_key(torch.ones(*o.shape)), o=o)
    return ref if lse is None else replace(ref, lse=lse)


def test_tie_fraction_of_values_made_by_hand() -> None:
    tie, near, far, exact = 1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-14, 1 + 2.0**-8 + 2.0**-13, 1.0
    o = torch.tensor([tie, -tie, near, far, exact, 4 * tie, 0.5, -1.25], dtype=torch.float64)
    found = input_metrics(with_o(o[None, None, None]), BF16, 1)
    assert found["tie_fraction"] == 4 / 8  # far lies exactly 2^-6 ulp off, which is no longer near


def test_accumulator_ties_are_those_of_the_unnormalised_sum() -> None:
    # ℓ = 2 keeps a tie of O a tie of Σ P̄V; ℓ = 3 makes it 1.5 + 3/4 ulp.
    o = torch.full((1, 1, 1, 4), (1 + 2.0**-8) / 2, dtype=torch.float64)
    o[..., 0] = 0.5
    for total, expected in ((2, 3 / 4), (3, 0)):
        lse = torch.full((1, 1, 1), math.log(total), dtype=torch.float64)
        found = input_metrics(with_o(o, lse=lse), BF16, 1)
        assert found["accumulator_tie_fraction"] == expected
        assert found["tie_fraction"] == 3 / 4


def test_ideal_rounding_of_ties() -> None:
    # One tie that rounds to even below (−½ ulp) and one above (+½ ulp, of a negative value).
    o = torch.tensor([1 + 2.0**-8, -(1 + 3 * 2.0**-8), 1.0, 1.0], dtype=torch.float64)
    found = input_metrics(with_o(o[None, None, None]), BF16, 1)
    assert found["ideal_aligned_ulp_mean"] == 0
    found = input_metrics(with_o(o[:1][None, None, None]), BF16, 1)
    assert found["ideal_aligned_ulp_mean"] == -0.5


def test_repeated_maxima_and_max_p() -> None:
    # Three rows over four keys: one maximum, two, and all four.
    q = torch.eye(3)[None, None] * 2
    k = torch.tensor([[1.0, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 1]])[None, None]
    v = torch.ones(1, 1, 4, 3)
    ref = attention_reference(Inputs(q, k, v, torch.ones(1, 1, 3, 3), scale=1.0))
    found = input_metrics(ref, BF16, 1)
    assert found["repeated_max_fraction"] == pytest.approx(2 / 3)
    e = math.exp(2)
    assert found["max_p_mean"] == pytest.approx((e / (e + 3) + e / (2 * e + 2) + 0.25) / 3)


# ---- leak -------------------------------------------------------------------------------------


def leak_reference() -> Reference:
    """Two seeds, three rows, δ = ±2 and dS = ±1: two equal scores over values 4 and 0, do = 1."""
    q = torch.zeros(2, 1, 3, 1)
    v = torch.tensor([4.0, 0.0])[None, None, :, None].repeat(2, 1, 1, 1)
    return attention_reference(Inputs(q, torch.zeros_like(v), v, torch.ones(2, 1, 3, 1), scale=1.0))


def test_leak_known_answer() -> None:
    ref = leak_reference()
    leak = torch.tensor([[[1.0, 1.0, 4.0]], [[2.0, 2.0, 5.0]]]) * 1e-3
    found = leak_metrics(leak, ref, 2)
    assert found["leak_mean"] == pytest.approx(2.5e-3)
    assert found["leak_sem"] == pytest.approx(0.5e-3)
    assert found["leak_z"] == pytest.approx(5)
    rms = math.sqrt((1 + 1 + 16 + 4 + 4 + 25) / 6) * 1e-3
    assert found["leak_rms"] == pytest.approx(rms)
    assert found["leak_relative"] == pytest.approx(rms / 2)  # Σ_t |dS| = 2
    assert found["leak_over_delta"] == pytest.approx(1.25e-3)  # |δ| = 2
    assert found["leak_coherence"] == 1
    assert found["leak_reference_rms"] == 0


def test_leak_keeps_its_sign_and_sees_a_mean_of_zero() -> None:
    ref = leak_reference()
    found = leak_metrics(torch.full((2, 1, 3), -0.5), ref, 2)
    assert found["leak_mean"] == -0.5
    assert found["leak_over_delta"] == -0.25
    assert found["leak_z"] == -math.inf
    alternating = torch.tensor([[[1.0, -2.0, 1.0]], [[1.0, -2.0, 1.0]]])
    found = leak_metrics(alternating, ref, 2)
    assert found["leak_mean"] == found["leak_coherence"] == 0
    assert found["leak_rms"] == pytest.approx(math.sqrt(2))


def test_leak_of_nan_is_nan() -> None:
    leak = torch.zeros(2, 1, 3)
    leak[0, 0, 0] = math.nan
    found = leak_metrics(leak, leak_reference(), 2)
    for name in ("leak_mean", "leak_rms", "leak_over_delta", "leak_relative"):
        assert math.isnan(found[name]), name
