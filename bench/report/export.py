"""Every row as plain data for other tools: CSV, JSON, and Parquet where pyarrow is installed."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.files.load import Found
from bench.files.records import dumps
from bench.report.current import Current

FIELDS = (
    "machine",
    "file",
    "state",
    "case",
    "case_version",
    "kernel",
    "kernel_version",
    "backend",
    "dtype",
    "params",
    "options",
    "seeds",
    "status",
    "reason",
    "verdict",
    "provenance",
    "wall_s",
    "digests",
)
# A spreadsheet runs what begins with one of these.
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def flat_rows(found: Sequence[Found], now: Current) -> tuple[list[str], list[dict[str, Any]]]:
    """Column names and one flat record a row; parameters, options and digests are JSON text."""
    metrics = sorted({name for f in found for name in f.row.metrics})
    records = []
    for f in found:
        own = {"machine": f.machine, "file": f.file, "state": now.state(f).state}
        values = {name: own.get(name, getattr(f.row, name, None)) for name in FIELDS}
        flat = {k: dumps(v) if isinstance(v, dict) else v for k, v in values.items()}
        records.append(flat | {f"{name}": f.row.metrics.get(name) for name in metrics})
    return [*FIELDS, *metrics], records


def csv_report(found: Sequence[Found], now: Current) -> str:
    """One line a row, one column a metric."""
    columns, records = flat_rows(found, now)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for record in records:
        writer.writerow(_cell(record[name]) for name in columns)
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(FORMULA):
        return "'" + value
    return "" if value is None else value


def json_report(found: Sequence[Found], now: Current) -> str:
    """Every row with its machine, file and state, as one JSON document."""
    rows = [
        {"machine": f.machine, "file": f.file, "state": now.state(f).state, **f.row.model_dump()}
        for f in found
    ]
    return dumps({"rows": rows})


def write_parquet(found: Sequence[Found], now: Current, path: Path) -> None:
    """The table of `flat_rows` as a Parquet file."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UsageError("--format parquet needs pyarrow: pip install pyarrow") from error
    columns, records = flat_rows(found, now)
    metrics = columns[len(FIELDS) :]
    for record in records:
        record |= {name: None if record[name] is None else float(record[name]) for name in metrics}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    parquet.write_table(pyarrow.Table.from_pylist(records), temporary)
    temporary.replace(path)
