"""Time of the reference, the eager kernels, rounding and metrics on the host.

pytest bench/tools/benchmarks --benchmark-json results/speed.json

The problem is that of `bias/tie_break` with 4 seeds: [32, 1, 256, 64] queries, 128 keys.
PyTorch's own kernels run beside ours, so that every figure can be read as a ratio within one run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from backends.base import Kernel
from backends.kernels.eager_kernels import eager_kernels
from backends.kernels.sdpa import cpu_sdpa_kernels
from bench.measure.inputs import Inputs, key_of, normal, stack_seeds
from bench.measure.metrics import input_metrics, output_metrics
from bench.measure.numerics import FORMATS, philox_words, round_float64, round_mantissa
from bench.measure.reference import Reference, attention_reference
from bench.run.registry import load_backend
from cases import load_case
from cases.passes import forward_backward

Benchmark = Callable[..., Any]
SEEDS = 4
KERNELS: dict[str, Kernel] = {**eager_kernels(), **cpu_sdpa_kernels()}


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    case = load_case("bias/tie_break")
    return stack_seeds([case.inputs(case.Params(), torch.bfloat16, s) for s in range(SEEDS)])


@pytest.fixture(scope="module")
def reference(inputs: Inputs) -> Reference:
    return attention_reference(inputs)


def test_generate_inputs(benchmark: Benchmark) -> None:
    """One million normals."""
    benchmark(normal, key_of("speed"), (1 << 20,))


def test_round_float64(benchmark: Benchmark) -> None:
    """One million values to BF16, on the host."""
    benchmark(round_float64, normal(key_of("speed"), (1 << 20,)), FORMATS[torch.bfloat16])


@pytest.mark.parametrize("rounding", ["rne", "toward_zero", "stochastic", "torch-cast"])
def test_round_mantissa(benchmark: Benchmark, rounding: str) -> None:
    """One million FP32 values to 7 bits; torch's own cast beside it."""
    x = torch.from_numpy(normal(key_of("speed"), (1 << 20,)).astype(np.float32))
    if rounding == "torch-cast":
        benchmark(lambda: x.bfloat16().float())
        return
    words = philox_words(x.shape, 0, 0, x.device)
    benchmark(round_mantissa, x, 7, rounding, words)


def test_philox(benchmark: Benchmark) -> None:
    """One million words of Philox4x32-10 as tensor operations."""
    benchmark(philox_words, (1 << 20,), 0, 0, torch.device("cpu"))


def test_reference(benchmark: Benchmark, inputs: Inputs) -> None:
    """FP64 forward pass and gradients."""

    def everything() -> None:
        ref = attention_reference(inputs)
        assert ref.dq.shape == inputs.q.shape
        assert ref.dk.shape == ref.dv.shape

    benchmark(everything)


@pytest.mark.parametrize("name", KERNELS)
def test_forward(benchmark: Benchmark, inputs: Inputs, name: str) -> None:
    kernel = KERNELS[name]
    with torch.no_grad():
        benchmark(kernel.forward, inputs.q, inputs.k, inputs.v, causal=False, scale=inputs.scale)


@pytest.mark.parametrize("name", KERNELS)
def test_forward_backward(benchmark: Benchmark, inputs: Inputs, name: str) -> None:
    benchmark(forward_backward, KERNELS[name], load_backend("cpu"), inputs)


def test_metrics(benchmark: Benchmark, inputs: Inputs, reference: Reference) -> None:
    """Error of O in ulps, coherence, near-ties."""
    o, fmt = reference.o.bfloat16(), FORMATS[torch.bfloat16]

    def everything() -> None:
        output_metrics(o, reference, fmt, SEEDS)
        input_metrics(reference, fmt, SEEDS)

    benchmark(everything)
