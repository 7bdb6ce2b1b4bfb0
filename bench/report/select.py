"""Which rows the tellers speak of: the answer table and the sentences choose here alone."""

from __future__ import annotations

from collections.abc import Sequence

from bench.files.load import Found
from bench.files.records import Row
from cases import known_case
from cases.base import Subject
from cases.crash.runs import Group


def subject_of(row: Row) -> Subject | None:
    """The question that the row's case answers; None for one that this version does not know."""
    case = known_case(row.case)
    return case.subject if case else None


def training_groups(found: Sequence[Found]) -> list[Group]:
    """The finished training runs, in groups that may be put side by side."""
    by_case: dict[str, list[Found]] = {}
    for f in found:
        if subject_of(f.row) == "crash":
            by_case.setdefault(f.row.case, []).append(f)
    cases = ((known_case(name), own) for name, own in by_case.items())
    return [group for case, own in cases if case for group in case.overview(own)]
