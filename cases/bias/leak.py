"""`bias/leak`: does the δ error of a kernel, as a black box, push dQ in one direction?"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field

from backends.base import Backend, Kernel
from bench.measure.inputs import Inputs
from bench.measure.metrics import leak_metrics
from bench.measure.numerics import FORMATS, ulp
from cases.base import MAX_ERROR_ULP, Case, CaseParams, Measurement, Metrics, Problem
from cases.headline import Headline
from cases.passes import forward_backward
from cases.sinks import SCALE, ValueSign, sink_inputs

PROBE_KEY = 4.0  # k[…, 0]; q[…, 0] = 0


class Params(CaseParams):
    repeats: Annotated[int, Field(ge=1, le=16)] = 2
    gap: Annotated[float, Field(ge=0, le=80)] = 12.0
    row_jitter: Annotated[float, Field(ge=0, le=8)] = 0.5
    value_sign: ValueSign = "mixed"
    other_values: Literal["same_sign", "quiet"] = "same_sign"  # of the tokens that are no sinks
    floor: Annotated[float, Field(ge=0, le=1)] = 1e-4  # of |mean leak| over mean |δ|
    min_z: Annotated[float, Field(ge=0, le=100)] = 5.0


class Leak(Case[Params]):
    """Claim (arXiv 2510.04212, sections 3.1-3.3): δ = rowsum(dO∘O) from a rounded O is wrong to one
    side, so rowsum(dS) is not 0 and dQ drifts along the keys.

    Probe: q's channel 0 is 0 and k's is 4, which leaves S untouched, yet dq[…, 0] = α·4·rowsum(dS):
    exactly 0 in exact arithmetic. What comes back is that kernel's δ error, row by row; it works on
    closed kernels. The sinks share one key but not their values, so dS is large while the true dQ is
    below 1e-7. The other tokens have e^-gap of the weight each; their values are like the sinks'
    (`same_sign`, as in `bias/tie_break`) or small (`quiet`).

    Verdict: `leaks` if the mean leak is beyond `floor` × mean |δ| and `min_z` standard errors from 0;
    `out_of_range` if dQ is not finite or O itself is wrong; `pass` otherwise. A leak of mean 0 passes
    here although it may still couple to dO in training.

    Findings (two sinks, gap 12): stock kernels that take δ from a rounded O leak 2e-4 to 2e-3, to one
    side; PyTorch's math path leaks 1e-9. With one sink stock leaks less than 1e-4. `delta_fp32` removes
    it everywhere. `delta_dp` does so in eager-fused only: in eager-stored LSE is made from a rounded ℓ,
    P's rows do not sum to 1, and only a δ taken from O compensates for that (with one sink too). The
    sign is not the algorithm's: quiet values turn PyTorch's CPU flash kernel around.
    """

    name = "bias/leak"
    outputs = ("o", "dq", "dk", "dv")
    headline = Headline("leak_mean", "mean rowsum(dS), exactly 0 in exact arithmetic", "{:+.1e}", "leak_sem")
    subject = "leak"
    told_at = {"dtype": "bfloat16", "repeats": 2, "gap": 12.0, "other_values": "same_sign"}

    def inputs(self, params: Params, dtype: torch.dtype, seed: int) -> Inputs:
        return sink_inputs(
            self.name,
            seed,
            dtype,
            sinks=list(range(params.repeats)),
            gap=params.gap,
            row_jitter=params.row_jitter,
            value_sign=params.value_sign,
            probe=PROBE_KEY,
            quiet_values=params.other_values == "quiet",
        )

    def run(self, kernel: Kernel, backend: Backend, problem: Problem[Params]) -> Measurement:
        inputs, ref = problem.inputs, problem.reference
        grads = forward_backward(kernel, backend, inputs)
        leak = grads.dq[..., 0].double() / (SCALE * PROBE_KEY)  # rowsum(dS), [seeds·B, H, T]
        metrics = leak_metrics(leak, ref, problem.seeds)
        error = (grads.o.double() - ref.o) / ulp(ref.o, FORMATS[problem.dtype])
        metrics["abs_ulp_mean"] = float(error.abs().mean())
        metrics["true_dq_abs_mean"] = float(ref.dq[..., 1:].abs().mean())
        digests = grads.digests()
        return Measurement(metrics, digests)

    def verdict(self, params: Params, metrics: Metrics) -> str:
        size, z = abs(metrics["leak_over_delta"]), metrics["leak_z"]
        if not math.isfinite(size) or not metrics["abs_ulp_mean"] <= MAX_ERROR_ULP:
            return "out_of_range"
        if size <= params.floor:
            return "pass"
        if z != z:
            return "inconclusive"
        return "leaks" if abs(z) >= params.min_z else "pass"
