"""What every kernel shares: name, version, options, seeds, argument check. See `backends.base.Kernel`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from backends.base import Call, Forward, KernelOptions
from backends.fixes import ALL_FIXES
from backends.kernels.checks import check_qkv
from backends.names import kernel_version

HALVES = frozenset({torch.bfloat16, torch.float16})
FLOATS = HALVES | {torch.float32}


@dataclass(frozen=True)
class BaseKernel(ABC):
    """One implementation with one fix, at some options.

    A subclass sets `implementation`, writes `__call__` and `launch_facts`, and `forward` where it has an
    LSE to show. One with options names their model as the default of `options`, and in `own_options`
    those that concern it whatever the fix.
    """

    fix: str = "stock"
    options: KernelOptions = field(default_factory=KernelOptions)
    dtypes: frozenset[torch.dtype] = FLOATS

    own_options: ClassVar[frozenset[str]] = frozenset()
    max_head_dim: ClassVar[int] = 256
    seed_bits: ClassVar[int] = 31  # of a seed: part of what random bits a step draws, see `reseeded`

    @property
    @abstractmethod
    def implementation(self) -> str:
        """A name of `backends.names.IMPLEMENTATIONS`."""

    @property
    def name(self) -> str:
        return f"{self.implementation}/{self.fix}"

    @property
    def version(self) -> int:
        return kernel_version(self.name)

    @property
    def option_names(self) -> frozenset[str]:
        fix = ALL_FIXES[self.fix]
        shifting = {"beta", "tol"} if fix.shift == "repeated" else set()
        return self.own_options | shifting | ({"seed"} if fix.stochastic else set())

    @property
    def strict(self) -> bool:
        return False

    @property
    def draws(self) -> bool:
        return "seed" in self.option_names

    def configure(self, **options: Any) -> Self:
        changed = type(self.options).model_validate(self.options.model_dump() | options)
        return replace(self, options=changed)

    def reseeded(self, key: int) -> Self:
        return self.configure(seed=key >> (128 - self.seed_bits)) if self.draws else self

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Refuse what the kernel cannot take: ValueError (malformed) or Unsupported."""
        check_qkv(q, k, v, dtypes=self.dtypes, max_head_dim=self.max_head_dim)

    @abstractmethod
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        """See `backends.base.Kernel`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Forward:
        with torch.no_grad():
            return Forward(self(q, k, v, causal=causal, scale=scale), lse=None)

    @abstractmethod
    def launch_facts(self, call: Call) -> dict[str, Any]:
        """See `backends.base.Kernel`."""


@dataclass(frozen=True)
class ClosedKernel(BaseKernel):
    """A kernel of another library: stock, whatever its launch shapes are."""

    fix: str = field(default="stock", init=False)
