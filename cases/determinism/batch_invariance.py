"""`determinism/batch_invariance`: does a row's result depend on what else is in the batch?"""

from __future__ import annotations

import torch
from torch import Tensor

from backends.base import Backend, Kernel
from bench.measure.inputs import Inputs
from cases.base import Case, Measurement, Metrics, Problem
from cases.determinism.problems import ProblemParams, problem_values, random_inputs
from cases.headline import Headline
from cases.passes import Gradients, forward_backward

OUTPUTS = ("o", "dq", "dk", "dv")


class BatchInvariance(Case[ProblemParams]):
    """Question: is the result of a batch element the same bits when it is computed alone, and when its
    neighbours stand in another order?

    Metrics: for each output the share of its values that differ, `alone_…` and `reversed_…`;
    `differing_max` is the largest.

    Verdict: `pass` if every value is the same, `batch_dependent` otherwise. Stochastic rounding takes
    its random bits from the element's position, so it depends on the order by design.
    """

    name = "determinism/batch_invariance"
    compares_bits = True
    outputs = ("o", "dq", "dk", "dv")
    headline = Headline("differing_max", "largest share of values that change with the batch", "{:.3g}")

    def inputs(self, params: ProblemParams, dtype: torch.dtype, seed: int) -> Inputs:
        return random_inputs(self.name, params, dtype, seed)

    def values(self, params: ProblemParams) -> int:
        return problem_values(params)

    def run(self, kernel: Kernel, backend: Backend, problem: Problem[ProblemParams]) -> Measurement:
        inputs = problem.inputs
        together = forward_backward(kernel, backend, inputs)
        size = inputs.q.shape[0]
        alone = [forward_backward(kernel, backend, _take(inputs, torch.tensor([i]))) for i in range(size)]
        order = torch.arange(size - 1, -1, -1)
        flipped = forward_backward(kernel, backend, _take(inputs, order))
        metrics: Metrics = {}
        for name in OUTPUTS:
            whole: Tensor = getattr(together, name)
            single = torch.cat([getattr(g, name) for g in alone])
            metrics[f"alone_{name}"] = _differing(whole, single)
            metrics[f"reversed_{name}"] = _differing(whole, _reverse(flipped, name, order))
        metrics["differing_max"] = max(metrics.values())
        digests = together.digests()
        return Measurement(metrics, digests)

    def verdict(self, params: ProblemParams, metrics: Metrics) -> str:
        return "pass" if metrics["differing_max"] == 0 else "batch_dependent"


def _take(x: Inputs, index: Tensor) -> Inputs:
    return Inputs(x.q[index], x.k[index], x.v[index], x.do[index], x.causal, x.scale)


def _reverse(grads: Gradients, name: str, order: Tensor) -> Tensor:
    reversed_back: Tensor = getattr(grads, name)[order]
    return reversed_back


def _differing(a: Tensor, b: Tensor) -> float:
    """Share of values that are not the same bits (so −0 is not +0)."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    differs = a.contiguous().view(integer) != b.contiguous().view(integer)
    return float(differs.double().mean())
