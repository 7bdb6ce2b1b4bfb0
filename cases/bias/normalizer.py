"""`bias/normalizer`: is the average of ones one?"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from backends.base import Backend, Kernel
from bench.measure.inputs import Inputs
from bench.measure.metrics import over_seeds, per_seed
from cases.base import Case, CaseParams, Measurement, Metrics, Problem
from cases.headline import Headline
from cases.passes import forward_only
from cases.sinks import sink_inputs

PROBE = 0  # v's channel that is 1 for every key


class Params(CaseParams):
    repeats: Annotated[int, Field(ge=1, le=16)] = 3
    gap: Annotated[float, Field(ge=0, le=80)] = 6.0
    row_jitter: Annotated[float, Field(ge=0, le=8)] = 0.5
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0  # of |mean error|; 0: whatever is significant
    min_z: Annotated[float, Field(ge=0, le=100)] = 5.0


class Normalizer(Case[Params]):
    """Claim (flash-attention pull request 2721): ℓ sums P in FP32 while P·V uses P cast to the storage
    format, so with V = 1 the output is not exactly 1.

    Inputs: those of `bias/tie_break` with v[…, 0] = 1 for every key; O[…, 0] must be 1 in every row.

    Verdict: `pass` if every output is exactly 1, `inexact` if some are off, `biased` if their mean
    is beyond `floor` and `min_z` standard errors from 0.

    Findings: with one representable P̄ = 1 on top the error hides below half an ulp; the shifts, which
    make the largest P̄ non-representable, bring it out. `consistent_l` removes it in eager-fused; in
    eager-stored Ō is rounded before the division, and an unrounded ℓ makes that visible.
    """

    name = "bias/normalizer"
    headline = Headline(
        "normalizer_error_mean", "mean of O − 1 where V = 1", "{:+.1e}", "normalizer_error_sem"
    )

    def inputs(self, params: Params, dtype: torch.dtype, seed: int) -> Inputs:
        inputs = sink_inputs(
            self.name,
            seed,
            dtype,
            sinks=list(range(params.repeats)),
            gap=params.gap,
            row_jitter=params.row_jitter,
            value_sign="mixed",
        )
        inputs.v[..., PROBE] = 1
        return inputs

    def run(self, kernel: Kernel, backend: Backend, problem: Problem[Params]) -> Measurement:
        inputs = problem.inputs
        o, digests = forward_only(kernel, backend, inputs)
        error = o[..., PROBE].double() - 1
        metrics = {
            **over_seeds("normalizer_error", per_seed(error, problem.seeds).mean(1)),
            "normalizer_error_max": float(error.abs().max()),
            "normalizer_exact_fraction": float((error == 0).double().mean()),
        }
        return Measurement(metrics, digests)

    def verdict(self, params: Params, metrics: Metrics) -> str:
        if metrics["normalizer_error_max"] != metrics["normalizer_error_max"]:
            return "out_of_range"
        if metrics["normalizer_exact_fraction"] == 1:
            return "pass"
        significant = abs(metrics["normalizer_error_z"]) >= params.min_z
        large = abs(metrics["normalizer_error_mean"]) > params.floor
        return "biased" if significant and large else "inexact"
