"""PyTorch's own attention, pinned to one implementation: what users already run.

`sdpa-math/stock` and `sdpa-flash/stock`. An implementation that cannot run the problem raises
`Unsupported` with PyTorch's reason; there is never a silent fallback to another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from backends.base import Forward, KernelOptions, Unsupported
from backends.kernels.checks import check_qkv

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class SdpaKernel:
    """`scaled_dot_product_attention` under one `SDPBackend`."""

    implementation: str  # "math", "flash"
    backend: SDPBackend
    dtypes: frozenset[torch.dtype]
    fix: str = "stock"
    options: KernelOptions = field(default_factory=KernelOptions)
    option_names: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return f"sdpa-{self.implementation}/{self.fix}"

    def configure(self, **options: Any) -> SdpaKernel:
        KernelOptions.model_validate(options)  # refuses every name: nothing can be set from outside
        return self

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        check_qkv(q, k, v, dtypes=self.dtypes, max_head_dim=MAX_HEAD_DIM)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:  # explicit heads: the same arithmetic whether or not the kernel knows GQA
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        try:
            with sdpa_kernel([self.backend]):
                return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise Unsupported(
                    f"PyTorch has no {self.implementation} kernel for this"
                ) from error
            raise

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Forward:
        with torch.no_grad():
            return Forward(self(q, k, v, causal=causal, scale=scale), lse=None)

    def launch_facts(self) -> dict[str, Any]:
        return {"library": f"torch {torch.__version__}", "tile_keys": "not exposed"}


def cpu_sdpa_kernels() -> dict[str, SdpaKernel]:
    """PyTorch's CPU implementations."""
    dtypes = frozenset({torch.bfloat16, torch.float16, torch.float32})
    kernels = [
        SdpaKernel("math", SDPBackend.MATH, dtypes),
        SdpaKernel("flash", SDPBackend.FLASH_ATTENTION, dtypes),
    ]
    return {kernel.name: kernel for kernel in kernels}
