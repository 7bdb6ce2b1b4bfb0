"""Is a result file what it claims to be? Every problem of every file, without running anything of it.

Checked: schema and canonical form, place and slug, the config's hash, that every planned unit is
there and no other, input digests against recomputed inputs, verdicts against recomputed verdicts,
sane numbers, no personal data, size. `validate` before a pull request and in it is this function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from backends import BACKENDS
from bench.config import parse_config, sha256_text
from bench.engine import DTYPES
from bench.errors import UsageError
from bench.machine import slug_of
from bench.metrics import ratio
from bench.plan import make_plan
from bench.privacy import personal
from bench.records import Row, Submission, submission_text
from bench.registry import load_case
from bench.report.collect import submission_files
from bench.store import BadFile, read_submission
from cases import CASES

MAX_WALL_S = 7 * 24 * 3600


def validate_path(path: Path) -> dict[str, list[str]]:
    """Problems by file for a file or a results folder; a good file has an empty list."""
    return {str(file): validate_file(file) for file in submission_files(path)}


def validate_file(path: Path) -> list[str]:
    """Every problem of one file."""
    try:
        submission, text = read_submission(path)
    except BadFile as problem:
        return [str(problem)]
    return list(_problems(submission, text, path))


def taken_on_trust(path: Path) -> list[str]:
    """A line for each row of a valid file whose inputs include files that only its machine has."""
    submission, _ = read_submission(path)
    notes = []
    for number, row in enumerate(submission.rows):
        case = load_case(row.case)
        names = case.external_inputs(case.Params.model_validate(row.params))
        if names and row.status == "ok":
            notes.append(
                f"rows[{number}] ({row.case}, {row.kernel}): made from {', '.join(names)}, not part of "
                f"the suite; taken by its recorded sha256, data {row.digests['data'][:12]}…"
            )
    return notes


def _problems(submission: Submission, text: str, path: Path) -> Iterator[str]:
    if submission_text(submission) != text:
        yield "not in canonical form (was it edited by hand?)"
    yield from _place(submission, path)
    yield from personal(submission.model_dump())
    planned = _planned(submission)
    if isinstance(planned, str):
        yield planned
        planned = set()
    else:
        yield from _completeness(submission, planned)
    if submission.rows and all(row.status != "ok" for row in submission.rows):
        yield "no row was measured"
    seen: set[str] = set()
    for number, row in enumerate(submission.rows):
        for problem in _row(row, submission):
            yield f"rows[{number}] ({row.case}, {row.kernel}): {problem}"
        # Only what the plan asks for is made again: a foreign row may ask for anything.
        if row.key in planned and row.key not in seen:
            for problem in _measured(row):
                yield f"rows[{number}] ({row.case}, {row.kernel}): {problem}"
        seen.add(row.key)


def _place(submission: Submission, path: Path) -> Iterator[str]:
    machine = submission.machine
    if machine.slug != (expected := slug_of(machine.backends)):
        yield f"machine.slug: '{machine.slug}', but the accelerator's name gives '{expected}'"
    if path.parent.name != machine.slug:
        yield f"stands in folder '{path.parent.name}', expected '{machine.slug}'"
    if path.name != f"{submission.config.name}.json":
        yield f"is named '{path.name}', expected '{submission.config.name}.json'"
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


def _completeness(submission: Submission, planned: set[str]) -> Iterator[str]:
    """Rows against the plan."""
    keys = [row.key for row in submission.rows]
    if twice := len(keys) - len(set(keys)):
        yield f"{twice} rows appear twice"
    if missing := len(planned - set(keys)):
        yield f"{missing} of {len(planned)} planned rows are missing: run the config without filters"
    if extra := len(set(keys) - planned):
        yield f"{extra} rows are not in the plan"


def _row(row: Row, submission: Submission) -> Iterator[str]:
    """What can be said of a row without its inputs."""
    if row.case not in CASES:
        yield "unknown case"
        return
    case = load_case(row.case)
    if row.backend not in submission.machine.backends:
        yield f"backend '{row.backend}' has no facts in machine.backends"
    if row.backend in BACKENDS and row.provenance != "measured":
        yield f"provenance '{row.provenance}' on a real device"
    if not 0 <= row.wall_s <= MAX_WALL_S:
        yield f"wall_s: {row.wall_s} is not between 0 and {MAX_WALL_S}"
    for name, curve in row.series.items():
        if not curve:
            yield f"series.{name}: empty"
    if row.case_version != case.version:
        yield f"case_version {row.case_version}; this suite has {case.version}: measure again"
    if row.status != "ok":
        if not row.reason:
            yield f"status '{row.status}' without a reason"
        if row.metrics or row.digests or row.verdict:
            yield f"status '{row.status}' with results"


def _measured(row: Row) -> Iterator[str]:
    """Metrics, verdict and digests of a planned row that claims to be measured."""
    if row.status != "ok":
        return
    case = load_case(row.case)
    params = case.Params.model_validate(row.params)  # planned, so it is valid
    for name, value in row.metrics.items():
        if math.isfinite(value) and abs(value) > 1e30:
            yield f"metrics.{name}: {value} is beyond any measurement"
        stem = name.removesuffix("_z")
        if name.endswith("_z") and {f"{stem}_mean", f"{stem}_sem"} <= row.metrics.keys():
            expected = ratio(row.metrics[f"{stem}_mean"], row.metrics[f"{stem}_sem"])
            if repr(expected) != repr(value):
                yield f"metrics.{name}: {value}, but mean and sem give {expected}"
    if case.headline.metric not in row.metrics:
        yield f"metrics: '{case.headline.metric}' is missing"
    for name in case.outputs:
        if name not in row.digests:
            yield f"digests: '{name}' is missing"
    try:
        verdict = case.verdict(params, row.metrics)
    except KeyError as error:
        yield f"metrics: {error} is missing"
    else:
        if verdict != row.verdict:
            yield f"verdict '{row.verdict}', but its metrics give '{verdict}'"
    inputs = case.recomputed_inputs(params, DTYPES[row.dtype], row.seeds, row.digests)
    if row.digests.get("inputs") != inputs:
        yield "digests.inputs: not the inputs that these parameters make"
