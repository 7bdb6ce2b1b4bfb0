"""What a case is, and the little that every case needs: inputs of all seeds, the reference, digests.

A case asks a kernel one question. It makes its inputs from integers (`bench.measure.inputs`), judges the
answer against FP64 (`bench.measure.reference`) and returns metrics; its verdict is a function of parameters
and metrics alone, so that anyone can recompute it from a result file.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from backends.base import Backend, Call, Kernel
from bench.measure.inputs import Inputs, digest, stack_seeds
from bench.measure.metrics import input_metrics, output_metrics
from bench.measure.numerics import FORMATS
from bench.measure.reference import Reference, attention_reference

Metrics = dict[str, float]
MAX_ERROR_ULP = 16.0  # mean |error| of O beyond which nothing else about it means anything


class CaseParams(BaseModel):
    """Base of a case's parameters; strict, so that a config's typo is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    added_later: ClassVar[frozenset[str]] = frozenset()  # parameters that older result files lack

    def recorded(self) -> dict[str, Any]:
        """What a row holds and is known by: a parameter added later only where it is not the default,
        so that rows measured before it keep their key."""
        fields = type(self).model_fields
        return {
            name: value
            for name, value in self.model_dump().items()
            if name not in self.added_later or value != fields[name].default
        }


class BiasParams(CaseParams):
    """A bias is called one when it passes both thresholds."""

    floor_ulp: Annotated[float, Field(ge=0, le=1)] = 0.05  # in ulps of the output
    min_z: Annotated[float, Field(ge=0, le=100)] = 5.0  # |mean| over its standard error


@dataclass
class Measurement:
    """What a case found: numbers, digests (`inputs`, `o`, `lse`, `dq`, `dk`, `dv`) and curves."""

    metrics: Metrics
    digests: dict[str, str] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # how it was run; kept, never compared


@dataclass(frozen=True)
class Workspace:
    """What a unit of hours gets: a folder of its own, kept if it is cut, and a way to say how far it is."""

    folder: Path
    say: Callable[[str], None]


@dataclass(frozen=True)
class Headline:
    """The metric that reports show: its name, what it says, how it is written, its standard error."""

    metric: str
    label: str  # with the unit
    form: str = "{:+.3f}"
    sem: str | None = None
    worst: Literal["high", "low"] = "high"  # which end of |value| a summary shows


@runtime_checkable
class Case(Protocol):
    """One question about a kernel."""

    name: str
    version: int  # raised when inputs, metrics or verdict change meaning
    Params: type[CaseParams]
    headline: Headline
    outputs: tuple[str, ...]  # digests that every measured row must hold, besides `inputs`

    def inputs(self, params: CaseParams, dtype: torch.dtype, seed: int) -> Inputs:
        """The problem of one seed, on the host."""

    def values(self, params: CaseParams) -> int:
        """How many random values the inputs of one seed take, at most: a plan bounds it."""

    def inputs_digest(self, params: CaseParams, dtype: torch.dtype, seeds: int) -> str:
        """sha256 of the inputs of all seeds; anyone can recompute it without the machine."""

    def run(
        self, kernel: Kernel, backend: Backend, params: CaseParams, dtype: torch.dtype, seeds: int
    ) -> Measurement:
        """Measure `kernel`. Raises `Unsupported` where the question does not apply."""

    def call(self, params: CaseParams, dtype: torch.dtype, seeds: int, device: torch.device) -> Call:
        """The first call of a kernel, whose launch facts a row holds."""

    def external_inputs(self, params: CaseParams) -> list[str]:
        """Input files outside the suite, by their names in the parameters; a row has their sha256."""

    def recomputed_inputs(
        self, params: CaseParams, dtype: torch.dtype, seeds: int, digests: dict[str, str]
    ) -> str:
        """`inputs_digest` for a reader without the external files: their sha256 comes from `digests`."""

    def verdict(self, params: CaseParams, metrics: Metrics) -> str:
        """The finding in one word, from parameters and metrics alone."""


@runtime_checkable
class LongCase(Case, Protocol):
    """A case that trains for hours: checked before anything runs, goes on where it was cut, and runs on
    every process of a torchrun. Its UsageErrors end the run instead of becoming a row."""

    def check(self, params: CaseParams, seeds: int) -> None:
        """Refuse bad input that can be seen at once. Raises UsageError."""

    def run_in(
        self,
        workspace: Workspace,
        kernel: Kernel,
        backend: Backend,
        params: CaseParams,
        dtype: torch.dtype,
        seeds: int,
    ) -> Measurement:
        """As `run`, going on from what an earlier, cut run left in the workspace."""


class BaseCase:
    """What cases share. Seeds are stacked along the batch dimension, so nothing loops over them."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    Params: ClassVar[type[CaseParams]]
    headline: ClassVar[Headline]
    outputs: ClassVar[tuple[str, ...]] = ("o",)  # digests that every measured row must hold

    def inputs(self, params: CaseParams, dtype: torch.dtype, seed: int) -> Inputs:
        raise NotImplementedError(f"{type(self).__name__}.inputs")

    def problem(self, params: CaseParams, dtype: torch.dtype, seeds: int) -> tuple[Inputs, Reference]:
        """Inputs of all seeds, [seeds·B, H, T, D], and their reference; shared between kernels."""
        return _problem(self, params, dtype, seeds)

    def output_bias(
        self, kernel: Kernel, backend: Backend, params: CaseParams, dtype: torch.dtype, seeds: int
    ) -> Measurement:
        """Error of O in ulps and what the inputs expose a kernel to (forward pass alone)."""
        inputs, ref = self.problem(params, dtype, seeds)
        o, digests = forward_only(kernel, backend, inputs)
        metrics = output_metrics(o, ref, FORMATS[dtype], seeds)
        metrics |= _exposure(self, params, dtype, seeds)
        return Measurement(metrics, {"inputs": self.inputs_digest(params, dtype, seeds)} | digests)

    def values(self, params: CaseParams) -> int:
        return 2**20

    def all_inputs(self, params: CaseParams, dtype: torch.dtype, seeds: int) -> Inputs:
        """Inputs of all seeds alone, for cases that need no reference."""
        return _inputs(self, params, dtype, seeds)[0]

    def inputs_digest(self, params: CaseParams, dtype: torch.dtype, seeds: int) -> str:
        """sha256 that identifies the inputs of a row."""
        return _inputs(self, params, dtype, seeds)[1]

    def call(self, params: CaseParams, dtype: torch.dtype, seeds: int, device: torch.device) -> Call:
        """With the inputs of all seeds, stacked."""
        x = self.all_inputs(params, dtype, seeds)
        return Call(tuple(x.q.shape), tuple(x.k.shape), dtype, device, x.causal)

    def external_inputs(self, params: CaseParams) -> list[str]:
        return []

    def recomputed_inputs(
        self, params: CaseParams, dtype: torch.dtype, seeds: int, digests: dict[str, str]
    ) -> str:
        return self.inputs_digest(params, dtype, seeds)


@lru_cache(maxsize=2)
def _inputs(case: BaseCase, params: CaseParams, dtype: torch.dtype, seeds: int) -> tuple[Inputs, str]:
    stacked = stack_seeds([case.inputs(params, dtype, seed) for seed in range(seeds)])
    return stacked, stacked.digest()


@lru_cache(maxsize=1)
def _problem(case: BaseCase, params: CaseParams, dtype: torch.dtype, seeds: int) -> tuple[Inputs, Reference]:
    inputs, _ = _inputs(case, params, dtype, seeds)
    return inputs, attention_reference(inputs)


@lru_cache(maxsize=2)
def _exposure(case: BaseCase, params: CaseParams, dtype: torch.dtype, seeds: int) -> Metrics:
    _, ref = _problem(case, params, dtype, seeds)
    return input_metrics(ref, FORMATS[dtype], seeds)


@dataclass(frozen=True)
class Gradients:
    """One forward and backward pass of a kernel, back on the host: o, dq, dk, dv in the dtype."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def digests(self) -> dict[str, str]:
        return {name: digest(getattr(self, name)) for name in ("o", "dq", "dk", "dv")}


def forward_backward(kernel: Kernel, backend: Backend, inputs: Inputs) -> Gradients:
    """Run `kernel` with autograd on the backend's device, upstream gradient `inputs.do`."""
    on_device = inputs.to(backend.device)
    q, k, v = (x.clone().requires_grad_() for x in (on_device.q, on_device.k, on_device.v))
    o = kernel(q, k, v, causal=inputs.causal, scale=inputs.scale)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), on_device.do)
    return Gradients(*(x.detach().cpu() for x in (o, dq, dk, dv)))


def forward_only(kernel: Kernel, backend: Backend, inputs: Inputs) -> tuple[Tensor, dict[str, str]]:
    """O of `kernel` on the host, with the digests of O and, where exposed, of LSE."""
    x = inputs.to(backend.device)
    with torch.no_grad():
        result = kernel.forward(x.q, x.k, x.v, causal=x.causal, scale=x.scale)
    digests = {"o": digest(result.o)}
    if result.lse is not None:
        digests["lse"] = digest(result.lse)
    return result.o.cpu(), digests


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


BIAS_HEADLINE = Headline(
    "aligned_ulp_mean", "mean error of O in its own direction, ulp", "{:+.3f}", "aligned_ulp_sem"
)


def question(case: Case) -> str:
    """The case's question in one line: what its file's first line says after the name."""
    module = sys.modules[type(case).__module__]
    return (module.__doc__ or "").splitlines()[0].partition(": ")[2]


def documentation(case: Case) -> str:
    """The case's docstring, dedented: claim, source, inputs, meaning of the verdicts, findings."""
    return inspect.cleandoc(type(case).__doc__ or "")
