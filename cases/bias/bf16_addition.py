"""`bias/bf16_addition`: does an exact tie follow its residue, as in the paper's example?"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from backends.base import Backend, Kernel
from bench.measure.inputs import Float64Array, Inputs, key_of, normal, raw_words, uniform
from bench.measure.numerics import FORMATS, Format, round_mantissa, ulp
from cases.base import Measurement, Metrics, Problem
from cases.bias.output_bias import BiasCase, BiasParams
from cases.sinks import HEAD_DIM, SCALE, SINK

GAP = 12.0
E_TO_GAP = 162754.79141900392  # e^12, a literal: no libm decides the inputs
QUERIES = 64
# a + b + r of the paper (section 3.3), the residue at two sizes and both signs, and their mirror.
PAPER = [(-2.40625, -2.296875, r) for r in (0.0, -8.6546e-4, 8.6546e-4, -(2.0**-12), 2.0**-12)]


class Params(BiasParams):
    residue: Annotated[str, Field(pattern="^(same|opposite)_sign$")] = "same_sign"
    row_jitter: Annotated[float, Field(ge=0, le=8)] = 0.5


class Bf16Addition(BiasCase[Params]):
    """Claim (arXiv 2510.04212, section 3.3): −2.40625 + −2.296875 is an exact tie in BF16; a residue of
    the same sign sets the sticky bits, so the sum rounds away from zero, every time.

    Two parts. `table_mismatches` adds the paper's numbers on the device and compares the device's
    cast to BF16 and our own rounding with exact arithmetic: it must be 0. The rest runs the kernel on
    64 such pairs a seed (one a channel; pair 0 is the paper's): two tied keys whose values sum to an
    exact tie, and a third with a residue of the same sign (or the opposite one).

    Verdict: `mismatch` if a cast is wrong; `follows_residue` if the error of O, in its own direction,
    passes the thresholds of `bias/tie_break`; `pass` otherwise.

    Findings: every kernel whose P̄ is exactly 1 and that rounds to nearest follows the residue by about
    half an ulp, to either side, and so does the exact O rounded once (`ideal_aligned_ulp_mean`): the
    mechanism belongs to the format, not to a faulty kernel. A shift that makes P̄ a non-representable
    number breaks the ties, in eager-fused with an error of its own.
    """

    name = "bias/bf16_addition"

    def inputs(self, params: Params, dtype: torch.dtype, seed: int) -> Inputs:
        a, b = _tied_pairs(seed, FORMATS[dtype])
        q = np.zeros((1, 1, QUERIES, HEAD_DIM))
        k, v = np.zeros((1, 1, 3, HEAD_DIM)), np.zeros((1, 1, 3, HEAD_DIM))
        jitter = params.row_jitter * normal(key_of(self.name, seed, "row_max"), (QUERIES,))
        q[0, 0, :, 1] = (GAP + jitter) / (SCALE * SINK)
        k[0, 0, :2, 1] = SINK
        # The third key scores 0, so its P̄ is about e^-gap; its value makes the residue r. A quarter
        # ulp of the sum at most: the tie is broken, not left behind.
        size = 2.0 ** -(FORMATS[dtype].mantissa_bits - 2) * E_TO_GAP / 32
        sign = np.sign(a) if params.residue == "same_sign" else -np.sign(a)
        v[0, 0, 0], v[0, 0, 1], v[0, 0, 2] = a, b, sign * size
        do = np.broadcast_to(np.sign(a) * 1e-2, q.shape)
        return Inputs.quantized(dtype, q, k, v, do, scale=SCALE)

    def run(self, kernel: Kernel, backend: Backend, problem: Problem[Params]) -> Measurement:
        found = super().run(kernel, backend, problem)
        found.metrics["table_mismatches"] = float(table_mismatches(backend.device))
        return found

    def verdict(self, params: Params, metrics: Metrics) -> str:
        if metrics["table_mismatches"]:
            return "mismatch"
        verdict = super().verdict(params, metrics)
        return "follows_residue" if verdict == "biased" else verdict


def _tied_pairs(seed: int, fmt: Format) -> tuple[Float64Array, Float64Array]:
    """a, b [64] on the storage grid in ±[2, 4) whose sum is an exact tie in ±[4, 8)."""
    key = key_of("bias/bf16_addition", seed, "pairs")
    grid = 2.0 ** (1 - fmt.mantissa_bits)  # spacing in [2, 4); sums are ties if odd in this unit
    a = np.floor((2 + 1.9 * uniform(key, (HEAD_DIM,))) / grid)
    b = np.floor((2 + 1.9 * uniform(key_of("bias/bf16_addition", seed, "b"), (HEAD_DIM,))) / grid)
    b += (a + b + 1) % 2
    sign = np.where(raw_words(key_of("bias/bf16_addition", seed, "sign"), HEAD_DIM) >> np.uint64(63), 1, -1)
    a, b = sign * a * grid, sign * b * grid
    if fmt.mantissa_bits == 7:
        a[0], b[0] = PAPER[0][:2]
    return a, b


def table_mismatches(device: torch.device) -> int:
    """How many of the paper's sums the device (or our rounding) casts to BF16 wrongly."""
    table = PAPER + [(-a, -b, -r) for a, b, r in PAPER]
    exact = torch.tensor([a + b + r for a, b, r in table], dtype=torch.float64)
    spacing = ulp(exact, FORMATS[torch.bfloat16])
    quotient = exact / spacing  # a power of two: exact
    expected = torch.round(quotient) * spacing  # ties to even
    on_device = exact.float().to(device)
    cast = on_device.bfloat16().cpu().double()
    ours = round_mantissa(on_device, 7).cpu().double()
    return int(((cast != expected) | (ours != expected)).sum())
