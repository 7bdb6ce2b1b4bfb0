"""The known fixes, as independent switches: one table for every implementation, free of torch.

| fix | source | changes |
|---|---|---|
| `stock` | FlashAttention-2 | nothing |
| `stabilized` | arXiv 2510.04212, section 4 | the row shift, where a tile's row maximum repeats |
| `consistent_l` | flash-attention pull request 2721 | O divided by the sum of the cast P̄ that P̄V used |
| `delta_fp32` | the paper's "O in FP32" experiment | δ from O plus its rounding residual |
| `delta_dp` | the paper's δ experiment | δ = rowsum(dP∘P), as in standard attention |
| `stochastic` | – | O rounded stochastically, with counter-based bits |
| `shift_const` | the paper's negative control | every row shifted by 0.35 |

Ablations separate the error of the output from the error of δ. They are experiments, not cures, and
exist for `eager-ladder` alone. With O the unrounded output and e = round(O) − O:

| ablation | output | δ from |
|---|---|---|
| `o_fp32` | O | O |
| `delta_rounded` | O | round(O), a copy that the forward pass never saw |
| `stochastic_independent` | O rounded stochastically | a second, independent draw |
| `delta_flipped` | O + e, as stock | O − e: what rounding O did to δ, with its sign flipped |
| `delta_error_flipped` | O + e, as stock | the same with O from an unrounded P̄: all of δ's error flipped |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SHIFT_CONST = 0.35


@dataclass(frozen=True)
class Fix:
    """What a fix changes; the defaults are stock attention."""

    name: str
    shift: Literal["row_max", "repeated", "const"] = "row_max"
    normalizer: Literal["exact_p", "cast_p"] = "exact_p"
    delta: Literal["stored_o", "residual", "dp", "rounded", "redrawn", "flipped", "mirrored"] = "stored_o"
    stochastic: bool = False
    output: Literal["rounded", "unrounded"] = "rounded"


FIXES: dict[str, Fix] = {
    fix.name: fix
    for fix in (
        Fix("stock"),
        Fix("stabilized", shift="repeated"),
        Fix("consistent_l", normalizer="cast_p"),
        Fix("stabilized+consistent_l", shift="repeated", normalizer="cast_p"),
        Fix("delta_fp32", delta="residual"),
        Fix("delta_dp", delta="dp"),
        Fix("stochastic", stochastic=True),
        Fix("shift_const", shift="const"),
    )
}

ABLATIONS: dict[str, Fix] = {
    fix.name: fix
    for fix in (
        Fix("o_fp32", output="unrounded"),
        Fix("delta_rounded", output="unrounded", delta="rounded"),
        Fix("stochastic_independent", stochastic=True, delta="redrawn"),
        Fix("delta_flipped", delta="flipped"),
        Fix("delta_error_flipped", delta="mirrored"),
    )
}
ALL_FIXES = FIXES | ABLATIONS
