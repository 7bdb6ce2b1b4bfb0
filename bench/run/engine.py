"""The run loop: plan, skip what is done, measure a unit, write the file, go on.

It never prints: progress goes through the callbacks of `Watcher`, so that the command line, scripts
and tests see the same run.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from backends import BACKENDS
from backends.base import Backend, Kernel, Unsupported
from bench.errors import UsageError, explain
from bench.files.privacy import personal, scrub
from bench.files.records import (
    KEY_FIELDS,
    MAX_BYTES,
    MAX_SERIES,
    ConfigRecord,
    Facts,
    Machine,
    Offered,
    Row,
    Submission,
    row_text,
    sha256_text,
    submission_text,
)
from bench.files.source import describe_suite
from bench.files.store import (
    BadFile,
    locked,
    prepare_directory,
    read_submission,
    retire,
    set_aside,
    write_text,
)
from bench.measure.numerics import DTYPES
from bench.run import distributed
from bench.run.config import Config, read_config
from bench.run.machine import describe_machine, volatile_facts
from bench.run.plan import Unit, filter_units, make_plan
from bench.run.registry import load_backend, unavailable_reason
from bench.run.side_by_side import may_share, measure_side_by_side
from cases import load_case, processes
from cases.algorithms import strict
from cases.base import Case, LongCase, Measurement, Workspace

VOLATILE_EVERY_S = 30


@dataclass(frozen=True)
class Request:
    """What a user asked for."""

    config: Path
    results: Path
    backend: str | None = None  # globs
    kernel: str | None = None
    case: str | None = None
    unit: str | None = None  # id of one unit
    only: Sequence[str] = ()  # key=value of a parameter or option
    force: bool = False
    jobs: int = 1  # units side by side


@dataclass
class Run:
    """A planned run: what will be measured, on what, into which file."""

    config: Config
    text: str
    backends: list[Backend]
    machine: Machine
    offered: list[Offered]
    plan: list[Unit]  # everything the config asks for
    units: list[Unit]  # what the filters leave of it
    path: Path
    jobs: int = 1
    rows: dict[str, Row] = field(default_factory=dict)  # by key; from an earlier run or this one
    redo: set[str] = field(default_factory=set)  # keys to measure again; kept until they are
    notes: list[str] = field(default_factory=list)  # for the user: files set aside, …

    @property
    def todo(self) -> list[Unit]:
        return [u for u in self.units if u.key not in self.rows or u.key in self.redo]

    def selected_rows(self) -> list[Row]:
        return [self.rows[unit.key] for unit in self.units if unit.key in self.rows]

    def work_folder(self, unit: Unit) -> Path:
        """Where a long unit keeps its checkpoints; hidden, beside the result file."""
        name = f"{unit.kernel}-{unit.dtype}".replace("/", "-")
        key = hashlib.sha256(unit.key.encode()).hexdigest()[:8]
        return self.path.parent / f".{self.config.name}.work" / f"{name}-{key}"


class Watcher(Protocol):
    """Told about every unit; a progress bar, a log, a test."""

    def started(self, unit: Unit) -> None: ...
    def finished(self, unit: Unit, row: Row) -> None: ...
    def said(self, text: str) -> None: ...  # progress inside a long unit


def prepare(request: Request) -> Run:
    """Read the config and plan the run; nothing is written. Raises UsageError.

    Under torchrun every process plans; they meet here first, so that each has its own device.
    """
    distributed.join()
    config, text = read_config(request.config)
    if request.backend in BACKENDS:
        load_backend(request.backend)  # says why, where it cannot run
    for problem in personal(text, "the text"):
        raise UsageError(f"{request.config}: {problem}; it would be copied into the result file")
    try:
        backends = [load_backend(name) for name in _backend_names(config.backends)]
        offered = offered_kernels(backends)
        plan = make_plan(config, offered)
        _check_options(plan, backends)
        units = filter_units(plan, request.backend, request.kernel, request.case, request.only, request.unit)
        processes.together(lambda: _check_long(units))
    except UsageError as error:
        raise UsageError(f"{request.config}: {error}") from error
    used = {unit.backend for unit in plan}
    backends = [backend for backend in backends if backend.name in used]
    machine = describe_machine(backends)
    path = request.results / machine.slug / f"{config.name}.json"
    return Run(config, text, backends, machine, offered, plan, units, path, request.jobs)


def execute(run: Run, request: Request, watcher: Watcher) -> None:
    """Measure what is left of `run`, writing the file after every unit."""
    if not processes.world().is_main:
        _follow(run)
        return
    prepare_directory(run.path.parent)
    with locked(run.path):
        _resume(run, request.force)
        by_name = {backend.name: backend for backend in run.backends}
        writer = _Writer(run)
        writer.write()
        todo = run.todo
        processes.from_main([unit.key for unit in todo])
        if request.jobs > 1:
            shared, todo = [u for u in todo if may_share(u)], [u for u in todo if not may_share(u)]
            _execute_side_by_side(run, shared, request.jobs, writer, watcher)
        for unit in todo:
            watcher.started(unit)
            folder = run.work_folder(unit)
            backend = by_name[unit.backend]
            row = run_unit(unit, backend.kernels()[unit.kernel], backend, Workspace(folder, watcher.said))
            writer.add(unit, row)
            if row.status == "ok":
                _retire(run, folder)
            watcher.finished(unit, row)
            if row.status == "error" and processes.world().size > 1:
                run.notes.append("stopped at a failed unit: the processes are no longer in step")
                break


def _execute_side_by_side(
    run: Run, units: Sequence[Unit], jobs: int, writer: _Writer, watcher: Watcher
) -> None:
    try:
        with closing(measure_side_by_side(units, jobs, measure_by_name)) as rows:
            for unit, row in rows:
                watcher.started(unit)
                writer.add(unit, row)
                watcher.finished(unit, row)
    except BrokenProcessPool as error:
        done = len(run.units) - len(run.todo)
        raise UsageError(
            f"--jobs {jobs}: a process that measured was killed, perhaps for want of memory; "
            f"{done} of {len(run.units)} units are in {run.path}: the same command measures the rest, "
            "fewer --jobs take less memory"
        ) from error


def _retire(run: Run, folder: Path) -> None:
    """The row is in the file: that its checkpoints cannot be renamed must not end the run."""
    try:
        retire(folder)
    except OSError as error:
        run.notes.append(
            f"{folder}: the checkpoints of a finished unit stay there ({error.strerror}); "
            "remove it before measuring the unit again with --force"
        )


def _follow(run: Run) -> None:
    """What the other processes of a torchrun do: the same units, writing nothing.

    A unit that fails here alone ends this process, and torchrun then ends the others.
    """
    keys = processes.from_main([""])
    by_name = {backend.name: backend for backend in run.backends}
    by_key = {unit.key: unit for unit in run.plan}
    for unit in (by_key[key] for key in keys):
        backend = by_name[unit.backend]
        workspace = Workspace(run.work_folder(unit), lambda text: None)
        row = run_unit(unit, backend.kernels()[unit.kernel], backend, workspace)
        if row.status == "error":
            raise RuntimeError(f"rank {processes.world().rank}: {unit.kernel}: {row.reason}")


def measure_by_name(unit: Unit) -> Row:
    """`run_unit` in a process that has nothing loaded yet."""
    backend = load_backend(unit.backend)
    return run_unit(unit, backend.kernels()[unit.kernel], backend)


def run_unit(unit: Unit, kernel: Kernel, backend: Backend, workspace: Workspace | None = None) -> Row:
    """Measure one unit. What the kernel or case cannot do, and what fails, becomes a row too; bad input
    to a long case is the user's, and raises UsageError."""
    case = load_case(unit.case)
    dtype = DTYPES[unit.dtype]
    fields: dict[str, Any] = {name: getattr(unit, name) for name in KEY_FIELDS}
    start = time.perf_counter()
    try:
        if dtype not in kernel.dtypes:
            raise Unsupported(f"{unit.kernel} does not take {unit.dtype}")
        configured = kernel.configure(**unit.options)
        params = case.Params.model_validate(unit.params)
        with backend.deterministic(), strict(kernel):
            found = _measure(case, workspace)(configured, backend, params, dtype, unit.seeds)
            backend.synchronize()
        call = case.call(params, dtype, unit.seeds, backend.device)
        fields |= {
            "status": "ok",
            "verdict": case.verdict(params, found.metrics),
            "metrics": found.metrics,
            "digests": found.digests,
            "series": {name: thin(curve) for name, curve in found.series.items()},
            "launch": configured.launch_facts(call) | found.facts,
        }
    except Unsupported as reason:
        fields |= {"status": "unsupported", "reason": scrub(str(reason))[:500]}
    except UsageError:  # about a file that a long case was given
        raise
    except Exception as error:  # a kernel may fail in any way; the run goes on
        fields |= {"status": "error", "reason": _one_line(error)}
    return Row(**fields, wall_s=round(time.perf_counter() - start, 4))


def _measure(case: Case, workspace: Workspace | None) -> Callable[..., Measurement]:
    """The case's own way to run: in a workspace where it wants one and there is one."""
    if isinstance(case, LongCase) and workspace is not None:
        return partial(case.run_in, workspace)
    return case.run


def _one_line(error: Exception) -> str:
    return scrub(f"{type(error).__name__}: {error}")[:500]


def offered_kernels(backends: Sequence[Backend]) -> list[Offered]:
    """Every kernel of the backends, with its dtypes and the options that concern it."""
    return [
        Offered(
            backend=backend.name,
            kernel=name,
            kernel_version=kernel.version,
            dtypes=sorted(str(d).removeprefix("torch.") for d in kernel.dtypes),
            options={k: v for k, v in kernel.options.model_dump().items() if k in kernel.option_names},
        )
        for backend in backends
        for name, kernel in backend.kernels().items()
    ]


def thin(curve: list[float]) -> list[float]:
    """At most 500 points, evenly spaced, first and last kept; nine digits, which tell any two float32."""
    if len(curve) > MAX_SERIES:
        last = len(curve) - 1
        curve = [curve[round(i * last / (MAX_SERIES - 1))] for i in range(MAX_SERIES)]
    return [float(f"{value:.9g}") for value in curve]


def _check_options(plan: Sequence[Unit], backends: Sequence[Backend]) -> None:
    """Refuse a config whose option values a kernel does not take, before anything runs."""
    kernels = {backend.name: backend.kernels() for backend in backends}
    seen: set[str] = set()
    for unit in plan:
        chosen = f"{unit.backend} {unit.kernel} {unit.options}"
        if chosen in seen:
            continue
        seen.add(chosen)
        kernel = kernels[unit.backend][unit.kernel]
        try:
            kernel.configure(**unit.options)
        except ValidationError as error:
            problem = explain(error, type(kernel.options))
            raise UsageError(f"options.{problem} ({unit.kernel})") from error


def _check_long(units: Sequence[Unit]) -> None:
    """Let long cases refuse bad input before anything runs, and torchrun what has no use for it."""
    several = processes.world().size > 1
    for unit in units:
        case = load_case(unit.case)
        if isinstance(case, LongCase):
            case.check(case.Params.model_validate(unit.params), unit.seeds)
        elif several:
            raise UsageError(
                f"{unit.case} runs in one process; start it without torchrun, or pick the cases that "
                "train on several with --case"
            )


def _backend_names(wanted: list[str]) -> list[str]:
    names: list[str] = []
    for name in wanted:
        if name == "auto":
            names += [known for known in BACKENDS if unavailable_reason(known) is None]
        else:
            names.append(name)
    return list(dict.fromkeys(names))


def _resume(run: Run, force: bool) -> None:
    """Take over the rows of an earlier run of the same plan; move anything else out of the way."""
    if not run.path.exists() and not run.path.is_symlink():
        return
    try:
        earlier, _ = read_submission(run.path)
    except BadFile as problem:
        target = set_aside(run.path, "corrupt")
        run.notes.append(f"{run.path} is no result file ({problem}); kept as {target.name}")
        return
    if changed := _differences(earlier, run):
        target = set_aside(run.path, "stale")
        run.notes.append(f"{run.path} was measured with another {changed}; kept as {target.name}")
        return
    planned = {unit.key for unit in run.plan}
    run.rows = {row.key: row for row in earlier.rows if row.key in planned}
    # A failed unit may have failed for want of memory or time: it is tried again.
    run.redo = {key for key, row in run.rows.items() if row.status == "error"}
    if force:
        run.redo = set(run.rows)


def _differences(earlier: Submission, run: Run) -> str:
    """What makes an earlier file another plan: config, code, machine or kernels; empty if nothing."""
    pairs = {
        "config": (earlier.config.sha256, sha256_text(run.text)),
        "code": (earlier.suite.source_sha256, describe_suite().source_sha256),
        "machine or software": (earlier.machine, run.machine),
        "set of kernels": (earlier.offered, run.offered),
    }
    return " and ".join(name for name, (old, new) in pairs.items() if old != new)


class _Writer:
    """Writes the submission after every unit; rows keep the plan's order, whatever the run's."""

    def __init__(self, run: Run):
        self.run = run
        self.lines = {key: row_text(row) for key, row in run.rows.items()}
        self.volatile: Facts = {}
        self.looked = -math.inf  # when `volatile` was read; clocks and load may cost a subprocess

    def add(self, unit: Unit, row: Row) -> None:
        self.run.rows[unit.key] = row
        self.run.redo.discard(unit.key)
        self.lines[unit.key] = row_text(row)
        self.write()

    def write(self) -> None:
        run = self.run
        if time.monotonic() - self.looked > VOLATILE_EVERY_S:
            self.volatile = volatile_facts(run.backends, peaks=run.jobs == 1)
            self.looked = time.monotonic()
        submission = Submission(
            schema_version=1,
            suite=describe_suite(),
            config=ConfigRecord(name=run.config.name, sha256=sha256_text(run.text), text=run.text),
            machine=run.machine,
            offered=run.offered,
            volatile=self.volatile,
            rows=[],
        )
        lines = [self.lines[unit.key] for unit in run.plan if unit.key in self.lines]
        text = submission_text(submission, lines)
        if (size := len(text.encode())) > MAX_BYTES:
            raise UsageError(
                f"{run.path}: would have {size} bytes with this row, and a result file has at most "
                f"{MAX_BYTES}; what was measured before is kept: split {run.config.name} into two configs"
            )
        write_text(run.path, text)
