"""`bias/shift_range`: up to which row maximum can a kernel's row shift be trusted?"""

from __future__ import annotations

import bisect
import math
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from backends.base import Backend, Kernel
from bench.measure.inputs import Inputs, key_of, normal
from bench.measure.numerics import FORMATS, ulp
from cases.base import Case, CaseParams, Measurement, Metrics, Problem
from cases.headline import Headline
from cases.passes import forward_only

HEAD_DIM, KEYS, SCALE = 16, 16, 0.25
BELOW = 6.0  # the other keys' scores lie this far below the maximum


class Params(CaseParams):
    repeats: Annotated[int, Field(ge=1, le=8)] = 2
    sign: Literal["positive", "negative"] = "positive"  # of the row maximum
    tolerance_ulp: Annotated[float, Field(gt=0, le=64)] = 4.0


class ShiftRange(Case[Params]):
    """Claim (the shift's arithmetic): with k tied maxima at m > 0 and shift β·m, ℓ ≈ k·e^(−(β−1)m). It
    falls below the authors' clamp of 1e-10 at m = (23 + ln k)/(β − 1), and is 0/0 in FP32 beyond
    (88…104)/(β − 1). For m < 0 the rule's shift is 0 and ℓ ≈ k·e^m, whatever β.

    Inputs: one row for every BF16 value from 1 to 255 as row maximum |m|, held by `repeats` keys; the
    other 16 − `repeats` keys score 6 less. All rows are evaluated; the limit is found by bisection;
    `monotone` says whether every row beyond it fails too. Where one does not, the limit is the first
    failing row: in eager-fused single rows beyond it can be right by luck.

    Verdict: `out_of_range` if an O is off by more than `tolerance_ulp` or not finite, else `pass`.
    `row_max_limit` is the largest |m| before the first wrong row, `row_max_finite_limit` before the
    first NaN or Inf; Infinity where none was found.
    """

    name = "bias/shift_range"
    headline = Headline("row_max_limit", "largest safe |row maximum|", "{:.4g}", worst="low")
    subject = "range"
    told_at = {"dtype": "bfloat16", "sign": "positive"}

    def inputs(self, params: Params, dtype: torch.dtype, seed: int) -> Inputs:
        row_max = row_maxima() * (1 if params.sign == "positive" else -1)
        q = np.zeros((1, 1, len(row_max), HEAD_DIM))
        q[0, 0, :, 1], q[0, 0, :, 2] = row_max, 1
        k = np.zeros((1, 1, KEYS, HEAD_DIM))
        k[..., 1] = 1 / SCALE
        k[:, :, params.repeats :, 2] = -BELOW / SCALE
        v = 2.3 + 0.3 * normal(key_of(self.name, seed, "v"), k.shape)
        return Inputs.quantized(dtype, q, k, v, np.ones_like(q), scale=SCALE)

    def run(self, kernel: Kernel, backend: Backend, problem: Problem[Params]) -> Measurement:
        inputs, ref = problem.inputs, problem.reference
        o, digests = forward_only(kernel, backend, inputs)
        error = (o.double() - ref.o).abs() / ulp(ref.o, FORMATS[problem.dtype])
        finite = _rows(o.isfinite())
        right = finite & _rows(error <= problem.params.tolerance_ulp)
        limit, monotone = find_limit(right)
        metrics = {
            "row_max_limit": limit,
            "row_max_finite_limit": find_limit(finite)[0],
            "monotone": float(monotone),
            "wrong_fraction": float((~right).double().mean()),
        }
        return Measurement(metrics, digests)

    def verdict(self, params: Params, metrics: Metrics) -> str:
        return "out_of_range" if math.isfinite(metrics["row_max_limit"]) else "pass"


def row_maxima() -> np.ndarray:
    """Every BF16 value in [1, 256), ascending: 8 binades of 128."""
    return np.ravel([2.0**e * (1 + np.arange(128) / 128) for e in range(8)])


def _rows(ok: Tensor) -> Tensor:
    """[seeds, 1, T, D] → [T]: a row holds if it does in every seed and channel."""
    return ok.all(-1).all(0)[0]


def find_limit(ok: Tensor) -> tuple[float, bool]:
    """The largest row maximum before the first row that is not ok (inf if all are), and whether all
    rows beyond fail too. 0 if already the first one fails."""
    bad = (~ok).tolist()
    first = bisect.bisect_left(bad, True)
    monotone = all(bad[first:]) and not any(bad[:first])
    if not monotone:
        first = bad.index(True)
    if first == len(bad):
        return math.inf, True
    return float(row_maxima()[first - 1]) if first else 0.0, monotone
