"""The bias of O: parameters, headline, measurement and verdict of the cases that ask for it."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

from backends.base import Backend, Kernel
from bench.measure.metrics import output_metrics
from bench.measure.numerics import FORMATS
from cases.base import MAX_ERROR_ULP, Case, CaseParams, Measurement, Metrics, Problem
from cases.headline import Headline
from cases.passes import forward_only


class BiasParams(CaseParams):
    """A bias is called one when it passes both thresholds."""

    floor_ulp: Annotated[float, Field(ge=0, le=1)] = 0.05  # in ulps of the output
    min_z: Annotated[float, Field(ge=0, le=100)] = 5.0  # |mean| over its standard error


B = TypeVar("B", bound=BiasParams)


class BiasCase(Case[B]):
    """A case that asks whether O errs to one side; its inputs are all that it adds."""

    headline = Headline(
        "aligned_ulp_mean", "mean error of O in its own direction, ulp", "{:+.3f}", "aligned_ulp_sem"
    )

    def run(self, kernel: Kernel, backend: Backend, problem: Problem[B]) -> Measurement:
        """Error of O in ulps and what the inputs expose a kernel to (forward pass alone)."""
        o, digests = forward_only(kernel, backend, problem.inputs)
        metrics = output_metrics(o, problem.reference, FORMATS[problem.dtype], problem.seeds)
        return Measurement(metrics | problem.exposure, digests)

    def verdict(self, params: B, metrics: Metrics) -> str:
        return bias_verdict(params, metrics)


def bias_verdict(params: BiasParams, metrics: Metrics) -> str:
    """`biased` where the mean passes the floor and is significant; `inconclusive` for one seed;
    `out_of_range` where O is not finite or simply wrong."""
    if metrics.get("nonfinite_fraction", 0.0) > 0 or not metrics["abs_ulp_mean"] <= MAX_ERROR_ULP:
        return "out_of_range"
    if abs(metrics["aligned_ulp_mean"]) <= params.floor_ulp:
        return "pass"
    z = metrics["aligned_ulp_z"]
    if z != z:
        return "inconclusive"
    return "biased" if abs(z) >= params.min_z else "pass"
