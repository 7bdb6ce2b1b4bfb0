"""One unit measured: whatever comes of it, a result, a refusal or a failure, is a row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from backends.base import Backend, Kernel, Unsupported
from bench.errors import UsageError
from bench.files.privacy import scrub
from bench.files.records import KEY_FIELDS, MAX_SERIES, Row
from bench.measure.numerics import DTYPES
from bench.run.plan import Unit
from bench.run.registry import load_backend
from cases import load_case
from cases.algorithms import strict
from cases.base import Problem, Workspace


class Problems:
    """The problem of the unit at hand, kept for the next unit, which mostly asks another kernel the same."""

    def __init__(self) -> None:
        self.last: Problem[Any] | None = None

    def asked(self, unit: Unit) -> Problem[Any]:
        case = load_case(unit.case)
        params, dtype = case.Params.model_validate(unit.params), DTYPES[unit.dtype]
        last = self.last
        wanted = (case, params, dtype, unit.seeds)
        if last is None or (last.case, last.params, last.dtype, last.seeds) != wanted:
            last = self.last = case.problem(params, dtype, unit.seeds, last)
        return last


def by_problem(units: Sequence[Unit]) -> list[Unit]:
    """Units that share inputs one after the other, else in the plan's order: inputs are made once."""
    first: dict[str, int] = {}

    def place(unit: Unit) -> int:
        case = load_case(unit.case)
        made_from = case.made_from(case.Params.model_validate(unit.params))
        return first.setdefault(repr((unit.case, made_from, unit.dtype, unit.seeds)), len(first))

    return sorted(units, key=place)


def run_unit(
    unit: Unit,
    kernel: Kernel,
    backend: Backend,
    workspace: Workspace | None = None,
    problems: Problems | None = None,
) -> Row:
    """Measure one unit. What the kernel or case cannot do, and what fails, becomes a row too; bad input
    to a long case is the user's, and raises UsageError."""
    case = load_case(unit.case)
    fields: dict[str, Any] = {name: getattr(unit, name) for name in KEY_FIELDS}
    start = time.perf_counter()
    try:
        if DTYPES[unit.dtype] not in kernel.dtypes:
            raise Unsupported(f"{unit.kernel} does not take {unit.dtype}")
        configured = kernel.configure(**unit.options)
        problem = (problems or Problems()).asked(unit)
        with backend.deterministic(), strict(kernel):
            if case.long and workspace is not None:
                found = case.run_in(workspace, configured, backend, problem)
            else:
                found = case.run(configured, backend, problem)
            backend.synchronize()
        fields |= {
            "status": "ok",
            "verdict": case.verdict(problem.params, found.metrics),
            "metrics": found.metrics,
            "digests": found.digests | {"inputs": case.inputs_digest(problem, found.digests)},
            "series": {name: thin(curve) for name, curve in found.series.items()},
            "launch": configured.launch_facts(case.call(problem, backend.device)) | found.facts,
        }
    except Unsupported as reason:
        fields |= {"status": "unsupported", "reason": scrub(str(reason))[:500]}
    except Exception as error:  # a kernel may fail in any way; the run goes on
        if isinstance(error, UsageError) and case.long:  # about a file that the case was given
            raise
        fields |= {"status": "error", "reason": _one_line(error)}
    return Row(**fields, wall_s=round(time.perf_counter() - start, 4))


def _one_line(error: Exception) -> str:
    return scrub(f"{type(error).__name__}: {error}")[:500]


def thin(curve: list[float]) -> list[float]:
    """At most 500 points, evenly spaced, first and last kept; nine digits, which tell any two float32."""
    if len(curve) > MAX_SERIES:
        last = len(curve) - 1
        curve = [curve[round(i * last / (MAX_SERIES - 1))] for i in range(MAX_SERIES)]
    return [float(f"{value:.9g}") for value in curve]


_PROBLEMS = Problems()  # of a process that measures beside others


def measure_by_name(unit: Unit) -> Row:
    """`run_unit` in a process that has nothing loaded yet."""
    backend = load_backend(unit.backend)
    return run_unit(unit, backend.kernels()[unit.kernel], backend, problems=_PROBLEMS)
