"""The stock kernel of an Ascend NPU: `npu-fusion/stock`, `torch_npu.npu_fusion_attention` (version 1).

Closed: tile sizes and the row shift are its own, but it gives row maximum m and sum ℓ. Beside it
`composite/stabilized+vendor-backward`: our stabilised forward pass, whose m and ℓ the vendor's
gradient takes instead of its own. P = exp(S − m) / ℓ holds for any m, so this is right on paper; it
has never run on a device, and its launch facts say so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from backends.base import Call, Forward, KernelOptions, Unsupported
from backends.host import installed_version
from backends.kernels.base_kernel import ClosedKernel
from backends.kernels.composite_kernels import CompositeKernel
from backends.kernels.eager import default_scale
from backends.kernels.npu_call import (
    BOTTOM_RIGHT,
    MAX_HEAD_DIM,
    TOP_LEFT,
    Layout,
    checked,
    forward_call,
    gradient_call,
)

UNVERIFIED = "never run on a device"
STATISTICS = 8  # equal values a row, in softmax_max and softmax_sum


def torch_npu_version() -> str:
    """Of the installed package."""
    return installed_version("torch_npu") or "not installed"


def run_operator(name: str, call: dict[str, Any]) -> tuple[Any, ...]:
    """Call an operator of torch_npu (which must be loaded) once its schema allows it."""
    if not hasattr(torch.ops.npu, name):
        raise Unsupported(f"torch_npu {torch_npu_version()}: there is no operator {name}")
    operator = getattr(torch.ops.npu, name).default
    result: tuple[Any, ...] = operator(**checked(operator._schema, call, torch_npu_version()))
    return result


def to_layout(x: Tensor, layout: Layout) -> Tensor:
    """x [B, N, S, D] as the kernel takes it; TND lays the sequences of the batch end to end."""
    if layout == "BNSD":
        return x.contiguous()
    x = x.transpose(1, 2).contiguous()  # [B, S, N, D]
    return x.flatten(0, 1) if layout == "TND" else x


def from_layout(x: Tensor, layout: Layout, batch: int) -> Tensor:
    """The inverse of `to_layout`."""
    if layout == "TND":
        x = x.unflatten(0, (batch, -1))
    return x if layout == "BNSD" else x.transpose(1, 2)


def row_statistic(x: Tensor, layout: Layout, batch: int) -> Tensor:
    """softmax_max or softmax_sum, [B, N, S, 8] (TND: [T, N, 8]), as [B, N, S]."""
    x = x[..., 0]
    return x.unflatten(0, (batch, -1)).transpose(1, 2) if layout == "TND" else x


class FusionOptions(KernelOptions):
    """How a problem is handed over. The function is the same whatever they are."""

    layout: Layout = "BNSD"
    sparse_mode: Literal[2, 3] = 2  # causal: anchored top-left or, for as many queries as keys, bottom-right


@dataclass(frozen=True)
class FusionKernel(ClosedKernel):
    """The vendor's fused attention."""

    options: FusionOptions = field(default_factory=FusionOptions)
    implementation = "npu-fusion"
    own_options = frozenset({"layout", "sparse_mode"})
    max_head_dim = MAX_HEAD_DIM

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """o [B, Hq, T, D], differentiable; row maximum m and sum ℓ [B, Hq, T] FP32."""
        self.check(q, k, v)
        layout, anchor = self.options.layout, self.options.sparse_mode
        batch, _, queries, _ = q.shape
        keys = k.shape[2]
        if causal and anchor == BOTTOM_RIGHT and queries != keys:
            raise Unsupported("sparse_mode 3 aligns bottom-right: as many queries as keys are needed")
        ends = (
            [[n * (i + 1) for i in range(batch)] for n in (queries, keys)]
            if layout == "TND"
            else [None, None]
        )
        call = forward_call(
            *(to_layout(x, layout) for x in (q, k, v)),
            layout=layout,
            causal=causal,
            scale=default_scale(q, scale),
            sparse_mode=anchor,
            ends_q=ends[0],
            ends_kv=ends[1],
        )
        o, row_max, row_sum = run_operator("npu_fusion_attention", call)[:3]
        m, total = (row_statistic(x, layout, batch) for x in (row_max, row_sum))
        return from_layout(o, layout, batch), m, total

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        return self.run(q, k, v, causal, scale)[0]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Forward:
        with torch.no_grad():
            o, m, total = self.run(q, k, v, causal, scale)
        return Forward(o, m + total.log())

    def launch_facts(self, call: Call) -> dict[str, Any]:
        return {"library": f"torch_npu {torch_npu_version()}", "tile_keys": "not exposed"}


class _VendorBackward(torch.autograd.Function):
    """Our forward pass, the vendor's backward pass with our m and ℓ."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, ours: CompositeKernel
    ) -> Tensor:
        o, m, total, _ = ours.run(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, o, m, total)
        ctx.call = (causal, scale)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, m, total = (x.contiguous() for x in ctx.saved_tensors)
        causal, scale = ctx.call
        call = forward_call(q, k, v, layout="BNSD", causal=causal, scale=scale, sparse_mode=TOP_LEFT)
        m, total = (x[..., None].expand(*x.shape, STATISTICS).contiguous() for x in (m, total))
        call = gradient_call(call, do.contiguous(), o, m, total)
        # Four tensors in older versions, five in newer ones; the first three are the same.
        dq, dk, dv = run_operator("npu_fusion_attention_grad", call)[:3]
        return dq, dk, dv, None, None, None


@dataclass(frozen=True)
class VendorBackwardKernel(CompositeKernel):
    """`composite/stabilized` forward, the vendor's backward. Unverified: see the top of this file."""

    fix: str = field(default="stabilized", init=False)

    @property
    def name(self) -> str:
        return f"{super().name}+vendor-backward"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        self.check(q, k, v)
        return _VendorBackward.apply(q, k, v, causal, default_scale(q, scale), self)

    def launch_facts(self, call: Call) -> dict[str, Any]:
        backward = {"backward": f"torch_npu {torch_npu_version()}", "backward_status": UNVERIFIED}
        return super().launch_facts(call) | backward


def npu_fusion_kernels() -> dict[str, FusionKernel | VendorBackwardKernel]:
    """The vendor's kernel, and its backward pass under our forward pass."""
    kernels = (FusionKernel(), VendorBackwardKernel())
    return {kernel.name: kernel for kernel in kernels}
