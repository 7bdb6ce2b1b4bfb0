"""The `flash_attn` packages that users install themselves: FlashAttention 2, 3 and 4.

A package that is not installed leaves its kernel in the list as unsupported, with the reason, so that
tables show what is missing. Causal needs as many queries as keys: the packages align bottom-right.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.base import Call, Unsupported
from backends.host import installed_version
from backends.kernels.base_kernel import HALVES, ClosedKernel

# generation: module, distribution that holds it
PACKAGES = {
    "2": ("flash_attn", "flash-attn"),
    "3": ("flash_attn_interface", "flash-attn-3"),
    "4": ("flash_attn.cute", "flash-attn-4"),
}


@dataclass(frozen=True)
class FlashAttnKernel(ClosedKernel):
    """`flash_attn_func` of one generation, deterministic where it can be asked for."""

    dtypes: frozenset[torch.dtype] = HALVES
    generation: str = "2"

    @property
    def implementation(self) -> str:
        return f"flash-attn-{self.generation}"

    def _function(self) -> Callable[..., Any]:
        module, package = PACKAGES[self.generation]
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise Unsupported(f"{package} is not installed")
        try:
            function: Callable[..., Any] = importlib.import_module(module).flash_attn_func
        except (ImportError, AttributeError) as error:
            raise Unsupported(f"{package} is installed, but does not load: {error}") from error
        return function

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        function = self._function()
        self.check(q, k, v)
        if causal and q.shape[2] != k.shape[2]:
            raise Unsupported("causal with another number of queries than keys: aligned bottom-right")
        arguments: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
        if self.generation != "4":
            arguments["deterministic"] = True
        o = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **arguments)
        o = o[0] if isinstance(o, tuple) else o
        return o.transpose(1, 2)  # [B, T, H, D] → [B, H, T, D]

    def launch_facts(self, call: Call) -> dict[str, Any]:
        package = PACKAGES[self.generation][1]
        version = installed_version(package) or "not installed"
        return {"library": f"{package} {version}", "tile_keys": "not exposed"}


def flash_attn_kernels() -> dict[str, FlashAttnKernel]:
    """One kernel a generation, installed or not."""
    kernels = [FlashAttnKernel(generation=generation) for generation in PACKAGES]
    return {kernel.name: kernel for kernel in kernels}
