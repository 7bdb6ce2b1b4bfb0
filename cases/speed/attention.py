"""`speed/attention`: what does a kernel, and a fix, cost in time and memory?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field

from backends.base import Backend, Kernel
from bench.files.records import Row
from bench.measure.inputs import Inputs
from cases.algorithms import algorithms
from cases.base import Case, Measurement, Metrics, Problem
from cases.determinism.problems import ProblemParams, problem_values, random_inputs
from cases.headline import Headline


class Params(ProblemParams):
    batch: Annotated[int, Field(ge=1, le=64)] = 4
    heads: Annotated[int, Field(ge=1, le=64)] = 16
    kv_heads: Annotated[int, Field(ge=1, le=64)] = 16
    tokens: Annotated[int, Field(ge=1, le=65536)] = 4096
    head_dim: Annotated[int, Field(ge=1, le=256)] = 128
    rounds: Annotated[int, Field(ge=3, le=1000)] = 30
    deterministic: bool = False  # time what PyTorch runs under use_deterministic_algorithms


# A boost clock is a promise, not a limit: cards run up to a tenth above it.
TOLERANCE = 1.10
PRODUCTS = {"forward": 2, "backward": 5, "both": 7}  # matrix products that a pass must do


class SpeedAttention(Case[Params]):
    """Question: device time of one call, forward, backward and both, with the device's caches flushed
    before it, and the memory that both passes allocate on top of the inputs.

    `…_tflops` counts 4·B·H·T²·D operations forward and 10·B·H·T²·D backward, half of them if causal:
    what must be computed, not what a kernel chooses to compute twice. `…_ms` is the median, with the
    span of the middle 80 %. Timings of one file may be compared with each other, never across
    machines.

    Timed as users run it: `deterministic` asks PyTorch for its deterministic algorithms, which its own
    kernels have a slower backward pass for (ours are deterministic either way).

    Verdict: always `measured`.
    """

    name = "speed/attention"
    timed = True
    subject = "cost"
    outputs = ()  # a speed run may use other launch shapes than a numeric one
    headline = Headline("both_ms", "median time of forward and backward, ms", "{:.3f}")

    def inputs(self, params: Params, dtype: torch.dtype, seed: int) -> Inputs:
        return random_inputs(self.name, params, dtype, seed)

    def values(self, params: Params) -> int:
        return problem_values(params)

    def run(self, kernel: Kernel, backend: Backend, problem: Problem[Params]) -> Measurement:
        params, x = problem.params, problem.inputs.to(backend.device)
        q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))

        def forward() -> torch.Tensor:
            return kernel(q, k, v, causal=x.causal, scale=x.scale)

        def forward_alone() -> None:
            with torch.no_grad():
                forward()

        o = forward()

        def backward() -> None:
            torch.autograd.grad(o, (q, k, v), x.do, retain_graph=True)

        def both() -> None:
            torch.autograd.grad(forward(), (q, k, v), x.do)

        metrics: Metrics = {}
        with algorithms(params.deterministic):
            for name, run in (("forward", forward_alone), ("backward", backward), ("both", both)):
                times = torch.tensor(backend.time_ms(run, params.rounds), dtype=torch.float64)
                median = float(times.median())
                metrics |= {
                    f"{name}_ms": median,
                    f"{name}_p10_ms": float(times.quantile(0.1)),
                    f"{name}_p90_ms": float(times.quantile(0.9)),
                    f"{name}_tflops": operations(params, problem.seeds, name) / (median * 1e-3) / 1e12,
                }
            memory = backend.memory_of(both)
        if memory is not None:
            metrics["both_peak_memory_mib"] = memory / 2**20
        return Measurement(metrics)

    def verdict(self, params: Params, metrics: Metrics) -> str:
        return "measured" if metrics["both_ms"] > 0 else "invalid"

    def implausible(self, row: Row, peak_tflops: float | None) -> Iterator[str]:
        """Quantiles out of order, rates that the times do not give, and rates above the chip's peak."""
        params = Params.model_validate(row.params)
        for name in PRODUCTS:
            keys = [f"{name}{end}" for end in ("_p10_ms", "_ms", "_p90_ms", "_tflops")]
            if missing := [key for key in keys if key not in row.metrics]:
                yield f"metrics: '{missing[0]}' is missing"
                continue
            p10, median, p90, tflops = (row.metrics[key] for key in keys)
            if not 0 < p10 <= median <= p90 < math.inf:
                yield f"metrics.{name}_ms: {p10}, {median}, {p90} are no quantiles of a time"
                continue
            expected = operations(params, row.seeds, name) / (median * 1e-3) / 1e12
            if not math.isclose(tflops, expected, rel_tol=1e-9):
                yield f"metrics.{name}_tflops: {tflops}, but its time gives {expected:.6g}"
            if peak_tflops is not None and not expected <= peak_tflops * TOLERANCE:
                yield f"metrics.{name}_ms: {expected:.4g} TFLOP/s, above the chip's peak of {peak_tflops:g}"


def operations(params: Params, seeds: int, name: str) -> float:
    """Floating-point operations that a pass (`forward`, `backward`, `both`) must do."""
    each = 2.0 * seeds * params.batch * params.heads * params.tokens**2 * params.head_dim
    return PRODUCTS[name] * each * (0.5 if params.causal else 1.0)
