"""PyTorch's FlexAttention, compiled: `flex/stock`. Needs Triton (it comes with torch's CUDA builds)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from backends.base import Call, Forward
from backends.kernels.base_kernel import ClosedKernel

MAX_VARIANTS = 7  # of torch.compile's limit of 8
# The fused kernel that training uses. Left to itself, torch takes its decoding kernel for fewer than
# 128 queries and then finds no launch shape for some of them (127, grouped heads; torch 2.11).
KERNEL_OPTIONS = {"BACKEND": "TRITON"}
_compiled_for: set[Hashable] = set()


def _compiled(variant: Hashable) -> Callable[..., Any]:
    """FlexAttention compiled for one variant of shapes and dtypes.

    torch.compile gives up after a few variants of one function and would then run the unfused code
    under the same name: start afresh before that, and fail rather than fall back (`fullgraph`).
    """
    from torch.nn.attention.flex_attention import flex_attention

    if variant not in _compiled_for and len(_compiled_for) >= MAX_VARIANTS:
        torch._dynamo.reset()
        _compiled_for.clear()
    _compiled_for.add(variant)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@cache
def _causal_mask(queries: int, keys: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i  # top-left aligned

    return create_block_mask(visible, None, None, queries, keys, device=str(device))


@dataclass(frozen=True)
class FlexKernel(ClosedKernel):
    """FlexAttention with a causal block mask or none; its launch shapes are chosen by torch."""

    implementation = "flex"

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, return_lse: bool
    ) -> Any:
        self.check(q, k, v)
        mask = _causal_mask(q.shape[2], k.shape[2], q.device) if causal else None
        grouped = q.shape[1] != k.shape[1]
        grad = torch.is_grad_enabled() and q.requires_grad
        variant = (q.shape, k.shape, q.dtype, causal, scale, return_lse, grad)
        return _compiled(variant)(
            q,
            k,
            v,
            block_mask=mask,
            scale=scale,
            enable_gqa=grouped,
            return_lse=return_lse,
            kernel_options=KERNEL_OPTIONS,
        )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        return self._run(q, k, v, causal, scale, return_lse=False)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Forward:
        with torch.no_grad():
            return Forward(*self._run(q, k, v, causal, scale, return_lse=True))

    def launch_facts(self, call: Call) -> dict[str, Any]:
        library = f"torch {torch.__version__} inductor"
        return {"library": library, "tile_keys": "not exposed", **KERNEL_OPTIONS}


def flex_kernels() -> dict[str, FlexKernel]:
    """FlexAttention, where Triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return {}
    return {"flex/stock": FlexKernel()}
