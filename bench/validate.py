"""Is a result file what it claims to be? Every problem of every file, without running anything of it.

Checked: schema and canonical form, place and slug, the config's hash, that every planned unit is
there and no other, input digests against recomputed inputs, verdicts against recomputed verdicts,
sane numbers, no personal data, size. `validate` before a pull request and in it is this function.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.config import parse_config, sha256_text
from bench.engine import DTYPES
from bench.errors import UsageError
from bench.machine import slug_of
from bench.plan import make_plan
from bench.records import Row, Submission, submission_text
from bench.registry import load_case
from bench.report.collect import submission_files
from bench.store import BadFile, read_submission
from cases import CASES
from cases.base import Case, CaseParams

MAX_WALL_S = 7 * 24 * 3600
# Things that have no place in a result file.
PERSONAL = {
    "a path": re.compile(r"(/home/|/Users/|/root/|/tmp/|/mnt/|[A-Za-z]:\\\\)"),
    "an e-mail address": re.compile(r"[\w.+-]+@[\w-]+\.[A-Za-z]{2,}"),
    "an IP address": re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"),
}
PERSONAL_KEYS = frozenset({"user", "username", "hostname", "host", "pid", "cwd", "home"})


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


def _problems(submission: Submission, text: str, path: Path) -> Iterator[str]:
    if submission_text(submission) != text:
        yield "not in canonical form (was it edited by hand?)"
    yield from _place(submission, path)
    yield from _personal(submission.model_dump(exclude={"config"}), "")
    yield from _plan(submission)
    for number, row in enumerate(submission.rows):
        for problem in _row(row, submission):
            yield f"rows[{number}] ({row.case}, {row.kernel}): {problem}"


def _place(submission: Submission, path: Path) -> Iterator[str]:
    machine = submission.machine
    if machine.slug != (expected := slug_of(machine.backends)):
        yield f"machine.slug: '{machine.slug}', but the accelerator's name gives '{expected}'"
    if path.parent.name != machine.slug:
        yield f"stands in folder '{path.parent.name}', expected '{machine.slug}'"
    if path.name != f"{submission.config.name}.json":
        yield f"is named '{path.name}', expected '{submission.config.name}.json'"


def _personal(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if str(key).lower() in PERSONAL_KEYS:
                yield f"{where}.{key}: a personal field".lstrip(".")
            yield from _personal(item, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _personal(item, f"{where}[{number}]")
    elif isinstance(value, str):
        for what, pattern in PERSONAL.items():
            if pattern.search(value):
                yield f"{where}: holds {what}"


def _plan(submission: Submission) -> Iterator[str]:
    """Config hash, and rows against the plan that the config and the offered kernels give."""
    config = submission.config
    if sha256_text(config.text) != config.sha256:
        yield "config.sha256: does not match config.text"
    try:
        parsed = parse_config(config.text, "config.text")
        planned = {unit.key for unit in make_plan(parsed, submission.offered)}
    except UsageError as error:
        yield f"the config cannot be planned with this version of the suite: {error}"
        return
    if parsed.name != config.name:
        yield f"config.name: '{config.name}', but the text says '{parsed.name}'"
    keys = [row.key for row in submission.rows]
    if twice := len(keys) - len(set(keys)):
        yield f"{twice} rows appear twice"
    if missing := len(planned - set(keys)):
        yield f"{missing} of {len(planned)} planned rows are missing: run the config without filters"
    if extra := len(set(keys) - planned):
        yield f"{extra} rows are not in the plan"


def _row(row: Row, submission: Submission) -> Iterator[str]:
    if row.case not in CASES:
        yield "unknown case"
        return
    case = load_case(row.case)
    if row.backend not in submission.machine.backends:
        yield f"backend '{row.backend}' has no facts in machine.backends"
    if not 0 <= row.wall_s <= MAX_WALL_S:
        yield f"wall_s: {row.wall_s} is not between 0 and {MAX_WALL_S}"
    for name, curve in row.series.items():
        if not curve:
            yield f"series.{name}: empty"
    if row.case_version != case.version:
        yield f"case_version {row.case_version}; this suite has {case.version}: measure again"
        return
    if row.status != "ok":
        if not row.reason:
            yield f"status '{row.status}' without a reason"
        if row.metrics or row.digests or row.verdict:
            yield f"status '{row.status}' with results"
        return
    try:
        params = case.Params.model_validate(row.params)
    except ValidationError as error:
        yield f"params: {error.errors()[0]['msg']}"
        return
    yield from _measured(row, case, params)


def _measured(row: Row, case: Case, params: CaseParams) -> Iterator[str]:
    for name, value in row.metrics.items():
        if math.isfinite(value) and abs(value) > 1e30:
            yield f"metrics.{name}: {value} is beyond any measurement"
    try:
        verdict = case.verdict(params, row.metrics)
    except KeyError as error:
        yield f"metrics: {error} is missing"
    else:
        if verdict != row.verdict:
            yield f"verdict '{row.verdict}', but its metrics give '{verdict}'"
    digest = case.inputs_digest(params, DTYPES[row.dtype], row.seeds)
    if row.digests.get("inputs") != digest:
        yield "digests.inputs: not the inputs that these parameters make"
