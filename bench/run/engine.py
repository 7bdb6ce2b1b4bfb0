"""The run loop: plan, skip what is done, measure a unit, write the file, go on.

It never prints: progress goes through the callbacks of `Watcher`, so that the command line, scripts
and tests see the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from backends import BACKENDS
from backends.base import Backend
from bench.errors import UsageError, explain
from bench.files.privacy import personal
from bench.files.records import Offered, Row
from bench.files.store import locked, prepare_directory, retire
from bench.run import distributed
from bench.run.config import read_config
from bench.run.machine import describe_machine
from bench.run.plan import PlannedRun, Request, Unit, filter_units, make_plan
from bench.run.registry import load_backend, unavailable_reason
from bench.run.result_file import Writer, take_over
from bench.run.side_by_side import may_share, measure_side_by_side
from bench.run.unit import Problems, by_problem, measure_by_name, run_unit
from cases import load_case, processes
from cases.base import Workspace


class Watcher(Protocol):
    """Told about every unit; a progress bar, a log, a test."""

    def started(self, unit: Unit) -> None: ...
    def finished(self, unit: Unit, row: Row) -> None: ...
    def said(self, text: str) -> None: ...  # progress inside a long unit


def prepare(request: Request) -> PlannedRun:
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
    return PlannedRun(config, text, backends, machine, offered, plan, units, path, request.jobs)


def execute(run: PlannedRun, request: Request, watcher: Watcher) -> None:
    """Measure what is left of `run`, writing the file after every unit."""
    if not processes.world().is_main:
        _follow(run)
        return
    prepare_directory(run.path.parent)
    with locked(run.path):
        take_over(run, request.force)
        by_name = {backend.name: backend for backend in run.backends}
        writer = Writer(run)
        writer.write()
        todo, problems = by_problem(run.todo), Problems()
        processes.from_main([unit.key for unit in todo])
        if request.jobs > 1:
            shared, todo = [u for u in todo if may_share(u)], [u for u in todo if not may_share(u)]
            _execute_side_by_side(run, shared, request.jobs, writer, watcher)
        for unit in todo:
            watcher.started(unit)
            folder = run.work_folder(unit)
            backend = by_name[unit.backend]
            kernel = backend.kernels()[unit.kernel]
            row = run_unit(unit, kernel, backend, Workspace(folder, watcher.said), problems)
            writer.add(unit, row)
            if row.status == "ok":
                _retire(run, folder)
            watcher.finished(unit, row)
            if row.status == "error" and processes.world().size > 1:
                run.notes.append("stopped at a failed unit: the processes are no longer in step")
                break


def _execute_side_by_side(
    run: PlannedRun, units: Sequence[Unit], jobs: int, writer: Writer, watcher: Watcher
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


def _retire(run: PlannedRun, folder: Path) -> None:
    """The row is in the file: that its checkpoints cannot be renamed must not end the run."""
    try:
        retire(folder)
    except OSError as error:
        run.notes.append(
            f"{folder}: the checkpoints of a finished unit stay there ({error.strerror}); "
            "remove it before measuring the unit again with --force"
        )


def _follow(run: PlannedRun) -> None:
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
        case.check(case.Params.model_validate(unit.params), unit.seeds)
        if several and not case.long:
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
