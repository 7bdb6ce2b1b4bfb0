"""The file of a run: what an earlier run left in it, and writing it anew after every unit."""

from __future__ import annotations

import math
import time

from bench.errors import UsageError
from bench.files.records import (
    MAX_BYTES,
    ConfigRecord,
    Facts,
    Row,
    Submission,
    row_text,
    sha256_text,
    submission_text,
)
from bench.files.source import describe_suite
from bench.files.store import BadFile, read_submission, set_aside, write_text
from bench.run.machine import volatile_facts
from bench.run.plan import PlannedRun, Unit

VOLATILE_EVERY_S = 30


def take_over(run: PlannedRun, force: bool) -> None:
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


def _differences(earlier: Submission, run: PlannedRun) -> str:
    """What makes an earlier file another plan: config, code, machine or kernels; empty if nothing."""
    pairs = {
        "config": (earlier.config.sha256, sha256_text(run.text)),
        "code": (earlier.suite.source_sha256, describe_suite().source_sha256),
        "machine or software": (earlier.machine, run.machine),
        "set of kernels": (earlier.offered, run.offered),
    }
    return " and ".join(name for name, (old, new) in pairs.items() if old != new)


class Writer:
    """Writes the submission after every unit; rows keep the plan's order, whatever the run's."""

    def __init__(self, run: PlannedRun):
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
