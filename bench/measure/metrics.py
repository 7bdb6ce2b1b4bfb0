"""Metrics of a row. Signed errors first: a bias of 0.2 ulp is invisible in a maximum.

Rows of one input share V, so they are not independent: every figure is aggregated within a seed
first, and the standard error is taken over seeds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bench.measure.numerics import Format, round_float64, tie_distance, ulp
from bench.measure.reference import Reference

NEAR_TIE = 2.0**-6  # ulps


def per_seed(x: Tensor, seeds: int) -> Tensor:
    """[seeds·B, ...] → [seeds, everything else]"""
    return x.reshape(seeds, -1)


def over_seeds(stem: str, values: Tensor) -> dict[str, float]:
    """`<stem>_mean`, `<stem>_sem` and `<stem>_z` of one value a seed. One seed: no error, NaN."""
    values = values.double()
    mean = float(values.mean())
    if values.numel() < 2:
        return {f"{stem}_mean": mean, f"{stem}_sem": math.nan, f"{stem}_z": math.nan}
    sem = float(values.std(correction=1)) / math.sqrt(values.numel())
    return {f"{stem}_mean": mean, f"{stem}_sem": sem, f"{stem}_z": ratio(mean, sem)}


def ratio(mean: float, sem: float) -> float:
    """mean / sem; ±Inf for a mean without spread, 0 for no mean without spread, NaN for NaN."""
    if sem == 0:
        return math.copysign(math.inf, mean) if mean else 0.0
    return mean / sem


def output_metrics(o: Tensor, ref: Reference, fmt: Format, seeds: int) -> dict[str, float]:
    """Signed error of O in ulps of its storage format, and the coherence of the δ error it causes.

    Args: o [seeds·B, H, T, D] as stored; ref its FP64 reference; fmt the storage format.
    """
    error = o.double() - ref.o
    e = error / ulp(ref.o, fmt)  # signed, in ulps
    magnitude = e.abs()
    worst = int(magnitude.nan_to_num(nan=math.inf, posinf=math.inf).argmax())
    return {
        "signed_ulp_mean": float(e.mean()),
        **over_seeds("aligned_ulp", per_seed(e * ref.o.sign(), seeds).mean(1)),
        "abs_ulp_mean": float(magnitude.mean()),
        "abs_ulp_p99": _quantile(magnitude, 0.99),
        "abs_ulp_max": float(magnitude.flatten()[worst]),
        "abs_ulp_max_index": float(worst),  # into the flattened [seeds·B, H, T, D]
        "nonfinite_fraction": float((~o.isfinite()).double().mean()),
        "delta_coherence": coherence((ref.do * error).sum(-1), seeds),
    }


def input_metrics(ref: Reference, fmt: Format, seeds: int) -> dict[str, float]:
    """What the inputs expose a kernel to: near-ties of O and of Σ P̄V, repeated row maxima.

    `ideal_aligned_ulp_mean` is the bias of the exact O rounded once: no kernel can be told to do
    better than that by rounding to nearest.
    """
    repeats = (ref.scores >= ref.row_max).sum(-1)
    ideal = torch.from_numpy(round_float64(ref.o.numpy(), fmt))
    aligned = (ideal - ref.o) / ulp(ref.o, fmt) * ref.o.sign()
    return {
        "ideal_aligned_ulp_mean": float(per_seed(aligned, seeds).mean()),
        "tie_fraction": _near_ties(ref.o, fmt),
        "accumulator_tie_fraction": _near_ties(ref.unnormalized_o, fmt),
        "repeated_max_fraction": float((repeats > 1).double().mean()),
        "max_p_mean": float(ref.p.amax(-1).mean()),
    }


def coherence(delta_error: Tensor, seeds: int) -> float:
    """|Σ δ_err| / Σ |δ_err| over the rows of a seed, averaged: 1 = every row errs to the same side."""
    rows = per_seed(delta_error, seeds)
    total = rows.abs().sum(1)
    return float(torch.where(total == 0, 0.0, rows.sum(1).abs() / total).mean())


def signed_coherence(error: Tensor, over: tuple[int, ...] | None = None) -> Tensor:
    """Σ error / Σ |error| over the given dimensions or all, with its sign; 0 where there is no error."""
    total = error.abs().sum(over)
    return torch.where(total == 0, 0.0, error.sum(over) / total)


def leak_metrics(leak: Tensor, ref: Reference, seeds: int) -> dict[str, float]:
    """Metrics of rowsum(dS), which is exactly 0 in exact arithmetic.

    Args: leak [seeds·B, H, T], measured through a probe channel. `leak_relative` is its rms over the
    mean of Σ_t |dS|; `leak_over_delta` its mean over the mean |δ|, the relative error of δ.
    """
    leak = leak.double()
    rms = float(leak.square().mean().sqrt())
    return {
        **over_seeds("leak", per_seed(leak, seeds).mean(1)),
        "leak_rms": rms,
        "leak_relative": rms / float(ref.ds.abs().sum(-1).mean()),
        "leak_over_delta": float(leak.mean()) / float(ref.delta.abs().mean()),
        "leak_coherence": coherence(leak, seeds),
        "leak_reference_rms": float(ref.ds.sum(-1).square().mean().sqrt()),
    }


def _near_ties(x: Tensor, fmt: Format) -> float:
    return float((tie_distance(x, fmt) < NEAR_TIE).double().mean())


def _quantile(x: Tensor, q: float) -> float:
    """The smallest element that at least a share `q` does not exceed; NaN counts as largest."""
    flat = x.flatten().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(flat.kthvalue(max(1, math.ceil(q * flat.numel()))).values)
