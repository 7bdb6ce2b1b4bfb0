"""What the page knows, gathered one file at a time so that a thousand submissions fit in memory.

Rows become columns of small numbers: a row's unit (case, kernel, parameters, …), file, verdict, headline
value and a letter-to-be for its output bits. Everything else of a row (metrics, digests, launch facts,
curves) is kept as one compressed block a file, until the blocks reach MAX_DETAILS; the rows of files
beyond that link to their file.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import json
import math
import os
import urllib.parse
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.check.stale import is_stale, stale_reasons
from bench.files.load import Found, Loaded, read_each
from bench.files.records import Row, Submission, sha256_text, unit_id
from bench.files.store import short
from bench.report.answers import SUBJECTS, answer_table, is_answer
from bench.report.current import CURRENT, OLDER, STALE, Entry, states
from bench.report.early_warning import peak
from bench.report.select import NEEDED
from bench.report.tables import Cell, awaited_of, is_fine
from cases import known_case
from cases.headline import Headline, headline

MAX_DETAILS = 24 * 2**20  # bytes of compressed details in a page
STATES = (CURRENT, OLDER, STALE)
CURVE_FIXES = ("stock", "stabilized", "delta_fp32", "delta_dp")
MAX_CURVE_MACHINES = 4
COLUMNS = (
    "unit",
    "file",
    "status",
    "verdict",
    "reason",
    "value",
    "sem",
    "bits",
    "inputs",
    "predicted",
    "index",
)
ANSWER_METRICS = [name for subject in SUBJECTS for name in NEEDED[subject]]
CONFIGS = Path(__file__).resolve().parents[3] / "configs"


class Codes(dict[Any, int]):
    """Values to small numbers, in order of appearance."""

    def number(self, value: Any) -> int:
        return self.setdefault(value, len(self))


@dataclass
class PageData:
    """Columns, codes and blocks; `add` takes a submission, `finish` gives what the page embeds."""

    base: Path  # folder of the page
    links: str | None
    files: list[dict[str, Any]] = field(default_factory=list)
    blocks: dict[int, str] = field(default_factory=dict)
    details_size: int = 0
    full: bool = False  # no block more
    units: list[dict[str, Any]] = field(default_factory=list)
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)  # what charts and tables need of them
    headlines: list[Headline | None] = field(default_factory=list)  # by unit
    unit_codes: dict[tuple[Any, ...], int] = field(default_factory=dict)
    bits: Codes = field(default_factory=Codes)
    inputs: Codes = field(default_factory=Codes)
    verdicts: Codes = field(default_factory=Codes)
    statuses: Codes = field(default_factory=Codes)
    reasons: Codes = field(default_factory=Codes)
    machines: Codes = field(default_factory=Codes)
    entries: list[Entry] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    answers: list[tuple[int, Found]] = field(default_factory=list)  # with the row's number
    curves: list[dict[str, Any]] = field(default_factory=list)

    def add(self, loaded: Loaded) -> None:
        """Take over what the page needs of one submission; its rows are dropped afterwards."""
        submission = loaded.submission
        number = len(self.files)
        self.files.append(self._file(loaded))
        machine = self.machines.number(loaded.machine)
        written = str(submission.volatile.get("written", ""))
        self._block(number, submission)
        for index, row in enumerate(submission.rows):
            self._row(row, Found(row, loaded, index), number, machine, written)
        submission.rows = []

    def _file(self, loaded: Loaded) -> dict[str, Any]:
        s = loaded.submission
        return {
            "path": short(_name(loaded.path)),
            "url": _link_path(loaded.path, self.base, self.links),
            "machine": loaded.machine,
            "config": s.config.name,
            "known": _is_todays(s.config.name, s.config.sha256),
            "written": str(s.volatile.get("written", "")),
            "suite": s.suite.version,
            "commit": s.suite.commit[:8] + ("+" if s.suite.dirty else ""),
            "versions": ", ".join(f"{k} {v}" for k, v in sorted(s.machine.versions.items()) if v),
            "system": " ".join(str(v) for _, v in sorted(s.machine.os.items())),
            "accelerator": "; ".join(
                str(facts.get("accelerator", name)) for name, facts in s.machine.backends.items()
            ),
            "rows": len(s.rows),
            "line": loaded.first_row_line,
            "stale": ", ".join(stale_reasons(s)),
        }

    def _row(self, row: Row, found: Found, file: int, machine: int, written: str) -> None:
        unit = self._unit(row)
        shown = self.headlines[unit] if row.status == "ok" else None
        bits = _bits(row)
        columns = self.columns
        columns["unit"].append(unit)
        columns["file"].append(file)
        columns["status"].append(self.statuses.number(row.status))
        columns["verdict"].append(self.verdicts.number(row.verdict))
        columns["reason"].append(self.reasons.number(row.reason))
        columns["value"].append(_number(row.metrics.get(shown.metric)) if shown else None)
        columns["sem"].append(_number(row.metrics.get(shown.sem)) if shown and shown.sem else None)
        columns["bits"].append(-1 if bits is None else self.bits.number(bits))
        columns["inputs"].append(self.inputs.number(row.digests.get("inputs")))
        columns["predicted"].append(int(row.provenance == "predicted"))
        columns["index"].append(found.index)
        self.entries.append(Entry((machine << 32) + unit, written, bits, self.units[unit]["stale"]))
        if row.series.get("loss"):
            self._curve(row, found, len(self.entries) - 1)
        if is_answer(row):
            self._slim(row, unit)
            self.answers.append((len(self.entries) - 1, found))

    def _slim(self, row: Row, unit: int) -> None:
        """Keep of an answer's row what the answers look at: a thousand files have many of them."""
        kept = {name: row.metrics[name] for name in ANSWER_METRICS if name in row.metrics}
        shared = {"params": self.units[unit]["params"], "options": self.units[unit]["options"]}
        row.__dict__.update(shared, metrics=kept, series=peak(row), digests={}, launch={})

    def _unit(self, row: Row) -> int:
        key = (
            row.case,
            row.case_version,
            row.kernel,
            row.kernel_version,
            row.backend,
            row.dtype,
            repr(row.params),
            repr(row.options),
            row.seeds,
        )
        if (known := self.unit_codes.get(key)) is not None:
            return known
        shown = headline(row)
        self.headlines.append(shown)
        self.cases.setdefault(row.case, _described(row.case))
        self.units.append(
            {
                "id": unit_id(row),
                "case": row.case,
                "version": row.case_version,
                "kernel": row.kernel,
                "implementation": row.implementation,
                "fix": row.fix,
                "backend": row.backend,
                "dtype": row.dtype,
                "params": row.params,
                "options": row.options,
                "seeds": row.seeds,
                "label": shown.label if shown else "",
                "worst": shown.worst if shown else "high",
                "stale": is_stale(row),
            }
        )
        return self.unit_codes.setdefault(key, len(self.units) - 1)

    def _curve(self, row: Row, found: Found, number: int) -> None:
        """Loss and largest ‖W_Q‖₂ of the first seed's runs with stock and the best known fixes."""
        if row.fix not in CURVE_FIXES or row.params.get("seed") != 0:
            return
        if len({c["machine"] for c in self.curves} | {found.machine}) > MAX_CURVE_MACHINES:
            return
        norms = [curve for name, curve in row.series.items() if name.startswith("w_q_norm")]
        largest = [max(point) for point in zip(*norms, strict=False)]
        self.curves.append(
            {
                "row": number,
                "machine": found.machine,
                "kernel": row.kernel,
                "bits": row.options.get("mantissa_bits"),
                "step": [_number(x) for x in row.series.get("step", [])],
                "loss": [_number(x) for x in row.series["loss"]],
                "w_q": [_number(x) for x in largest],
            }
        )

    def _block(self, number: int, submission: Submission) -> None:
        if self.full:
            return
        details = [
            [_texts(row.metrics), row.digests, row.launch, _curves(row.series), row.wall_s]
            for row in submission.rows
        ]
        block = compress(details)
        self.full = self.details_size + len(block) > MAX_DETAILS
        if not self.full:
            self.blocks[number] = block
            self.details_size += len(block)

    def finish(self) -> dict[str, Any]:
        """Everything but the blocks, ready for JSON."""
        now = states(self.entries)
        self.columns["state"] = [STATES.index(s.state) for s in now]
        self.columns["agree"] = [s.agree for s in now]
        self.columns["runs"] = [s.runs for s in now]
        current = [(n, f) for n, f in self.answers if now[n].state == CURRENT]
        numbers = {id(f): n for n, f in current}
        table = answer_table([f for _, f in current])

        def cell(item: Cell | None) -> dict[str, Any]:
            at = numbers.get(id(item.found), -1) if item else -1
            bad = item is not None and not is_fine(item.verdict)
            return {"text": item.text if item else "", "bad": bad, "row": at}

        return {
            "files": self.files,
            "units": self.units,
            "cases": self.cases,
            "codes": {
                "verdict": list(self.verdicts),
                "status": list(self.statuses),
                "reason": list(self.reasons),
                "state": list(STATES),
                "machine": list(self.machines),
            },
            "columns": self.columns,
            "answers": {
                "note": table.note,
                "questions": table.columns,
                "rows": [
                    {"machine": label, "cells": [cell(c) for c in cells]} for label, cells in table.rows
                ],
            },
            "curves": [c for c in self.curves if now[c["row"]].state == CURRENT],
            "awaited": awaited_of(self.machines),
            "inlined": len(self.blocks),
        }


def _described(name: str) -> dict[str, Any]:
    """How a case describes itself; one that this version does not know says nothing."""
    case = known_case(name)
    return {
        "subject": case.subject if case else None,
        "told_at": dict(case.told_at) if case else {},
        "compares_bits": case is not None and case.compares_bits,
    }


def gather(paths: Sequence[Path], base: Path, links: str | None) -> tuple[PageData, list[str]]:
    """Read every submission at `paths`; a line for every file that is not one."""
    data, problems = PageData(base, links), []
    gc.disable()  # millions of small objects and no cycles: collections would look at them in vain
    try:
        for item in read_each(paths, strict=False):
            if isinstance(item, Loaded):
                data.add(item)
            else:
                problems.append(short(f"{_name(item.path)}: {item.reason}"))
    finally:
        gc.enable()
    return data, problems


def compress(value: Any) -> str:
    """JSON → gzip → base64: nothing in it can end a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    engine = zlib.compressobj(3, zlib.DEFLATED, 31)  # 3: fast; 31: with a gzip header
    return base64.b64encode(engine.compress(text.encode()) + engine.flush()).decode()


def _number(value: float | None) -> float | str | None:
    """Six digits; NaN and ±Inf as text, which JSON can hold."""
    if value is None:
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def _texts(metrics: dict[str, float]) -> dict[str, float | str]:
    return {k: v if math.isfinite(v) else str(v) for k, v in metrics.items()}


def _curves(series: dict[str, list[float]]) -> dict[str, list[Any]]:
    return {name: [_number(x) for x in curve] for name, curve in series.items()}


def _bits(row: Row) -> bytes | None:
    """A short name of the digests of all outputs; None where there are none."""
    outputs = [f"{name}{digest}" for name, digest in sorted(row.digests.items()) if name != "inputs"]
    return hashlib.blake2b("".join(outputs).encode(), digest_size=16).digest() if outputs else None


def _name(path: Path) -> str:
    """`machine/config.json`: where a folder of results stands is nobody's business."""
    return "/".join(path.parts[-2:])


def _link_path(path: Path, base: Path, links: str | None) -> str:
    """Relative to the page, or below `links`; a name can hold nothing that a URL acts on."""
    target = Path(os.path.relpath(path, base)).as_posix() if links is None else _name(path)
    return (links or "") + urllib.parse.quote(target)


def _is_todays(name: str, sha256: str) -> bool:
    """Whether configs/NAME.yaml of this checkout has this hash."""
    if name not in _TODAYS:
        path = CONFIGS / f"{name}.yaml"
        _TODAYS[name] = sha256_text(path.read_text()) if path.is_file() else ""
    return _TODAYS[name] == sha256


_TODAYS: dict[str, str] = {}
