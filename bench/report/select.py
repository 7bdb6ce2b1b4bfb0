"""Which rows the tellers speak of: the answer table and the sentences choose here alone.

A row is told where it was measured, at the point that its case names, and with the numbers that are told.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bench.files.labels import point
from bench.files.load import Found
from bench.files.records import Row
from bench.report.early_warning import healthy
from cases import known_case
from cases.base import Subject
from cases.crash.runs import Group

# Metrics that a row must hold to be told; files are shown before they are validated.
NEEDED: dict[Subject, tuple[str, ...]] = {
    "bias": ("aligned_ulp_mean",),
    "leak": ("leak_mean",),
    "range": ("row_max_limit",),
    "drift": ("drift_mean", "fp32_drift_abs_mean"),
    "crash": ("crash_step", "steps_run", "best_loss"),
    "cost": ("both_ms",),
}


def subject_of(row: Row) -> Subject | None:
    """The question that the row's case answers; None for one that this version does not know."""
    case = known_case(row.case)
    return case.subject if case else None


def is_told(row: Row, free: Collection[str] = ()) -> bool:
    """Whether the row answers its case's question; names in `free` may differ from the case's point."""
    case = known_case(row.case)
    if case is None or case.subject is None or row.status != "ok":
        return False
    own = point(row)
    there = all(own.get(name) == value for name, value in case.told_at.items() if name not in free)
    return there and all(name in row.metrics for name in NEEDED[case.subject])


def told(
    found: Sequence[Found], subject: Subject, fix: str | None = None, free: Collection[str] = ()
) -> list[Found]:
    """The rows that answer a question, of every kernel or of those with one fix (`stock`: with none)."""
    return [
        f
        for f in found
        if subject_of(f.row) == subject and (fix is None or f.row.fix == fix) and is_told(f.row, free)
    ]


def varied(found: Sequence[Found]) -> list[Found]:
    """Rows on inputs whose row maxima vary, as they do in a model."""
    return [f for f in found if f.row.params.get("row_jitter") != 0]


def training_groups(found: Sequence[Found]) -> list[Group]:
    """The finished training runs, in groups that may be put side by side."""
    by_case: dict[str, list[Found]] = {}
    for f in found:
        if subject_of(f.row) == "crash":
            by_case.setdefault(f.row.case, []).append(f)
    cases = ((known_case(name), own) for name, own in by_case.items())
    return [group for case, own in cases if case for group in case.overview(own)]


def sick_rows(groups: Sequence[Group]) -> set[int]:
    """The ids of stable rows whose row maxima are far beyond those of their group's healthiest run."""
    return {id(run.row) for group in groups for run in healthy(group.runs)[1]}
