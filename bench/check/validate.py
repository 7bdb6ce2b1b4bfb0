"""Is a result file what it claims to be? Every problem of every file, without running anything of it.

Two parts, so that a stranger's file can cost no more than it is worth:

1. The structure, within a second whatever the file holds: size, schema and canonical form, place and
   slug, the config's hash, that every planned unit is there and no other, verdicts against recomputed
   verdicts, plausible numbers (`bench.check.plausible`), no personal data.
2. The inputs, only where the structure has no problem: made again from the parameters, their digests
   compared. How much work that is follows from the plan, so it is bounded before it begins
   (`MAX_VALUES_A_FILE`), goes from the cheapest unit up and ends at the third wrong digest.

Rows of an older version of their case or kernel are stale: `fresh` refuses them, else they are kept, and
what only an older case's code could check is not checked. A file says itself which kernels in which
version it was planned for, so its plan can be made again whatever their version is today.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from backends import BACKENDS
from backends.names import kernel_version
from bench.check.plausible import implausible
from bench.check.stale import is_stale, of_old_case, stale_reasons
from bench.errors import UsageError
from bench.files.load import submission_files
from bench.files.privacy import personal
from bench.files.records import Row, Submission, dumps, sha256_text, slug_of, submission_text
from bench.files.store import BadFile, read_submission, short
from bench.measure.metrics import ratio
from bench.measure.numerics import DTYPES
from bench.run.config import parse_config
from bench.run.plan import make_plan
from cases import CASES, load_case
from cases.base import Problem

MAX_WALL_S = 7 * 24 * 3600
MAX_VALUES_A_FILE = 2**31  # random values: some minutes on one core
MAX_PROBLEMS = 100  # shown of one file
MAX_WRONG_INPUTS = 3


def validate_path(path: Path, inputs: bool = True, fresh: bool = False) -> dict[str, list[str]]:
    """Problems by file for a file or a results folder; a good file has an empty list."""
    return {short(str(file), 4096): validate_file(file, inputs, fresh) for file in submission_files(path)}


def validate_file(path: Path, inputs: bool = True, fresh: bool = False) -> list[str]:
    """Every problem of one file, each one printable line.

    Args: inputs: make the inputs again too; fresh: refuse stale rows.
    """
    try:
        submission, text = read_submission(path)
    except BadFile as problem:
        return [short(str(problem))]
    planned = _planned(submission)
    found = list(_structure(submission, text, path, planned, fresh))
    if inputs and not found and not isinstance(planned, str):
        found = list(_inputs(submission, planned))
    if len(found) > MAX_PROBLEMS:
        found[MAX_PROBLEMS:] = [f"and {len(found) - MAX_PROBLEMS} problems more"]
    return [short(problem) for problem in found]


def taken_on_trust(path: Path) -> list[str]:
    """A line for each row of a valid file whose inputs include files that only its machine has."""
    submission, _ = read_submission(path)
    notes = []
    for number, row in enumerate(submission.rows):
        if is_stale(row):
            continue
        case = load_case(row.case)
        names = case.external_inputs(case.Params.model_validate(row.params))
        if names and row.status == "ok":
            notes.append(
                f"rows[{number}] ({row.case}, {row.kernel}): made from {', '.join(names)}, not part of "
                f"the suite; taken by its recorded sha256, data {row.digests.get('data', 'none')[:12]}…"
            )
    return notes


def _structure(
    submission: Submission, text: str, path: Path, planned: set[str] | str, fresh: bool
) -> Iterator[str]:
    stale = {row.case for row in submission.rows if of_old_case(row)}
    if fresh:
        yield from (f"stale: {why}: measure again" for why in stale_reasons(submission))
    if submission_text(submission) != text:
        yield "not in canonical form (was it edited by hand?)"
    yield from _place(submission, path)
    yield from personal(submission.model_dump())
    keys = [row.key for row in submission.rows]
    dtypes = {(item.backend, item.kernel): item.dtypes for item in submission.offered}
    if isinstance(planned, set):
        yield from _completeness(submission, keys, planned, stale)
    elif not stale:
        yield planned
    if submission.rows and all(row.status != "ok" for row in submission.rows):
        yield "no row was measured"
    for number, (row, key) in enumerate(zip(submission.rows, keys, strict=True)):
        where = f"rows[{number}] ({row.case}, {row.kernel}): "
        yield from (where + problem for problem in _row(row, submission))
        if row.status == "ok" and row.dtype not in dtypes.get((row.backend, row.kernel), ()):
            yield f"{where}measured in {row.dtype}, which the kernel does not offer"
        # Only what the plan asks for has parameters that its case can read.
        if isinstance(planned, set) and key in planned and row.status == "ok":
            backend = submission.machine.backends.get(row.backend, {})
            yield from (where + problem for problem in (*_measured(row), *implausible(row, backend)))


def _place(submission: Submission, path: Path) -> Iterator[str]:
    machine = submission.machine
    if machine.slug != (expected := slug_of(machine.backends)):
        yield f"machine.slug: '{machine.slug}', but the accelerator's name gives '{expected}'"
    if path.parent.name != machine.slug:
        yield f"stands in folder '{path.parent.name}', expected '{machine.slug}'"
    # A second machine of the same model, or a second run worth keeping, is NAME+2.json, NAME+3.json, …
    name = submission.config.name
    if not re.fullmatch(rf"{re.escape(name)}(\+[2-9][0-9]?)?\.json", path.name):
        yield f"is named '{path.name}', expected '{name}.json'"
    if sha256_text(submission.config.text) != submission.config.sha256:
        yield "config.sha256: does not match config.text"


def _planned(submission: Submission) -> set[str] | str:
    """Keys of the units that the config and the offered kernels give, or why there is no plan."""
    try:
        parsed = parse_config(submission.config.text, "config.text")
        planned = {unit.key for unit in make_plan(parsed, submission.offered)}
    except UsageError as error:
        return f"the config cannot be planned with this version of the suite: {error}"
    if parsed.name != submission.config.name:
        return f"config.name: '{submission.config.name}', but the text says '{parsed.name}'"
    return planned


def _completeness(
    submission: Submission, keys: list[str], planned: set[str], stale: Collection[str]
) -> Iterator[str]:
    """Rows against the plan; the plan of a stale case is that of older code."""
    if twice := len(keys) - len(set(keys)):
        yield f"{twice} rows appear twice"
    current = {k for k, row in zip(keys, submission.rows, strict=True) if row.case not in stale}
    asked = {key for key in planned if not stale or json.loads(key)["case"] not in stale}
    if missing := len(asked - current):
        yield f"{missing} of {len(asked)} planned rows are missing: run the config without filters"
    if extra := len(current - asked):
        yield f"{extra} rows are not in the plan"


def _row(row: Row, submission: Submission) -> Iterator[str]:
    """What can be said of a row without its case's parameters."""
    if row.case in CASES and row.case_version > (today := load_case(row.case).version):
        yield f"case_version {row.case_version}; this suite has {today}: update the checkout"
    if row.kernel_version > (today := kernel_version(row.kernel)):
        yield f"kernel_version {row.kernel_version}; this suite has {today}: update the checkout"
    if row.backend not in submission.machine.backends:
        yield f"backend '{row.backend}' has no facts in machine.backends"
    if row.backend in BACKENDS and row.provenance != "measured":
        yield f"provenance '{row.provenance}' on a real device"
    if not 0 <= row.wall_s <= MAX_WALL_S:
        yield f"wall_s: {row.wall_s} is not between 0 and {MAX_WALL_S}"
    for name, curve in row.series.items():
        if not curve:
            yield f"series.{name}: empty"
    if row.status == "ok":
        if row.reason:
            yield "status 'ok' with a reason"
        return
    if not row.reason:
        yield f"status '{row.status}' without a reason"
    if row.metrics or row.digests or row.verdict or row.series:
        yield f"status '{row.status}' with results"


def _measured(row: Row) -> Iterator[str]:
    """Metrics, verdict and names of digests of a planned row that claims to be measured."""
    case = load_case(row.case)
    params = case.Params.model_validate(row.params)  # planned, so it is valid
    for name, value in row.metrics.items():
        stem = name.removesuffix("_z")
        if name.endswith("_z") and {f"{stem}_mean", f"{stem}_sem"} <= row.metrics.keys():
            expected = ratio(row.metrics[f"{stem}_mean"], row.metrics[f"{stem}_sem"])
            if repr(expected) != repr(value):
                yield f"metrics.{name}: {value}, but mean and sem give {expected}"
    if case.headline.metric not in row.metrics:
        yield f"metrics: '{case.headline.metric}' is missing"
    for name in ("inputs", *case.outputs):
        if name not in row.digests:
            yield f"digests: '{name}' is missing"
    try:
        verdict = case.verdict(params, row.metrics)
    except KeyError as error:
        yield f"metrics: {error} is missing"
    except (ValueError, OverflowError) as error:
        yield f"metrics give no verdict: {error}"
    else:
        if verdict != row.verdict:
            yield f"verdict '{row.verdict}', but its metrics give '{verdict}'"


def _inputs(submission: Submission, planned: set[str]) -> Iterator[str]:
    """Inputs made again, from the cheapest parameter point up; rows of one point share them."""
    points: dict[str, list[tuple[int, Row]]] = {}
    for number, row in enumerate(submission.rows):
        if row.status == "ok" and row.key in planned:
            case = load_case(row.case)
            external = case.external_inputs(case.Params.model_validate(row.params))
            own = row.digests if external else {}  # what only this machine has is in its digests
            point = dumps([row.case, row.params, row.dtype, row.seeds, own])
            points.setdefault(point, []).append((number, row))
    work = sorted(((_work(rows[0][1]), rows) for rows in points.values()), key=lambda pair: pair[0])
    if (total := sum(values for values, _ in work)) > MAX_VALUES_A_FILE:
        yield f"inputs: {total} values to make again, at most {MAX_VALUES_A_FILE}: split the config"
        return
    wrong = 0
    problem: Problem[Any] | None = None
    for _, rows in work:
        first = rows[0][1]
        case = load_case(first.case)
        params = case.Params.model_validate(first.params)
        problem = case.problem(params, DTYPES[first.dtype], first.seeds, problem)
        expected = case.inputs_digest(problem, first.digests)
        for number, row in rows:
            if row.digests["inputs"] != expected:
                where = f"rows[{number}] ({row.case}, {row.kernel})"
                yield f"{where}: digests.inputs: not the inputs that these parameters make"
                wrong += 1
        if wrong >= MAX_WRONG_INPUTS:
            return


def _work(row: Row) -> int:
    """Random values that the inputs of a row take, at most."""
    case = load_case(row.case)
    return case.values(case.Params.model_validate(row.params)) * row.seeds
