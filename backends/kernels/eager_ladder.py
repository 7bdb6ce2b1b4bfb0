"""The `ladder` policy: P̄, Ō and O stored with M mantissa bits, so that a crash takes seconds.

Untiled: S is a matrix, and the passes are four products with elementwise parts between them. P̄, Ō and O
are rounded to M bits (nearest-even on the FP32 pattern), nothing else to M:

* FP32 inputs: nothing else is rounded at all.
* BF16 or FP16 inputs: the rest is as in flash attention. P and dS of the backward pass are cast to the
  input dtype for their products, dq, dk and dv are stored in it; S, LSE, δ and every sum are FP32. P̄
  and O with M bits are exact in the dtype, so M may not pass the dtype's own (7 in BF16).

On a GPU the products of low-precision operands run on tensor cores with FP32 results; elsewhere they
are FP32 products of the same values. `compiled` fuses the elementwise parts by `torch.compile`: the
same formulas, but exp and the sums may differ in last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from backends.kernels.eager import Spec, Storage
from backends.kernels.row_shift import row_shift

_MASKED = float("-inf")
SPECS = 512  # that one process may compile for
_REDRAWN = 2**31  # the stream of the second draw of an independent rounding


@dataclass(frozen=True)
class LadderForward:
    """o [B, Hq, T, D] in the input dtype; lse [B, Hq, T] and what δ takes for O minus o, FP32."""

    o: Tensor
    lse: Tensor
    residual: Tensor | None


@dataclass(frozen=True)
class Weights:
    """The elementwise part between S and P̄V: [B, Hkv, G·T, S] and, FP32, [B, Hkv, G·T, 1]."""

    p_cast: Tensor  # P̄ in M bits, input dtype
    p: Tensor | None  # P̄ unrounded, FP32, where a fix asks for it
    total: Tensor  # ℓ, the sum of the unrounded P̄
    normalizer: Tensor  # what Ō is divided by
    lse: Tensor


def _masked_scores(s: Tensor, scale: float, allowed: Tensor | None) -> Tensor:
    s = scale * s
    return s if allowed is None else s.masked_fill(~allowed, _MASKED)


def _weights(s: Tensor, scale: float, allowed: Tensor | None, storage: Storage) -> Weights:
    spec = storage.spec
    s = _masked_scores(s, scale, allowed)
    shift, _ = row_shift(s, spec.fix, spec.beta, spec.tol)
    dead = shift == _MASKED  # scores of −inf alone: P̄ = 0 and O = 0
    p = torch.exp(s - shift.masked_fill(dead, 0.0))
    p_cast = storage(p)
    total = p.sum(-1, keepdim=True)
    cast = spec.fix.normalizer == "cast_p"
    normalizer = (p_cast.sum(-1, keepdim=True) if cast else total).masked_fill(dead, 1.0)
    kept = p if spec.fix.delta == "mirrored" else None
    lse = shift + total.log()
    return Weights(p_cast.to(storage.dtype), kept, total.masked_fill(dead, 1.0), normalizer, lse)


def _output(
    acc: Tensor, pure_acc: Tensor | None, w: Weights, storage: Storage
) -> tuple[Tensor, Tensor | None]:
    """O in the input dtype, and what δ takes for O minus that, FP32; from Ō [B, Hkv, G·T, D]."""
    fix = storage.spec.fix
    o = storage.output(storage.output(acc, stream=1) / w.normalizer, stream=0)
    exact = (acc if pure_acc is None else pure_acc) / w.total
    residual = None
    if fix.delta == "residual":
        residual = exact - o
    elif fix.delta == "rounded":
        residual = o - exact
    elif fix.delta == "redrawn":
        again = storage.output(acc, stream=_REDRAWN + 1)
        residual = storage.output(again / w.total, stream=_REDRAWN) - o
    elif fix.delta in ("flipped", "mirrored"):
        residual = 2 * (exact - o)  # o = exact + e, and exact − e is wanted
    return (exact if fix.output == "unrounded" else o).to(storage.dtype), residual


def _delta(do: Tensor, o: Tensor, residual: Tensor | None) -> Tensor:
    """δ = rowsum(dO∘O) [B, Hkv, G·T, 1], FP32."""
    o = o.float()
    return (do.float() * (o if residual is None else o + residual)).sum(-1, keepdim=True)


def _gradients(
    s: Tensor,
    dp: Tensor,
    lse: Tensor,
    delta: Tensor | None,
    scale: float,
    allowed: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """P and dS as the products take them, [B, Hkv, G·T, S]; without δ it is rowsum(dP∘P)."""
    p = torch.exp(_masked_scores(s, scale, allowed) - lse.masked_fill(lse == _MASKED, torch.inf))
    if delta is None:
        delta = (p * dp).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    return p.to(dtype), ds.to(dtype)


@dataclass(frozen=True)
class Parts:
    """The elementwise parts, as they are or compiled."""

    weights: Callable[..., Weights] = _weights
    output: Callable[..., tuple[Tensor, Tensor | None]] = _output
    delta: Callable[..., Tensor] = _delta
    gradients: Callable[..., tuple[Tensor, Tensor]] = _gradients


PLAIN = Parts()


@lru_cache(maxsize=1)
def _compiled() -> Parts:
    """Compiled anew for each fix, M and shape; never run as it is (`fullgraph`)."""
    parts: list[Any] = [_weights, _output, _delta, _gradients]
    return Parts(*(torch.compile(part, dynamic=False, fullgraph=True) for part in parts))


def _parts(spec: Spec) -> Parts:
    if not spec.compiled:
        return PLAIN
    # Past a limit of 8 torch.compile refuses. Its settings are a thread's own, and a backward pass on a
    # GPU runs in a thread of autograd's.
    torch._dynamo.config.recompile_limit = SPECS
    torch._dynamo.config.accumulated_recompile_limit = 4 * SPECS
    return _compiled()


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [B, H, m, k] @ b [B, H, k, n] → FP32 [B, H, m, n], operands of one dtype."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        flat = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return flat.unflatten(0, a.shape[:2])
    return a.float() @ b.float()


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, T, ...] → [B, Hkv, G·T, ...]"""
    batch, heads, tokens = x.shape[:3]
    return x.reshape(batch, kv_heads, heads // kv_heads * tokens, *x.shape[3:])


def _allowed(q: Tensor, k: Tensor, causal: bool) -> Tensor | None:
    """Entries that take part, [G·T, S] or None for all; causal is top-left aligned."""
    if not causal:
        return None
    groups, queries = q.shape[1] // k.shape[1], q.shape[2]
    triangle = torch.ones(queries, k.shape[2], dtype=torch.bool, device=q.device).tril()
    return triangle.repeat(groups, 1)


def ladder_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, spec: Spec) -> LadderForward:
    """q [B, Hq, T, D], k and v [B, Hkv, S, D]."""
    storage, parts = Storage(spec, q.dtype), _parts(spec)
    s = product(_fold(q, k.shape[1]), k.mT)  # [B, Hkv, G·T, S]
    w = parts.weights(s, scale, _allowed(q, k, causal), storage)
    acc = product(w.p_cast, v)  # Ō [B, Hkv, G·T, D]
    pure_acc = None if w.p is None else product(w.p, v.float())
    o, residual = parts.output(acc, pure_acc, w, storage)
    return LadderForward(o.reshape(q.shape[:3] + v.shape[-1:]), w.lse.reshape(q.shape[:3]), residual)


def ladder_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: LadderForward,
    do: Tensor,
    causal: bool,
    scale: float,
    spec: Spec,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [B, Hq, T, D], dk and dv [B, Hkv, S, D] in the input dtype."""
    parts, kv_heads = _parts(spec), k.shape[1]
    queries, grad, o = (_fold(x, kv_heads) for x in (q, do, forward.o))
    lse = _fold(forward.lse, kv_heads)[..., None]
    delta = None if spec.fix.delta == "dp" else parts.delta(grad, o, forward.residual)
    s, dp = product(queries, k.mT), product(grad, v.mT)
    p, ds = parts.gradients(s, dp, lse, delta, scale, _allowed(q, k, causal), q.dtype)
    dv = product(p.mT, grad)
    dk = scale * product(ds.mT, queries)
    dq = scale * product(ds, k)
    return dq.reshape(q.shape).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class LadderAttention(torch.autograd.Function):
    """Joins the two passes; saves q, k, v, O, LSE (and the residual), as flash attention does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, spec: Spec) -> Tensor:
        result = ladder_forward(q, k, v, causal, scale, spec)
        ctx.save_for_backward(q, k, v, result.o, result.lse, result.residual)
        ctx.call = (causal, scale, spec)
        return result.o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            grads = ladder_backward(q, k, v, LadderForward(*saved), do, *ctx.call)
        return *grads, None, None, None
