"""The Triton kernels as the suite sees them: `triton/<fix>`.

The device code is in `triton_flash.py`, launches and operators in `triton_flash_ops.py`; Triton is
imported when a kernel first runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from backends.base import Call, Forward, KernelOptions, Unsupported
from backends.fixes import FIXES
from backends.kernels.base_kernel import BaseKernel
from backends.kernels.triton_tiles import LaunchShapes, default_shapes


class TritonOptions(KernelOptions):
    """Knobs of the Triton kernels; 0 for a block means the pinned default of the chip and head_dim."""

    beta: Annotated[float, Field(ge=1, le=64)] = 2.0
    tol: Annotated[float, Field(ge=0, lt=0.1)] = 1e-3
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    block_n: Literal[0, 16, 32, 64, 128, 256] = 0  # keys a tile, forward
    autotune: bool = False  # time many launch shapes first; for speed runs, where bits do not matter


@dataclass(frozen=True)
class TritonKernel(BaseKernel):
    """Fused attention with one fix, at pinned launch shapes."""

    options: TritonOptions = field(default_factory=TritonOptions)
    implementation = "triton"
    own_options = frozenset({"block_n", "autotune"})

    def launch_shapes(self, call: Call) -> LaunchShapes:
        """Pinned ones, or those found by autotuning. Raises Unsupported."""
        from backends.kernels import triton_flash_ops as ops

        head_dim = call.q_shape[3]
        if head_dim not in ops.HEAD_DIMS:
            raise Unsupported(f"head_dim {head_dim}: this kernel takes {ops.HEAD_DIMS}")
        chip, stochastic = ops.capability_of(call.device), FIXES[self.fix].stochastic
        shapes = default_shapes(head_dim, call.dtype, chip, stochastic)
        if self.options.autotune:
            if call.device.type != "cuda":
                raise Unsupported(f"autotune: on CUDA alone, not on {call.device.type}")
            shapes = _tuned(self.fix, call)
        if self.options.block_n:
            shapes = replace(shapes, forward=replace(shapes.forward, block_n=self.options.block_n))
        return shapes

    def _arguments(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Any]:
        """What the operator is called with, once the input is checked."""
        self.check(q, k, v)
        chosen = {"fix": self.fix, "shapes": self.launch_shapes(Call.with_tensors(q, k, causal))}
        return chosen | self.options.model_dump(include={"beta", "tol", "seed"})

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        arguments = self._arguments(q, k, v, causal)
        from backends.kernels.triton_flash_ops import triton_attention

        with _too_large_is_unsupported():
            return triton_attention(q, k, v, causal=causal, scale=scale, **arguments)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Forward:
        arguments = self._arguments(q, k, v, causal)
        from backends.kernels.triton_flash_ops import triton_attention_forward

        with torch.no_grad(), _too_large_is_unsupported():
            return Forward(*triton_attention_forward(q, k, v, causal=causal, scale=scale, **arguments))

    def launch_facts(self, call: Call) -> dict[str, Any]:
        from backends.kernels import triton_flash_ops as ops

        shapes, facts = self.launch_shapes(call), dict[str, Any]()
        for name, value in ops.launch_facts(call.q_shape[3], call.dtype, call.device, shapes).items():
            parts = value if isinstance(value, dict) else {None: value}
            facts |= {name if part is None else f"{name}_{part}": v for part, v in parts.items()}
        return facts


@cache
def _tuned(fix: str, call: Call) -> LaunchShapes:
    """The fastest launch shapes for a problem, found once a process on random inputs."""
    import triton

    from backends.kernels.triton_tune import tune

    q = torch.randn(call.q_shape, device=call.device).to(call.dtype)
    k, v = (torch.randn(call.kv_shape, device=call.device).to(call.dtype) for _ in range(2))

    def time_ms(run: Callable[[], object]) -> float:
        return float(triton.testing.do_bench(run, return_mode="median"))

    return tune(q, k, v, causal=call.causal, fix=fix, time_ms=time_ms)


@contextlib.contextmanager
def _too_large_is_unsupported() -> Iterator[None]:
    """Launch shapes that do not fit the chip are a property of the chip, not a failure of the run."""
    from triton.runtime.errors import OutOfResources

    try:
        yield
    except OutOfResources as error:
        raise Unsupported(f"these launch shapes do not fit the chip: {error}") from error


def triton_kernels() -> dict[str, TritonKernel]:
    """Every fix, where Triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return {}
    kernels = [TritonKernel(fix) for fix in FIXES]
    return {kernel.name: kernel for kernel in kernels}
