"""Which results belong to an older suite: kept and shown as stale, never mixed with today's.

A case's version is raised when its inputs, metrics or verdict change meaning. A row of an older version
cannot be checked any more by the code that made it, nor compared with a row of today's.
"""

from __future__ import annotations

from bench.files.records import Row, Submission
from cases import CASES, load_case


def is_stale(row: Row) -> bool:
    """True for a row of an older version of its case, or of a case that the suite no longer has."""
    return row.case not in CASES or row.case_version < load_case(row.case).version


def stale_cases(submission: Submission) -> dict[str, str]:
    """Why, by case, for every case with a stale row."""
    found: dict[str, str] = {}
    for row in submission.rows:
        if is_stale(row):
            now = f"today {load_case(row.case).version}" if row.case in CASES else "no longer here"
            found[row.case] = f"{row.case} version {row.case_version}, {now}"
    return found
