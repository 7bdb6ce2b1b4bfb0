"""`determinism/run_to_run`: does the same call give the same bits?"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from backends.base import Backend, Kernel
from bench.measure.inputs import Inputs
from cases.base import Case, Measurement, Metrics, Problem
from cases.determinism.problems import ProblemParams, problem_values, random_inputs
from cases.headline import Headline
from cases.passes import forward_backward, forward_only

OUTPUTS = ("o", "lse", "dq", "dk", "dv")


class Params(ProblemParams):
    repeats: Annotated[int, Field(ge=2, le=10_000)] = 20


class RunToRun(Case[Params]):
    """Question: over `repeats` forward and backward passes on the same inputs, in one process, with the
    backend's deterministic mode on, how many different results does each output take?

    Verdict: `pass` if every output has one digest, `nondeterministic` otherwise.
    """

    name = "determinism/run_to_run"
    compares_bits = True
    outputs = ("o", "dq", "dk", "dv")
    headline = Headline("distinct_max", "different results of one call", "{:.0f}")

    def inputs(self, params: Params, dtype: torch.dtype, seed: int) -> Inputs:
        return random_inputs(self.name, params, dtype, seed)

    def values(self, params: Params) -> int:
        return problem_values(params)

    def run(self, kernel: Kernel, backend: Backend, problem: Problem[Params]) -> Measurement:
        inputs = problem.inputs
        seen: dict[str, set[str]] = {name: set() for name in OUTPUTS}
        first: dict[str, str] = {}
        for _ in range(problem.params.repeats):
            digests = forward_backward(kernel, backend, inputs).digests()
            digests |= {k: v for k, v in forward_only(kernel, backend, inputs)[1].items() if k == "lse"}
            first = first or digests
            for name, value in digests.items():
                seen[name].add(value)
        metrics = {f"distinct_{name}": float(len(seen[name])) for name in first}
        metrics["distinct_max"] = max(metrics.values())
        return Measurement(metrics, first)

    def verdict(self, params: Params, metrics: Metrics) -> str:
        return "pass" if metrics["distinct_max"] == 1 else "nondeterministic"
