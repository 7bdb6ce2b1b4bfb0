"""The eager kernels as the suite sees them: `eager-stored/<fix>`, `eager-fused/<fix>` and, for
training with few mantissa bits, `eager-ladder/<fix or ablation>`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from backends.base import Call, Forward, KernelOptions, Unsupported
from backends.fixes import ALL_FIXES, FIXES
from backends.kernels.base_kernel import BaseKernel
from backends.kernels.eager import EagerAttention, Policy, Spec, default_scale, eager_forward
from backends.kernels.eager_ladder import LadderAttention, ladder_forward


class EagerOptions(KernelOptions):
    """Knobs of the eager kernels; each fix takes those that concern it."""

    tile: Annotated[int, Field(ge=0, le=65536)] = 128  # keys a tile; 0 = the whole sequence
    beta: Annotated[float, Field(ge=1, le=64)] = 2.0
    tol: Annotated[float, Field(ge=0, le=1)] = 1e-3
    mantissa_bits: Annotated[int, Field(ge=1, le=23)] | None = None  # None = the dtype's own
    rounding: Literal["rne", "toward_zero"] = "rne"  # of the accumulator and the output
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of stochastic rounding
    compiled: bool = False  # elementwise parts by torch.compile: faster, other last bits


@dataclass(frozen=True)
class EagerKernel(BaseKernel):
    """One policy with one fix, over key tiles."""

    options: EagerOptions = field(default_factory=EagerOptions)
    policy: ClassVar[Policy]
    own_options = frozenset({"mantissa_bits", "tile"})

    @property
    def implementation(self) -> str:
        return f"eager-{self.policy}"

    @property
    def option_names(self) -> frozenset[str]:
        names = super().option_names
        return names if "seed" in names else names | {"rounding"}

    @property
    def spec(self) -> Spec:
        return Spec(self.policy, ALL_FIXES[self.fix], **self.options.model_dump())

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        self.check(q, k, v)
        with torch.autocast(q.device.type, enabled=False):  # or FP32 products would be cast
            return EagerAttention.apply(q, k, v, causal, default_scale(q, scale), self.spec)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Forward:
        self.check(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            result = eager_forward(q, k, v, causal, default_scale(q, scale), self.spec)
        return Forward(result.o, result.lse)

    def launch_facts(self, call: Call) -> dict[str, Any]:
        return {"tile_keys": self.options.tile or "whole", "matmul": "fp32", "exp": "fp32"}


class StoredKernel(EagerKernel):
    """`eager-stored/<fix>`."""

    policy = "stored"


class FusedKernel(EagerKernel):
    """`eager-fused/<fix>`."""

    policy = "fused"


@dataclass(frozen=True)
class LadderKernel(EagerKernel):
    """`eager-ladder/<fix or ablation>`: untiled."""

    options: EagerOptions = field(default_factory=lambda: EagerOptions(tile=0))
    policy = "ladder"
    own_options = frozenset({"mantissa_bits"})
    seed_bits = 63

    @property
    def option_names(self) -> frozenset[str]:
        names = super().option_names
        # A compiled part makes no random words.
        return names if "seed" in names else names | {"compiled"}

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().check(q, k, v)
        if self.options.compiled and q.dtype == torch.float16:  # see `Storage.by_cast`
            raise Unsupported("compiled: takes bfloat16 and float32; float16's range would be lost")

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        self.check(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            return LadderAttention.apply(q, k, v, causal, default_scale(q, scale), self.spec)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Forward:
        self.check(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            result = ladder_forward(q, k, v, causal, default_scale(q, scale), self.spec)
        return Forward(result.o, result.lse)

    def launch_facts(self, call: Call) -> dict[str, Any]:
        elementwise = "compiled" if self.options.compiled else "eager"
        return {"tile_keys": "whole", "matmul": "fp32 sums", "elementwise": elementwise}


def eager_kernels() -> dict[str, EagerKernel]:
    """Every policy with every fix; the ladder with the ablations too."""
    kernels: list[EagerKernel] = [cls(fix) for cls in (StoredKernel, FusedKernel) for fix in FIXES]
    kernels += [LadderKernel(fix) for fix in ALL_FIXES]
    return {kernel.name: kernel for kernel in kernels}
