"""Attention as plain tensor operations, key tile by key tile: readable, portable, on any torch device.

Three storage policies say where values are rounded to the storage format:

* `stored`: an eager low-precision implementation as analysed in arXiv 2510.04212: S, m, P̄, ℓ, the
  accumulator Ō and O are each rounded; ℓ is clamped at 1e-10.
* `fused`: flash-attention kernels: P̄ is cast for P̄V, all else stays FP32, O is rounded once.

Both share flash attention's backward pass: P recomputed from S and LSE in FP32, dP and δ in FP32,
P and dS cast to the storage format for their matrix products, FP32 accumulation. The third policy,
`ladder`, is in `eager_ladder.py`. What a fix changes is in `backends/fixes.py`. GQA folds the query
heads of a group into rows: [B, Hkv, G·T, D].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from backends.fixes import Fix
from backends.kernels.row_shift import row_shift
from bench.measure.numerics import FORMATS, philox_words, round_mantissa, round_to_format

CLAMP = 1e-10  # the smallest ℓ of the `stored` policy, before it is stored (FP16 makes it 0)
_MASKED = float("-inf")

Policy = Literal["stored", "fused", "ladder"]


@dataclass(frozen=True)
class Spec:
    """How an eager kernel computes."""

    policy: Policy
    fix: Fix
    tile: int = 128  # keys a tile; 0 = the whole sequence
    beta: float = 2.0  # the repeated-maximum shift's factor (paper: 2 to 8)
    tol: float = 1e-3  # entries this close to the row maximum repeat it
    mantissa_bits: int | None = None  # of the storage format; None = the input dtype's own
    rounding: Literal["rne", "toward_zero"] = "rne"  # of Ō and O
    seed: int = 0  # of stochastic rounding
    compiled: bool = False  # `ladder`: elementwise parts by torch.compile


@dataclass(frozen=True)
class Saved:
    """What the backward pass takes from the forward pass, besides its inputs."""

    o: Tensor  # [B, Hq, T, D]
    lse: Tensor  # [B, Hq, T] FP32, natural log
    residual: Tensor | None  # what δ takes for O, minus O; in the input dtype (None: nothing)


@dataclass(frozen=True)
class EagerForward(Saved):
    """And what tests and kernels of other libraries ask for: lse = m + log ℓ."""

    shift: Tensor  # m, [B, Hq, T] FP32; −inf for a row that sees nothing
    total: Tensor  # ℓ = Σ P̄, [B, Hq, T] FP32
    fired: Tensor  # [B, Hq, T, tiles] bool: in this tile the fix changed the row's shift


class Storage:
    """Rounding to the storage format: values go in and come out as FP32."""

    def __init__(self, spec: Spec, dtype: torch.dtype):
        own = FORMATS[dtype].mantissa_bits
        self.spec, self.dtype = spec, dtype
        self.bits = own if spec.mantissa_bits is None else spec.mantissa_bits
        if not 1 <= self.bits <= own:
            raise ValueError(f"mantissa_bits: {self.bits} does not fit {dtype} (1 to {own})")
        # A compiler drops a cast to the format and back, so compiled parts round by the bits instead.
        self.by_cast = self.bits == own and not spec.compiled
        self.format = replace(FORMATS[dtype], mantissa_bits=self.bits)

    def __call__(self, x: Tensor) -> Tensor:
        """Nearest-even."""
        return (x if self.by_cast else round_mantissa(x, self.bits)).to(self.dtype).float()

    def output(self, x: Tensor, stream: int) -> Tensor:
        """Ō and O: by the spec's rounding. `stream` keeps the random words of two uses apart."""
        if self.spec.fix.stochastic and self.bits < 23:
            words = philox_words(x.shape, self.spec.seed, stream, x.device)
            return round_to_format(x, self.format, "stochastic", words)
        if self.spec.rounding == "toward_zero":
            return round_to_format(x, self.format, "toward_zero")
        return self(x)


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, T, ...] → FP32 [B, Hkv, G·T, ...]"""
    batch, heads, tokens = x.shape[:3]
    return x.float().reshape(batch, kv_heads, heads // kv_heads * tokens, *x.shape[3:])


def _tiles(keys: int, tile: int) -> list[slice]:
    step = tile or max(keys, 1)
    return [slice(start, min(start + step, keys)) for start in range(0, keys, step)]


def _allowed(q: Tensor, keys: int, causal: bool, mask: Tensor | None) -> Tensor | None:
    """Entries that take part, [G·T, S] or None for all; causal is top-left aligned."""
    allowed = mask
    queries = q.shape[2]
    if causal:
        triangle = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
        allowed = triangle if mask is None else triangle & mask
    return allowed


class _Scores:
    """S of one key tile at a time, masked; the same values in the forward and backward pass."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        causal: bool,
        scale: float,
        mask: Tensor | None,
        spec: Spec,
        storage: Storage,
    ):
        groups = q.shape[1] // k.shape[1]
        allowed = _allowed(q, k.shape[2], causal, mask)
        self.allowed = None if allowed is None else allowed.repeat(groups, 1)
        self.q, self.k, self.scale = _fold(q, k.shape[1]), k.float(), scale
        self.store = storage if spec.policy == "stored" else None

    def __call__(self, keys: slice) -> Tensor:
        s = self.scale * (self.q @ self.k[:, :, keys].mT)  # [B, Hkv, G·T, tile]
        if self.store:
            s = self.store(s)
        return s if self.allowed is None else s.masked_fill(~self.allowed[:, keys], _MASKED)


def eager_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, spec: Spec, mask: Tensor | None = None
) -> EagerForward:
    """Forward pass over key tiles. `mask` [T, S] bool, True = takes part (for tests of masked rows)."""
    storage = Storage(spec, q.dtype)
    stored, fused, fix = spec.policy == "stored", spec.policy == "fused", spec.fix
    scores = _Scores(q, k, causal, scale, mask, spec, storage)
    values, rows = v.float(), scores.q.shape[:3]
    acc = values.new_zeros(*rows, v.shape[-1])  # Ō
    shift = values.new_full((*rows, 1), _MASKED)  # m
    total = values.new_zeros(*rows, 1)  # ℓ
    exact_acc, exact_total, cast_total = acc, total, total  # kept in FP32, for the fixes
    fired = []
    for tile, keys in enumerate(_tiles(k.shape[2], spec.tile)):
        s = scores(keys)
        tile_shift, tile_fired = row_shift(s, fix, spec.beta, spec.tol)
        fired.append(tile_fired)
        new_shift = torch.maximum(shift, storage(tile_shift) if stored else tile_shift)
        # A row that has seen only masked entries has shift −inf: any finite one gives P̄ = 0.
        safe = new_shift.masked_fill(new_shift == _MASKED, 0.0)
        p = torch.exp(s - safe)  # P̄, masked entries 0
        p_cast = storage(p)
        correction = torch.exp(shift - safe)
        pv = p_cast @ values[:, :, keys]  # FP32 accumulation
        exact_acc = correction * exact_acc + pv
        exact_total = correction * exact_total + p.sum(-1, keepdim=True)
        cast_total = correction * cast_total + p_cast.sum(-1, keepdim=True)
        acc = exact_acc if fused else storage.output(correction * acc + pv, stream=tile + 1)
        if stored:
            tile_total = p.sum(-1, keepdim=True).clamp(min=CLAMP)
            tile_total = tile_total.masked_fill(tile_shift == _MASKED, 0.0)
            total = storage(correction * total + tile_total)
        else:
            total = exact_total
        shift = new_shift

    dead = shift == _MASKED  # nothing but masked entries: O = 0, LSE = −inf
    if fix.normalizer == "cast_p":  # O by the sum of what P̄V multiplied, LSE by the FP32 sum
        normalizer, total = cast_total, exact_total
    else:
        normalizer = total
    o = storage.output(acc / normalizer.masked_fill(dead, 1.0), stream=0)
    residual = None
    if fix.delta == "residual":
        exact = exact_acc / exact_total.masked_fill(dead, 1.0)
        residual = storage(exact - o).to(q.dtype).reshape(q.shape[:3] + v.shape[-1:])
    lse = shift + total.log()
    return EagerForward(
        o=o.to(q.dtype).reshape(q.shape[:3] + v.shape[-1:]),
        lse=lse.reshape(q.shape[:3]),
        residual=residual,
        shift=shift.reshape(q.shape[:3]),
        total=total.reshape(q.shape[:3]),
        fired=torch.cat(fired, -1).reshape(*q.shape[:3], len(fired)),
    )


def eager_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Saved,
    do: Tensor,
    causal: bool,
    scale: float,
    spec: Spec,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [B, Hq, T, D], dk and dv [B, Hkv, S, D] in the input dtype."""
    storage = Storage(spec, q.dtype)
    scores = _Scores(q, k, causal, scale, mask, spec, storage)
    kv_heads = k.shape[1]
    grad, values = _fold(do, kv_heads), v.float()
    lse = _fold(saved.lse, kv_heads)[..., None]
    lse = lse.masked_fill(lse == _MASKED, torch.inf)  # dead rows: P = exp(−inf) = 0
    tiles = _tiles(k.shape[2], spec.tile)

    if spec.fix.delta == "dp":  # δ = rowsum(dP∘P): an extra pass over the tiles
        delta = torch.zeros_like(lse)
        for keys in tiles:
            p = torch.exp(scores(keys) - lse)
            delta += (p * (grad @ values[:, :, keys].mT)).sum(-1, keepdim=True)
    else:
        o = _fold(saved.o, kv_heads)
        if saved.residual is not None:
            o = o + _fold(saved.residual, kv_heads)
        delta = (grad * o).sum(-1, keepdim=True)  # δ = rowsum(dO∘O)

    dq = torch.zeros_like(scores.q)
    dk, dv = torch.zeros_like(scores.k), torch.zeros_like(values)
    for keys in tiles:
        p = torch.exp(scores(keys) - lse)  # [B, Hkv, G·T, tile]
        dp = grad @ values[:, :, keys].mT
        ds = storage(p * (dp - delta))
        dv[:, :, keys] = storage(p).mT @ grad
        dk[:, :, keys] = scale * (ds.mT @ scores.q)
        dq += scale * (ds @ scores.k[:, :, keys])
    return dq.reshape(q.shape).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class EagerAttention(torch.autograd.Function):
    """Joins the two passes; saves q, k, v, O, LSE (and the residual), as flash attention does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, spec: Spec) -> Tensor:
        result = eager_forward(q, k, v, causal, scale, spec)
        ctx.save_for_backward(q, k, v, result.o, result.lse, result.residual)
        ctx.call = (causal, scale, spec)
        return result.o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, residual = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            grads = eager_backward(q, k, v, Saved(o, lse, residual), do, *ctx.call)
        return *grads, None, None, None


def default_scale(q: Tensor, scale: float | None) -> float:
    """1/sqrt(head_dim) unless given."""
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale
