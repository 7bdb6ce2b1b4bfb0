"""`bias/tie_break`: do repeated row maxima make O round to one side?"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from bench.measure.inputs import Inputs
from cases.bias.output_bias import BiasCase, BiasParams
from cases.sinks import ValueSign, sink_inputs


class Params(BiasParams):
    repeats: Annotated[int, Field(ge=1, le=16)] = 2  # keys that share each row's maximum
    gap: Annotated[float, Field(ge=0, le=80)] = 12.0  # the row maximum; other scores are about ±2
    row_jitter: Annotated[float, Field(ge=0, le=8)] = 0.5  # spread of the row maxima
    value_sign: ValueSign = "mixed"


class TieBreak(BiasCase[Params]):
    """Claim (arXiv 2510.04212, section 3): when the row maximum repeats, several P̄ are exactly 1; the
    sum of two same-sign BF16 values needs one bit more than BF16 has, so half of the sums are exact
    ties, and the residue of the other tokens pushes every tie to the larger magnitude.

    Inputs: 8 × 256 queries, 128 keys, head_dim 64, α = 1/8. `repeats` identical keys hold the row
    maximum `gap` + `row_jitter`·N(0,1); values are ±(2.3 + 0.3·N(0,1)) with one sign per channel.

    Verdict: `biased` if the error of O, in ulps and in the direction of O, has a mean beyond
    `floor_ulp` that is `min_z` standard errors from 0; `pass` otherwise.

    Findings: eager-stored/stock is biased by 0.22 ulp at repeats 2, gap 12, in every row
    (δ coherence 1.00), and by nothing without repeats. The shift β = 2 removes it where row maxima
    vary, and brings a coherent bias of its own where rows share their maximum: P̄ is then one and the
    same non-representable number, cast in the numerator and exact in ℓ. `consistent_l` removes that
    part (in eager-stored as long as there is one tile). A constant shift biases every fused row,
    repeats or not.
    """

    name = "bias/tie_break"
    subject = "bias"
    told_at = {"dtype": "bfloat16", "repeats": 2, "gap": 12.0, "value_sign": "mixed"}

    def inputs(self, params: Params, dtype: torch.dtype, seed: int) -> Inputs:
        return sink_inputs(
            self.name,
            seed,
            dtype,
            sinks=list(range(params.repeats)),
            gap=params.gap,
            row_jitter=params.row_jitter,
            value_sign=params.value_sign,
        )
