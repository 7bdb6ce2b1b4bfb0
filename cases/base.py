"""What a case is: one question about a kernel, its inputs made from integers, and a verdict.

A case makes its inputs (`bench.measure.inputs`), judges the kernel's answer against FP64
(`bench.measure.reference`) and returns metrics; its verdict is a function of parameters and metrics alone, so
that anyone can recompute it from a result file.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, get_args

import torch
from pydantic import BaseModel, ConfigDict
from typing_extensions import get_original_bases

from backends.base import Backend, Call, Kernel
from bench.files.load import Found
from bench.files.records import Row
from bench.measure.inputs import Inputs, stack_seeds
from bench.measure.metrics import input_metrics
from bench.measure.numerics import FORMATS
from bench.measure.reference import Reference, attention_reference
from cases.headline import Headline

if TYPE_CHECKING:
    from cases.crash.runs import Group

Metrics = dict[str, float]
# A question of the answer table and of the sentences that a report makes.
Subject = Literal["bias", "leak", "range", "drift", "crash", "cost"]
MAX_ERROR_ULP = 16.0  # mean |error| of O beyond which nothing else about it means anything
T = TypeVar("T")


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


P = TypeVar("P", bound=CaseParams)


@dataclass
class Measurement:
    """What a case found: numbers, digests of outputs (`o`, `lse`, `dq`, `dk`, `dv`, …) and curves."""

    metrics: Metrics
    digests: dict[str, str] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # how it was run; kept, never compared


@dataclass(frozen=True)
class Workspace:
    """What a unit of hours gets: a folder of its own, kept if it is cut, and a way to say how far it is."""

    folder: Path
    say: Callable[[str], None]


class Problem(Generic[P]):
    """What a kernel is asked at one parameter point: the inputs of all seeds, and what is made from them.

    Everything is made when it is first asked for, and once: kernels that are asked the same share the
    problem, and points that differ in nothing that the inputs depend on share those (`Case.made_from`).
    """

    def __init__(
        self, case: Case[P], params: P, dtype: torch.dtype, seeds: int, source: Problem[P] | None = None
    ):
        self.case, self.params, self.dtype, self.seeds = case, params, dtype, seeds
        self.source: Problem[P] = source or self  # whose inputs these are
        self._made: dict[Any, Any] = {}

    @cached_property
    def inputs(self) -> Inputs:
        """Inputs of all seeds, stacked along the batch dimension: [seeds·B, H, T, D]."""
        if self.source is not self:
            return self.source.inputs
        return stack_seeds([self.case.inputs(self.params, self.dtype, seed) for seed in range(self.seeds)])

    @cached_property
    def digest(self) -> str:
        """sha256 that identifies the inputs; anyone can recompute it without the machine."""
        return self.source.digest if self.source is not self else self.case.hash_inputs(self)

    @cached_property
    def reference(self) -> Reference:
        """FP64 attention on these inputs."""
        return self.source.reference if self.source is not self else attention_reference(self.inputs)

    @cached_property
    def exposure(self) -> Metrics:
        """What the inputs expose a kernel to: near-ties, repeated row maxima."""
        if self.source is not self:
            return self.source.exposure
        return input_metrics(self.reference, FORMATS[self.dtype], self.seeds)

    def once(self, make: Callable[[Problem[P]], T]) -> T:
        """`make(self)`, made at the first call and kept: for what a case derives from its inputs."""
        if make not in self._made:
            self._made[make] = make(self)
        made: T = self._made[make]
        return made


class Case(ABC, Generic[P]):
    """One question about a kernel. Subclass it, name its parameters, and register it in `cases/__init__.py`.

    The module's docstring begins with the name and the question; the class's says the claim and its source,
    the inputs, and what the verdicts mean.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1  # raised when inputs, metrics or verdict change meaning
    Params: type[P]  # the class in brackets: `class Mine(Case[Params])`
    headline: ClassVar[Headline]
    outputs: ClassVar[tuple[str, ...]] = ("o",)  # digests that every measured row must hold, besides `inputs`
    timed: ClassVar[bool] = False  # its metrics are times: never run beside anything else
    # It trains for hours: keeps checkpoints in a workspace, goes on where it was cut, and runs on every
    # process of a torchrun. Its UsageErrors end the run instead of becoming a row.
    long: ClassVar[bool] = False
    compares_bits: ClassVar[bool] = False  # the digests are the result: machines are held side by side
    subject: ClassVar[Subject | None] = None  # the question of a report that its rows answer
    told_at: ClassVar[Mapping[str, object]] = {}  # dtype and parameters of the rows that answer it

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for argument in (each for base in get_original_bases(cls) for each in get_args(base)):
            if isinstance(argument, type) and issubclass(argument, CaseParams):
                cls.Params = argument  # type: ignore[assignment]

    @property
    def question(self) -> str:
        """The question in one line: what the module's first line says after the name, or else the class's."""
        module = inspect.cleandoc(sys.modules[type(self).__module__].__doc__ or "")
        said = module.partition("\n")[0].partition(f"`{self.name}`: ")[2]
        return said or self.documentation.partition("\n")[0]

    @property
    def documentation(self) -> str:
        """The class's docstring, dedented: claim, source, inputs, meaning of the verdicts, findings."""
        return inspect.cleandoc(type(self).__doc__ or "")

    def check(self, params: P, seeds: int) -> None:
        """Refuse, before anything runs, bad input that can be seen at once. Raises UsageError."""

    def problem(
        self, params: P, dtype: torch.dtype, seeds: int, last: Problem[Any] | None = None
    ) -> Problem[P]:
        """The problem of a parameter point; `last`, an earlier one of any case, may lend its inputs."""
        made_from = self.made_from(params)
        source = None if last is None else last.source
        asked = (self, made_from, dtype, seeds)
        if source is None or (source.case, source.params, source.dtype, source.seeds) != asked:
            source = Problem(self, made_from, dtype, seeds)
        return source if params == made_from else Problem(self, params, dtype, seeds, source)

    def made_from(self, params: P) -> P:
        """The parameters that the inputs depend on, the others at their defaults; all, unless said."""
        return params

    def inputs(self, params: P, dtype: torch.dtype, seed: int) -> Inputs:
        """The inputs of one seed, on the host. A case that trains has none: it has data and weights."""
        raise NotImplementedError(f"{type(self).__name__}.inputs")

    def values(self, params: P) -> int:
        """How many random values the inputs of one seed take, at most: a plan bounds it."""
        return 2**20

    def hash_inputs(self, problem: Problem[P]) -> str:
        """sha256 of the inputs of all seeds."""
        return problem.inputs.digest()

    def external_inputs(self, params: P) -> list[str]:
        """Input files outside the suite, by their names in the parameters; a row has their sha256."""
        return []

    def inputs_digest(self, problem: Problem[P], digests: Mapping[str, str]) -> str:
        """The row's digest `inputs`, also for a reader without the external files, whose sha256 come from the
        row's other `digests`."""
        return problem.digest

    @abstractmethod
    def run(self, kernel: Kernel, backend: Backend, problem: Problem[P]) -> Measurement:
        """Measure `kernel`. Raises `Unsupported` where the question does not apply."""

    def call(self, problem: Problem[P], device: torch.device) -> Call:
        """The first call of the kernel, whose launch facts a row holds."""
        x = problem.inputs
        return Call(tuple(x.q.shape), tuple(x.k.shape), problem.dtype, device, x.causal)

    def run_in(
        self, workspace: Workspace, kernel: Kernel, backend: Backend, problem: Problem[P]
    ) -> Measurement:
        """As `run`, going on from what an earlier, cut run left in the workspace."""
        return self.run(kernel, backend, problem)

    @abstractmethod
    def verdict(self, params: P, metrics: Metrics) -> str:
        """The finding in one word, from parameters and metrics alone."""

    def overview(self, found: Sequence[Found]) -> list[Group]:
        """Training runs among the case's rows, whatever their file, that may be put side by side."""
        return []

    def implausible(self, row: Row, peak_tflops: float | None) -> Iterator[str]:
        """What no machine can have measured, besides what `bench.check.plausible` says of every row."""
        return iter(())
