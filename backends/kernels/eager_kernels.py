"""The eager kernels as the suite sees them: `eager-stored/<fix>`, `eager-fused/<fix>` and, for
training with few mantissa bits, `eager-ladder/<fix or ablation>`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from backends.base import Forward, KernelOptions, Unsupported
from backends.fixes import ABLATIONS, FIXES
from backends.kernels.checks import check_qkv
from backends.kernels.eager import EagerAttention, Policy, Spec, default_scale, eager_forward
from backends.kernels.eager_ladder import LadderAttention, ladder_forward

MAX_HEAD_DIM = 256
DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
ALL_FIXES = FIXES | ABLATIONS


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
class EagerKernel:
    """One policy with one fix, at some options."""

    policy: Policy
    fix: str
    options: EagerOptions = field(default_factory=EagerOptions)
    dtypes: frozenset[torch.dtype] = DTYPES

    @property
    def name(self) -> str:
        return f"eager-{self.policy}/{self.fix}"

    @property
    def option_names(self) -> frozenset[str]:
        names, fix = {"mantissa_bits"}, ALL_FIXES[self.fix]
        if self.policy != "ladder":
            names.add("tile")
        elif not fix.stochastic:  # whose random words are made outside of any compiled part
            names.add("compiled")
        if fix.shift == "repeated":
            names |= {"beta", "tol"}
        return frozenset(names | ({"seed"} if fix.stochastic else {"rounding"}))

    def configure(self, **options: Any) -> EagerKernel:
        changed = EagerOptions.model_validate(self.options.model_dump() | options)
        return EagerKernel(self.policy, self.fix, changed, self.dtypes)

    @property
    def spec(self) -> Spec:
        return Spec(self.policy, ALL_FIXES[self.fix], **self.options.model_dump())

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_qkv(q, k, v, dtypes=self.dtypes, max_head_dim=MAX_HEAD_DIM)
        if self.options.compiled and q.dtype == torch.float16:  # see `Storage.by_cast`
            raise Unsupported("compiled: takes bfloat16 and float32; float16's range would be lost")

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        self._check(q, k, v)
        function = LadderAttention if self.policy == "ladder" else EagerAttention
        with torch.autocast(q.device.type, enabled=False):  # or FP32 products would be cast
            return function.apply(q, k, v, causal, default_scale(q, scale), self.spec)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Forward:
        self._check(q, k, v)
        run = ladder_forward if self.policy == "ladder" else eager_forward
        with torch.autocast(q.device.type, enabled=False):
            result = run(q, k, v, causal, default_scale(q, scale), self.spec)
        return Forward(result.o, result.lse)

    def launch_facts(self) -> dict[str, Any]:
        if self.policy == "ladder":
            elementwise = "compiled" if self.options.compiled else "eager"
            return {"tile_keys": "whole", "matmul": "fp32 sums", "elementwise": elementwise}
        return {"tile_keys": self.options.tile or "whole", "matmul": "fp32", "exp": "fp32"}


def eager_kernels() -> dict[str, EagerKernel]:
    """Every policy with every fix; the ladder (untiled) with the ablations too."""
    kernels = [EagerKernel(policy, fix) for policy in ("stored", "fused") for fix in FIXES]
    kernels += [EagerKernel("ladder", fix, EagerOptions(tile=0)) for fix in ALL_FIXES]
    return {kernel.name: kernel for kernel in kernels}
