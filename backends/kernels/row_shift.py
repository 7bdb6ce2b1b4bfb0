"""The row shift of one score tile: what a fix proposes in place of the row maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from backends.fixes import SHIFT_CONST, Fix


def row_shift(s: Tensor, fix: Fix, beta: float, tol: float) -> tuple[Tensor, Tensor]:
    """The shift that one tile proposes for each row, before the running maximum.

    The paper's rule: r_m = rowmax(S), r_s = number of entries with S >= r_m − tol. If r_s > 1, the
    shift is β·r_m for r_m > 0 and 0 for r_m < 0; else it is r_m. A masked entry (−inf) is never
    counted, so a fully masked tile proposes −inf and fires nothing.

    Args: s [..., T, tile] FP32. Returns shift [..., T, 1] and fired [..., T, 1] (bool).
    """
    row_max = s.amax(-1, keepdim=True)
    if fix.shift == "repeated":
        # Where row_max is −inf the comparison would hold for every masked entry: exclude them.
        repeats = ((s >= row_max - tol) & (s > float("-inf"))).sum(-1, keepdim=True)
        fired = (repeats > 1) & (row_max != 0)
        shifted = torch.where(row_max > 0, beta * row_max, torch.zeros_like(row_max))
        return torch.where(fired, shifted, row_max), fired
    fired = torch.zeros_like(row_max, dtype=torch.bool)
    if fix.shift == "const":
        return row_max + SHIFT_CONST, fired
    return row_max, fired
