"""PyTorch's own attention, pinned to one implementation: what users already run.

`sdpa-math` and `sdpa-flash` on every device, `sdpa-cudnn` and `sdpa-efficient` on CUDA. An
implementation that cannot run the problem raises `Unsupported` with PyTorch's reason; there is never a
silent fallback to another one.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from backends.base import Call, Unsupported
from backends.kernels.base_kernel import HALVES, ClosedKernel

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
NO_KERNEL = ("No available kernel", "No viable backend", "No execution plans support the graph")


@dataclass(frozen=True)
class SdpaKernel(ClosedKernel):
    """`scaled_dot_product_attention` under one `SDPBackend`."""

    algorithm: str = "math"  # one of BACKENDS

    @property
    def implementation(self) -> str:
        return f"sdpa-{self.algorithm}"

    @property
    def strict(self) -> bool:
        """Deterministic in the backward pass only where `warn_only` is off, see `cases.algorithms`."""
        return self.algorithm in ("flash", "efficient")

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        self.check(q, k, v)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:  # explicit heads: the same arithmetic whether or not the kernel knows GQA
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        with warnings.catch_warnings(record=True) as caught:  # PyTorch gives its reasons as warnings
            warnings.simplefilter("always")
            try:
                with sdpa_kernel([BACKENDS[self.algorithm]]):
                    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
            except RuntimeError as error:
                if not any(text in str(error) for text in NO_KERNEL):
                    raise
                why = "; ".join(str(w.message).partition(" (Triggered")[0] for w in caught)
                raise Unsupported(
                    f"PyTorch has no {self.algorithm} kernel for this: {why or error}"
                ) from error

    def launch_facts(self, call: Call) -> dict[str, Any]:
        facts = {"library": f"torch {torch.__version__}", "tile_keys": "not exposed"}
        return facts | ({"warn_only": False} if self.strict else {})


def cpu_sdpa_kernels() -> dict[str, SdpaKernel]:
    """PyTorch's CPU implementations."""
    return _by_name(SdpaKernel(algorithm="math"), SdpaKernel(algorithm="flash"))


def cuda_sdpa_kernels() -> dict[str, SdpaKernel]:
    """PyTorch's CUDA implementations."""
    return _by_name(
        SdpaKernel(algorithm="flash", dtypes=HALVES),
        SdpaKernel(algorithm="cudnn", dtypes=HALVES),
        SdpaKernel(algorithm="efficient"),
        SdpaKernel(algorithm="math"),
    )


def _by_name(*kernels: SdpaKernel) -> dict[str, SdpaKernel]:
    return {kernel.name: kernel for kernel in kernels}
