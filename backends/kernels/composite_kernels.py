"""The composite operators as the suite sees them: `composite/<fix>`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from backends.base import Call, Forward, KernelOptions
from backends.fixes import FIXES
from backends.kernels.base_kernel import BaseKernel
from backends.kernels.composite import forward_op
from backends.kernels.eager import default_scale


class CompositeOptions(KernelOptions):
    """Knobs of the composite kernels; each fix takes those that concern it."""

    tile: Annotated[int, Field(ge=0, le=65536)] = 128  # keys a tile; 0 = the whole sequence
    beta: Annotated[float, Field(ge=1, le=64)] = 2.0
    tol: Annotated[float, Field(ge=0, le=1)] = 1e-3
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of stochastic rounding


@dataclass(frozen=True)
class CompositeKernel(BaseKernel):
    """One fix, at some options."""

    options: CompositeOptions = field(default_factory=CompositeOptions)
    implementation = "composite"
    own_options = frozenset({"tile"})
    max_head_dim = 768  # that of the vendor's kernel, so that both take the same problems

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """o [B, Hq, T, D], m and ℓ [B, Hq, T], the residual of O (empty if none); differentiable in o."""
        self.check(q, k, v)
        x = self.options
        return forward_op(q, k, v, causal, default_scale(q, scale), self.fix, x.tile, x.beta, x.tol, x.seed)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        return self.run(q, k, v, causal, scale)[0]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Forward:
        with torch.no_grad():
            o, m, total, _ = self.run(q, k, v, causal, scale)
        return Forward(o, m + total.log())

    def launch_facts(self, call: Call) -> dict[str, Any]:
        return {"tile_keys": self.options.tile or "whole", "matmul": "fp32", "exp": "fp32"}


def composite_kernels() -> dict[str, CompositeKernel]:
    """Every fix, stock included: without it a property of the vendor's kernel looks like one of the fix."""
    kernels = [CompositeKernel(fix) for fix in FIXES]
    return {kernel.name: kernel for kernel in kernels}
