"""Attention of plain tensor operations as `torch.library` operators, with a CPU and an npu kernel.

    attnrepro::composite_forward(q, k, v, …)  → (o, m, ℓ, residual)
    attnrepro::composite_backward(do, q, …)   → (dq, dk, dv)

The arithmetic is that of `eager-fused` (one function, so the same bits on the same device); what an
operator adds is that one call is one node for autograd, `torch.compile` and profilers, on a device
whose own fused kernel is closed, and that the row shift m and the sum ℓ come out. Beside the vendor's
kernel it tells a property of the kernel from a property of the fix.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from backends.fixes import FIXES
from backends.kernels.eager import Saved, Spec, eager_backward, eager_forward


def _spec(fix: str, tile: int, beta: float, tol: float, seed: int) -> Spec:
    return Spec("fused", FIXES[fix], tile, beta, tol, seed=seed)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
    fix: str, tile: int, beta: float, tol: float, seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o [B, Hq, T, D]; m and ℓ [B, Hq, T] FP32, lse = m + log ℓ; the residual of O, or an empty tensor."""
    with torch.autocast(q.device.type, enabled=False):  # or FP32 products would be cast
        out = eager_forward(q, k, v, causal, scale, _spec(fix, tile, beta, tol, seed))
    residual = out.o.new_empty(0) if out.residual is None else out.residual
    return out.o, out.shift, out.total, residual


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, m: Tensor, total: Tensor,
    residual: Tensor, causal: bool, scale: float, fix: str, tile: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq [B, Hq, T, D], dk and dv [B, Hkv, S, D]."""
    saved = Saved(o, m + total.log(), residual if residual.numel() else None)
    spec = _spec(fix, tile, 2.0, 0.0, 0)  # the shift and the rounding of O are behind us
    with torch.autocast(q.device.type, enabled=False):
        return eager_backward(q, k, v, saved, do, causal, scale, spec)


forward_op = torch.library.custom_op(
    "attnrepro::composite_forward", _forward, mutates_args=(), device_types="cpu"
)
backward_op = torch.library.custom_op(
    "attnrepro::composite_backward", _backward, mutates_args=(), device_types="cpu"
)


@cache
def register_npu() -> None:
    """Give both operators their npu kernel. torch_npu must be loaded: only then does PyTorch know npu."""
    forward_op.register_kernel("npu", _forward)
    backward_op.register_kernel("npu", _backward)


@forward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
    fix: str, tile: int, beta: float, tol: float, seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    m, total = (o.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    return o, m, total, torch.empty_like(o) if FIXES[fix].delta == "residual" else o.new_empty(0)


@backward_op.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, m: Tensor, total: Tensor,
    residual: Tensor, causal: bool, scale: float, fix: str, tile: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *ctx.call = inputs[:7]  # causal, scale, fix, tile
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or zeros are made for m, ℓ and the residual


def _autograd(ctx: Any, do: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return *backward_op(do, *ctx.saved_tensors, *ctx.call), *[None] * 7


forward_op.register_autograd(_autograd, setup_context=_setup_context)
