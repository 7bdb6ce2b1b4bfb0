"""Time of the Triton kernels beside PyTorch's flash and cuDNN, on one GPU.

pytest bench/tools/benchmarks/bench_cuda.py --benchmark-json results/speed-cuda.json

Device time by events, not host time: L2 is overwritten before every call, and the device kept busy
until the host has queued the call. pytest-benchmark groups the kernels of one shape and pass, so that
every figure is also a ratio to its peers in the same run; TFLOP/s and memory are in `extra_info`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backends import cuda

if reason := cuda.unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

from cases.speed.attention import Params, operations

SHAPES = [(4, 16, 4096, 128), (8, 16, 2048, 64), (2, 16, 8192, 128)]  # (B, H, T, D), causal
BACKEND = cuda.create()
KERNELS = [name for name in BACKEND.kernels() if name.startswith(("triton/", "sdpa-flash", "sdpa-cudnn"))]
TIMER = BACKEND.timer()


class DeviceTime:
    """A recorded event; the difference of two is seconds of device time."""

    def __init__(self) -> None:
        self.event = TIMER.mark()

    def __sub__(self, start: DeviceTime) -> float:
        self.event.synchronize()
        return float(start.event.elapsed_time(self.event)) * 1e-3


@pytest.mark.parametrize("part", ["forward", "backward", "both"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.benchmark(timer=DeviceTime, warmup=False)
def test_attention(benchmark: Any, name: str, shape: tuple[int, int, int, int], part: str) -> None:
    batch, heads, tokens, head_dim = shape
    benchmark.group = f"{shape} {part}"
    kernel = BACKEND.kernels()[name]
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    o = kernel(q, k, v, causal=True)

    def forward() -> None:
        with torch.no_grad():
            kernel(q, k, v, causal=True)

    def backward() -> None:
        torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

    def both() -> None:
        torch.autograd.grad(kernel(q, k, v, causal=True), (q, k, v), do)

    run: Callable[[], None] = {"forward": forward, "backward": backward, "both": both}[part]
    memory = BACKEND.memory_of(run)
    benchmark.pedantic(run, setup=TIMER.prepare, rounds=40, warmup_rounds=3)
    params = Params(batch=batch, heads=heads, kv_heads=heads, tokens=tokens, head_dim=head_dim)
    seconds = benchmark.stats.stats.median
    benchmark.extra_info["tflops"] = operations(params, 1, part) / seconds / 1e12
    benchmark.extra_info["peak_memory_mib"] = None if memory is None else memory / 2**20
