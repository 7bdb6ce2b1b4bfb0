"""What kernels of other libraries share: no options of ours, no LSE unless the library gives one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from backends.base import Forward, KernelOptions

MAX_HEAD_DIM = 256
HALVES = frozenset({torch.bfloat16, torch.float16})
FLOATS = HALVES | {torch.float32}


@dataclass(frozen=True)
class ClosedKernel(ABC):
    """A stock kernel whose launch shapes cannot be set from outside."""

    fix: str = field(default="stock", init=False)
    options: KernelOptions = field(default_factory=KernelOptions, init=False)
    option_names: frozenset[str] = field(default=frozenset(), init=False)

    def configure(self, **options: Any) -> Self:
        KernelOptions.model_validate(options)  # refuses every name
        return self

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
