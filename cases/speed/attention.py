"""`speed/attention`: what does a kernel, and a fix, cost in time and memory?"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from backends.base import Backend, Kernel
from bench.inputs import Inputs
from cases.base import BaseCase, CaseParams, Headline, Measurement, Metrics
from cases.determinism.problems import ProblemParams, random_inputs


class Params(ProblemParams):
    batch: Annotated[int, Field(ge=1, le=64)] = 4
    heads: Annotated[int, Field(ge=1, le=64)] = 16
    kv_heads: Annotated[int, Field(ge=1, le=64)] = 16
    tokens: Annotated[int, Field(ge=1, le=65536)] = 4096
    head_dim: Annotated[int, Field(ge=1, le=256)] = 128
    passes: Literal["forward", "backward", "both"] = "both"
    rounds: Annotated[int, Field(ge=3, le=1000)] = 30


class SpeedAttention(BaseCase):
    """Question: median time of one call with the device's caches flushed before it, and the memory it
    allocates on top of its inputs.

    `tflops` counts 4·B·H·T²·D operations forward and 10·B·H·T²·D backward, half of them if causal:
    what must be computed, not what a kernel chooses to compute twice. Timings of one file may be
    compared with each other, never across machines. No digest of outputs is kept: a speed run may
    use other launch shapes than a numeric one.

    Verdict: always `measured`.
    """

    name = "speed/attention"
    Params = Params
    headline = Headline("median_ms", "median time, ms", "{:.3f}")

    def inputs(self, params: CaseParams, dtype: torch.dtype, seed: int) -> Inputs:
        assert isinstance(params, Params)
        return random_inputs(self.name, params, dtype, seed)

    def run(
        self, kernel: Kernel, backend: Backend, params: CaseParams, dtype: torch.dtype, seeds: int
    ) -> Measurement:
        assert isinstance(params, Params)
        x = self.all_inputs(params, dtype, seeds).to(backend.device)
        q, k, v = (t.requires_grad_(params.passes != "forward") for t in (x.q, x.k, x.v))

        def forward() -> torch.Tensor:
            return kernel(q, k, v, causal=x.causal, scale=x.scale)

        o = forward()

        def backward() -> None:
            torch.autograd.grad(o, (q, k, v), x.do, retain_graph=True)

        def both() -> None:
            torch.autograd.grad(forward(), (q, k, v), x.do)

        run = {"forward": forward, "backward": backward, "both": both}[params.passes]
        with torch.set_grad_enabled(params.passes != "forward"):
            times = torch.tensor(backend.time_ms(run, params.rounds), dtype=torch.float64)
            memory = backend.memory_of(run)
        median = float(times.median())
        metrics: Metrics = {
            "median_ms": median,
            "p10_ms": float(times.quantile(0.1)),
            "p90_ms": float(times.quantile(0.9)),
            "tflops": operations(params, seeds) / (median * 1e-3) / 1e12,
        }
        if memory is not None:
            metrics["peak_memory_mib"] = memory / 2**20
        return Measurement(metrics, {"inputs": self.inputs_digest(params, dtype, seeds)})

    def verdict(self, params: CaseParams, metrics: Metrics) -> str:
        return "measured" if metrics["median_ms"] > 0 else "invalid"


def operations(params: Params, seeds: int) -> float:
    """Floating-point operations that the passes must do: two matrix products forward, five backward."""
    products = {"forward": 2, "backward": 5, "both": 7}[params.passes]
    each = 2.0 * seeds * params.batch * params.heads * params.tokens**2 * params.head_dim
    return products * each * (0.5 if params.causal else 1.0)
