"""Rounding and number formats: what a stored value can be, bit for bit.

Two families, both written on integer bit patterns so that no library cast is trusted:
`round_float64` (numpy, host) makes inputs; `round_mantissa` (torch, any device) is the storage
rounding of the eager kernels, to M explicit mantissa bits of the FP32 exponent range.
M = 7 is BF16; 10, 3, 2 and 1 are the mantissas of FP16, FP8-E4M3, FP8-E5M2 and FP4-E2M1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Rounding = Literal["rne", "stochastic", "toward_zero"]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: explicit mantissa bits and the smallest normal exponent."""

    mantissa_bits: int
    emin: int
    max_value: float


FORMATS: dict[torch.dtype, Format] = {
    torch.bfloat16: Format(7, -126, float(torch.finfo(torch.bfloat16).max)),
    torch.float16: Format(10, -14, 65504.0),
    torch.float32: Format(23, -126, float(torch.finfo(torch.float32).max)),
}

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FORMATS}  # by their names in configs


def round_float64(x: NDArray[np.float64], fmt: Format) -> NDArray[np.float64]:
    """Round float64 to the nearest value of `fmt`, ties to even; result as float64.

    Subnormals of `fmt` are kept, overflow gives ±Inf, NaN and ±Inf pass through, the sign of zero
    is kept. Integer arithmetic on the 53-bit significand; nothing depends on the rounding mode.
    """
    x = np.asarray(x, dtype=np.float64)
    bits = np.ascontiguousarray(x).view(np.int64).reshape(x.shape)
    exponent = ((bits >> 52) & 0x7FF) - 1023
    significand = np.where(exponent > -1023, bits & (2**52 - 1) | 2**52, bits & (2**52 - 1))
    exponent = np.maximum(exponent, -1022)
    # Bits below the target's last place; 54 already rounds everything to zero.
    drop = np.minimum(52 - fmt.mantissa_bits + np.maximum(fmt.emin - exponent, 0), 54)
    last = (significand >> drop) & 1
    kept = (significand + (np.int64(1) << (drop - 1)) - 1 + last) >> drop
    with np.errstate(over="ignore"):  # values beyond float64's range become Inf, as they should
        magnitude = np.ldexp(kept.astype(np.float64), (exponent - 52 + drop).astype(np.int32))
    magnitude = np.where(magnitude > fmt.max_value, np.inf, magnitude)
    return np.where(np.isfinite(x), np.copysign(magnitude, x), x)


def round_mantissa(
    x: Tensor, bits: int, rounding: Rounding = "rne", random_words: Tensor | None = None
) -> Tensor:
    """Round FP32 values to `bits` explicit mantissa bits (1-23), keeping FP32's exponent range.

    Args:
        x: float32, any shape and device.
        bits: explicit mantissa bits kept; 7 equals a cast to bfloat16, 23 changes nothing.
        rounding: `rne` (nearest, ties to even), `toward_zero`, or `stochastic` (up with a
            probability equal to the discarded fraction).
        random_words: for `stochastic`, int64 words in [0, 2^32) of x's shape (see `philox_words`).

    Returns float32 of x's shape. NaN stays NaN, ±Inf stays, values past the largest one become ±Inf
    (except toward zero), subnormals round on FP32's fixed grid.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"round_mantissa: x must be float32, got {x.dtype}")
    if not 1 <= bits <= 23:
        raise ValueError(f"round_mantissa: bits must be 1 to 23, got {bits}")
    drop = 23 - bits
    if drop == 0:
        return x.clone()
    pattern = x.view(torch.int32)
    magnitude = pattern & 0x7FFFFFFF
    if rounding == "rne":
        rounded = magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)
    elif rounding == "stochastic":
        if random_words is None:
            raise ValueError("round_mantissa: stochastic rounding needs random_words")
        rounded = magnitude + (random_words & ((1 << drop) - 1)).to(torch.int32)
    elif rounding == "toward_zero":
        rounded = magnitude
    else:
        raise ValueError(f"round_mantissa: unknown rounding {rounding!r}")
    rounded = rounded & ~((1 << drop) - 1)
    # Inf has no fraction to carry out of; NaN would lose its payload or turn into Inf: keep both.
    special = magnitude >= 0x7F800000
    result = torch.where(special, magnitude, rounded) | (pattern & -0x80000000)
    return result.view(torch.float32)


def round_to_format(x: Tensor, fmt: Format, rounding: Rounding, random_words: Tensor | None = None) -> Tensor:
    """Round FP32 values to a format with its own exponent range, as `round_mantissa` rounds mantissas.

    Below the smallest normal the grid is fixed, above the largest value `toward_zero` stays there and
    the others give ±Inf. Same arguments, shapes and result as `round_mantissa`.
    """
    normal = round_mantissa(x, fmt.mantissa_bits, rounding, random_words)
    quantum = 2.0 ** (fmt.emin - fmt.mantissa_bits)
    if fmt.emin > -126:
        steps = x.abs() / quantum  # a power of two: exact
        floor = steps.floor()
        rest = steps - floor
        if rounding == "rne":
            up = (rest > 0.5) | ((rest == 0.5) & (floor % 2 == 1))
        elif rounding == "stochastic":
            assert random_words is not None
            up = (random_words & 0xFFFFFF).float() / 2.0**24 < rest
        else:
            up = torch.zeros_like(rest, dtype=torch.bool)
        small = torch.copysign((floor + up) * quantum, x)
        normal = torch.where(x.abs() < 2.0**fmt.emin, small, normal)
    limit = fmt.max_value if rounding == "toward_zero" else torch.inf
    beyond = (normal.abs() > fmt.max_value) & x.isfinite()
    return torch.where(beyond, torch.copysign(torch.full_like(x, limit), x), normal)


_PHILOX_M = (0xD2511F53, 0xCD9E8D57)
_PHILOX_W = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_PHILOX_CHUNK = 1 << 14  # elements at a time: six buffers stay in a CPU's cache
_PHILOX_CHUNK_DEVICE = 1 << 24  # where a launch costs more than memory


def _mul_hi_lo(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32×32-bit product, in int64 without overflow."""
    low = a * (m & 0xFFFF)
    high = a * (m >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int | Tensor, int | Tensor]
) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al., SC'11): four int64 tensors of words in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(c0, _PHILOX_M[0])
        hi1, lo1 = _mul_hi_lo(c2, _PHILOX_M[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _PHILOX_W[0]) & _MASK, (k1 + _PHILOX_W[1]) & _MASK
    return [c0, c1, c2, c3]


def philox_words(shape: torch.Size | tuple[int, ...], seed: int, stream: int, device: torch.device) -> Tensor:
    """One 32-bit word (int64) an element: lane 0 of Philox4x32-10 at counter (index, stream, 0, 0).

    `index` is the element's linear position in a contiguous tensor of `shape`, so the same element
    gets the same bits on every device. Stream 0 equals Triton's `tl.randint(seed, index)`.
    """
    count = int(np.prod(shape))
    key = (seed & _MASK, (seed >> 32) & _MASK)
    stream &= _MASK
    # Neither numpy's uint64 nor a function that is compiled already can be traced.
    traced = torch.compiler.is_compiling()
    if device.type == "cpu" and not traced:
        return torch.from_numpy(_philox_lane0(count, key, stream)).reshape(tuple(shape))
    words = torch.empty(count, dtype=torch.int64, device=device)
    lane0 = _fused_lane0(device) if device.type == "cuda" and not traced else _lane0
    # Tensors, or each seed would be compiled for anew; filled there, as a copy waits for the device.
    numbers = [torch.full((), n, dtype=torch.int64, device=device) for n in (*key, stream)]
    for start in range(0, count, _PHILOX_CHUNK_DEVICE):
        index = torch.arange(start, min(start + _PHILOX_CHUNK_DEVICE, count), device=device)
        words[start : start + _PHILOX_CHUNK_DEVICE] = lane0(index, *numbers)
    return words.reshape(tuple(shape))


def _lane0(index: Tensor, k0: Tensor, k1: Tensor, stream: Tensor) -> Tensor:
    """Lane 0 of Philox4x32-10 at (index, stream); all int64, `index` of any shape, the rest scalars."""
    counter = (index & _MASK, stream.expand_as(index), index >> 32, index * 0)
    return philox4x32(counter, (k0, k1))[0]


@lru_cache(maxsize=16)
def _fused_lane0(device: torch.device) -> Callable[..., Tensor]:
    """`_lane0` as one kernel: 160 passes over memory become one. Integers alone, so the same bits."""
    fused: Callable[..., Tensor] = torch.compile(_lane0, dynamic=True)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    try:
        fused(torch.arange(2, device=device), zero, zero, zero)
    except Exception:  # no Triton or no C compiler here: the same words, more slowly
        return _lane0
    return fused


def _philox_lane0(count: int, key: tuple[int, int], stream: int) -> NDArray[np.int64]:
    """`philox_words` in numpy, whose unsigned products need not be split: four times as fast."""
    words = np.empty(count, dtype=np.uint64)
    for start in range(0, count, _PHILOX_CHUNK):
        index = np.arange(start, min(start + _PHILOX_CHUNK, count), dtype=np.uint64)
        c0, c1 = np.bitwise_and(index, _MASK), np.full_like(index, stream)
        c2, c3 = np.right_shift(index, 32), np.zeros_like(index)
        high0, high1 = np.empty_like(index), np.empty_like(index)
        k0, k1 = key
        for _ in range(10):
            c0 *= _PHILOX_M[0]
            c2 *= _PHILOX_M[1]
            np.right_shift(c2, 32, out=high1)
            high1 ^= c1
            high1 ^= k0
            np.right_shift(c0, 32, out=high0)
            high0 ^= c3
            high0 ^= k1
            c0 &= _MASK
            c2 &= _MASK
            c0, c1, c2, c3, high0, high1 = high1, c2, high0, c0, c1, c3
            k0, k1 = (k0 + _PHILOX_W[0]) & _MASK, (k1 + _PHILOX_W[1]) & _MASK
        words[start : start + _PHILOX_CHUNK] = c0
    return words.view(np.int64)


def ulp(x: Tensor, fmt: Format) -> Tensor:
    """Unit in the last place of `fmt` at each value of `x` (float64, finite); same shape, float64.

    The spacing of the binade that holds |x|; below the smallest normal it is the subnormal spacing.
    """
    _, exponent = torch.frexp(x)  # x = f·2^exponent, 0.5 <= |f| < 1
    exponent = torch.where(x == 0, fmt.emin, (exponent - 1).clamp(min=fmt.emin))
    # The power of two by its bit pattern: exact, unlike a library's pow.
    return (exponent.long() - fmt.mantissa_bits + 1023 << 52).view(torch.float64)


def tie_distance(x: Tensor, fmt: Format) -> Tensor:
    """Distance of exact values `x` (float64) from the nearest rounding midpoint, in ulps of `fmt`."""
    in_ulps = x.abs() / ulp(x, fmt)
    return (in_ulps - in_ulps.floor() - 0.5).abs()
