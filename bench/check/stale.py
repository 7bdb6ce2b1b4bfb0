"""Which results belong to an older suite: kept and shown as stale, never mixed with today's.

A case's version is raised when its inputs, metrics or verdict change meaning, a kernel's when its bits
change on purpose. A row of an older version cannot be compared with a row of today's; one of an older
case cannot be checked any more either, because the code that made it is gone.
"""

from __future__ import annotations

from backends.names import kernel_version
from bench.files.records import Row, Submission
from cases import CASES, load_case


def is_stale(row: Row) -> bool:
    """True for a row of an older version of its case or kernel, or of a case that is no longer here."""
    return of_old_case(row) or row.kernel_version < kernel_version(row.kernel)


def of_old_case(row: Row) -> bool:
    """True for a row of an older version of its case, or of a case that the suite no longer has."""
    return row.case not in CASES or row.case_version < load_case(row.case).version


def old_part(row: Row) -> str:
    """What makes a stale row stale: `bias/leak version 1`, or the kernel's name and version."""
    if of_old_case(row):
        return f"{row.case} version {row.case_version}"
    return f"{row.kernel} version {row.kernel_version}"


def stale_reasons(submission: Submission) -> list[str]:
    """Why, once for every case and kernel with a stale row."""
    found: dict[str, str] = {}
    for row in submission.rows:
        if of_old_case(row):
            now = f"today {load_case(row.case).version}" if row.case in CASES else "no longer here"
            found[row.case] = f"{old_part(row)}, {now}"
        elif is_stale(row):
            found[row.kernel] = f"{old_part(row)}, today {kernel_version(row.kernel)}"
    return list(found.values())
