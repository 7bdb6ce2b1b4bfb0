"""What a run says at its end: its tables, and their findings in words."""

from __future__ import annotations

from collections.abc import Sequence

from bench.files.load import Found
from bench.files.records import Row
from bench.report.cases import run_tables
from bench.report.findings import findings
from bench.report.render import text_table


def run_text(rows: Sequence[Row], machine: str) -> str:
    """For a terminal; every line ends with a newline."""
    found = [Found(row, None, i) for i, row in enumerate(rows)]
    tables = [f"{text_table(table)}\n\n" for table in run_tables(found, machine)]
    return "".join([*tables, *(f"* {line}\n" for line in findings(found))])
