"""The tables of a case, and those that a run ends with."""

from __future__ import annotations

from collections.abc import Sequence

from bench.files.load import Found
from bench.report.explosions import group_tables
from bench.report.tables import Cell, Table, case_table
from bench.report.timings import speed_tables
from cases import known_case


def is_timed(case: str) -> bool:
    """A case whose rows are times: one table a parameter point, with ratios."""
    known = known_case(case)
    return known is not None and known.timed


def tables_of(case: str, found: Sequence[Found], machine: str) -> list[Table]:
    """The rows of one case in one file."""
    return speed_tables(found, machine) if is_timed(case) else [case_table(case, found, machine)]


def overview_tables(case: str, found: Sequence[Found], machine: str = "") -> list[Table]:
    """Tables over all rows of a case, whatever their file; most cases have none."""
    known = known_case(case)
    return group_tables(known.overview(found), machine) if known else []


def run_tables(found: Sequence[Found], machine: str) -> list[Table]:
    """What a run shows at its end: one table if the points of all cases fit side by side."""
    cases = list(dict.fromkeys(f.row.case for f in found))
    tables = [
        table
        for case in cases
        for table in (
            *tables_of(case, [f for f in found if f.row.case == case], machine),
            *overview_tables(case, [f for f in found if f.row.case == case], machine),
        )
    ]
    if sum(len(t.columns) for t in tables) > 6 or any(map(is_timed, cases)):
        return tables
    labels = list(dict.fromkeys(label for t in tables for label, _ in t.rows))
    columns = [f"{t.title.split(' · ')[0]} {c}".removesuffix(" all") for t in tables for c in t.columns]
    titles = ", ".join(t.title.split(" · ")[0] for t in tables)
    merged = Table(f"{titles} · {machine}", "", columns)
    for label in labels:
        cells: list[Cell | None] = []
        for t in tables:
            cells += dict(t.rows).get(label, [None] * len(t.columns))
        merged.rows.append((label, cells))
    return [merged]
