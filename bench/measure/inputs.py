"""Inputs that are the same bits on every machine.

`torch.randn` differs between platforms (vector width, library version), so every input here is made
from integers only: a counter-based generator (numpy's Philox4x64-10, raw words), exact
integer-to-float steps and our own integer round-to-nearest-even into the storage dtype. No libm, no
vectorised sampling, no dependence on thread count. Everything happens on the host.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.measure.numerics import FORMATS, round_float64

Float64Array = NDArray[np.float64]


def key_of(*parts: str | int) -> int:
    """128-bit Philox key of a stream, from its name: sha256 of the parts joined by '/'."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def raw_words(key: int, count: int) -> NDArray[np.uint64]:
    """`count` 64-bit words of Philox4x64-10 under `key`; numpy counts before use: the first is 1."""
    return np.random.Philox(key=key).random_raw(count)


def uniform(key: int, shape: tuple[int, ...]) -> Float64Array:
    """Uniforms in [0, 1) on a grid of 2^-24, one a word (its top 24 bits). Shape `shape`, float64."""
    words = raw_words(key, int(np.prod(shape)))
    return ((words >> np.uint64(40)).astype(np.int64) / 2.0**24).reshape(shape)


def normal(key: int, shape: tuple[int, ...]) -> Float64Array:
    """Approximate N(0, 1): the sum of twelve 24-bit uniforms minus 6 (variance 1, support ±6).

    Each 64-bit word gives two uniforms (bits 40-63 and 16-39). The sum is an integer below 2^28, so
    every step is exact in float64. Shape `shape`, float64.
    """
    count = int(np.prod(shape))
    generator = np.random.Philox(key=key)
    total = np.zeros(count, dtype=np.int64)
    for _ in range(6):  # a sixth of the words at a time, to spare memory
        words = generator.random_raw(count)
        total += (words >> np.uint64(40)).astype(np.int64)
        total += ((words >> np.uint64(16)) & np.uint64(0xFFFFFF)).astype(np.int64)
    return ((total - 6 * 2**24) / 2.0**24).reshape(shape)


def signs(key: int, shape: tuple[int, ...]) -> Float64Array:
    """±1 with equal probability: the top bit of one word each. Shape `shape`, float64."""
    return np.where(raw_words(key, int(np.prod(shape))) >> np.uint64(63), -1.0, 1.0).reshape(shape)


def to_storage(x: Float64Array, dtype: torch.dtype) -> Tensor:
    """Round float64 values to `dtype` (bfloat16, float16, float32), nearest-even, on the host."""
    rounded = round_float64(x, FORMATS[dtype])
    return torch.from_numpy(np.ascontiguousarray(rounded)).to(dtype)  # exact: already on the grid


@dataclass(frozen=True)
class Inputs:
    """One problem: q, do [B, Hq, T, D] and k, v [B, Hkv, S, D], in the storage dtype, on the host."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    causal: bool = False
    scale: float | None = None  # None: 1/sqrt(D)

    @classmethod
    def quantized(
        cls,
        dtype: torch.dtype,
        *qkvdo: Float64Array,
        causal: bool = False,
        scale: float | None = None,
    ) -> Inputs:
        """q, k, v, do in float64, rounded to the storage dtype."""
        q, k, v, do = (to_storage(x, dtype) for x in qkvdo)
        return cls(q, k, v, do, causal, scale)

    def digest(self) -> str:
        """sha256 over q, k, v, do (name, dtype, shape and little-endian bytes) and the two flags."""
        h = hashlib.sha256(f"causal={self.causal} scale={self.scale}".encode())
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                h.update(f"{f.name} {value.dtype} {tuple(value.shape)}".encode())
                h.update(tensor_bytes(value))
        return h.hexdigest()

    def to(self, device: torch.device) -> Inputs:
        return Inputs(
            self.q.to(device),
            self.k.to(device),
            self.v.to(device),
            self.do.to(device),
            self.causal,
            self.scale,
        )


def stack_seeds(per_seed: list[Inputs]) -> Inputs:
    """Join the problems of several seeds along the batch dimension: [seeds·B, H, T, D]."""
    first = per_seed[0]
    q, k, v, do = (torch.cat([getattr(p, name) for p in per_seed]) for name in ("q", "k", "v", "do"))
    return Inputs(q, k, v, do, first.causal, first.scale)


def tensor_bytes(x: Tensor) -> bytes:
    """The tensor's elements as contiguous little-endian bytes, whatever its device or dtype."""
    flat = x.detach().cpu().contiguous().reshape(-1)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    array = flat.view(integer).numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def digest(x: Tensor) -> str:
    """sha256 of a tensor's bytes (contiguous, little-endian). NaN is NaN: its sign and payload depend on
    which instructions met, and differed between two runs of one program."""
    x = x.detach().cpu()  # a device may write another NaN
    if x.is_floating_point() and bool((nan := x.isnan()).any()):
        x = torch.where(nan, torch.full_like(x, math.nan), x)  # masked_fill has no float8
    return hashlib.sha256(tensor_bytes(x)).hexdigest()
