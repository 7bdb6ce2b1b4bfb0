"""Two submissions side by side: which facts differ, which bits differ and from where on, which biases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tabulate import tabulate

from bench.files.labels import point_label, varying
from bench.files.records import Row, Submission
from cases.headline import cell_text, headline

# The order of computation: the first stage that differs is where two machines part.
STAGES = ("inputs", "weights", "batches", "o", "lse", "dq", "dk", "dv", "loss")
KEY = ("case", "case_version", "kernel", "kernel_version", "dtype", "params", "options", "seeds")


@dataclass
class Comparison:
    """What differs between submissions A and B."""

    facts: list[tuple[str, str, str]] = field(default_factory=list)  # name, in A, in B
    only_a: int = 0
    only_b: int = 0
    equal: int = 0  # rows whose common digests all agree
    different: list[dict[str, Any]] = field(default_factory=list)  # label, stage
    biases: list[dict[str, Any]] = field(default_factory=list)  # label, a, b, z

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(a: Submission, b: Submission) -> Comparison:
    """Compare two submissions."""
    result = Comparison(facts=_facts(a, b))
    pairs, result.only_a, result.only_b = _pairs(a, b)
    every_row = [row for row, _ in pairs]
    for row_a, row_b in pairs:
        label = _label(row_a, row_b, every_row)
        stage = _first_difference(row_a, row_b)
        if stage:
            result.different.append({"row": label, "first_difference": stage})
        elif _has_outputs(row_a) and _has_outputs(row_b):
            result.equal += 1
        if cell_text(row_a) != cell_text(row_b):
            result.biases.append(
                {"row": label, "a": cell_text(row_a), "b": cell_text(row_b), "z": _distance(row_a, row_b)}
            )
    return result


def _pairs(a: Submission, b: Submission) -> tuple[list[tuple[Row, Row]], int, int]:
    """Rows of A with their partners in B, and how many rows of A and of B have none.

    A row's partner has the same key; where B lacks the row's backend altogether, the row of another
    backend with the same kernel will do (a CPU against a GPU).
    """
    by_key: dict[str, dict[str, Row]] = {}
    for row in b.rows:
        by_key.setdefault(_key(row), {})[row.backend] = row
    backends_b = {row.backend for row in b.rows}
    pairs, used = [], set()
    for row in a.rows:
        partners = by_key.get(_key(row), {})
        chosen = [row.backend] if row.backend in backends_b else sorted(partners)
        for backend in chosen:
            if backend in partners:
                pairs.append((row, partners[backend]))
                used.add(id(partners[backend]))
    matched = {id(row) for row, _ in pairs}
    return pairs, sum(id(r) not in matched for r in a.rows), sum(id(r) not in used for r in b.rows)


def _key(row: Row) -> str:
    return repr([getattr(row, name) for name in KEY])


def _label(a: Row, b: Row, rows: Sequence[Row]) -> str:
    kernel = a.kernel
    if a.backend != b.backend:
        kernel += f" @{a.backend}/{b.backend}"
    elif len({row.backend for row in rows}) > 1:
        kernel += f" @{a.backend}"
    point = point_label(a, varying([row for row in rows if row.case == a.case]))
    return " · ".join(part for part in (a.case, kernel, point) if part)


def _facts(a: Submission, b: Submission) -> list[tuple[str, str, str]]:
    flat_a, flat_b = _flatten(a), _flatten(b)
    names = sorted(flat_a.keys() | flat_b.keys())
    rows = [(name, flat_a.get(name, "–"), flat_b.get(name, "–")) for name in names]
    return [row for row in rows if row[1] != row[2]]


def _flatten(submission: Submission) -> dict[str, str]:
    flat: dict[str, str] = {}

    def walk(value: Any, where: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{where}.{key}" if where else str(key))
        else:
            flat[where] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    walk({"machine": submission.machine.model_dump(), "suite": submission.suite.model_dump()}, "")
    flat["config.sha256"] = submission.config.sha256
    return flat


def _first_difference(a: Row, b: Row) -> str | None:
    """The first stage both rows have a digest of and that differs; a status that differs comes first."""
    if a.status != b.status:
        return f"status: {a.status} / {b.status}"
    for stage in STAGES:
        if stage in a.digests and stage in b.digests and a.digests[stage] != b.digests[stage]:
            return stage
    return None


def _has_outputs(row: Row) -> bool:
    return any(stage in row.digests for stage in STAGES[1:])


def _distance(a: Row, b: Row) -> float:
    """Difference of the headlines in combined standard errors; NaN where they have none."""
    shown = headline(a)
    if shown is None or shown.sem is None or a.status != "ok" or b.status != "ok":
        return math.nan
    spread = math.hypot(a.metrics.get(shown.sem, math.nan), b.metrics.get(shown.sem, math.nan))
    gap = b.metrics.get(shown.metric, math.nan) - a.metrics.get(shown.metric, math.nan)
    return gap / spread if spread > 0 else math.nan


def comparison_text(result: Comparison, a: str, b: str) -> str:
    """For a terminal."""
    parts = [f"A = {a}\nB = {b}"]
    if result.facts:
        parts.append(
            "Facts that differ\n" + tabulate(result.facts, ["fact", "A", "B"], disable_numparse=True)
        )
    else:
        parts.append("Facts: the same")
    total = result.equal + len(result.different)
    only = f"; only in A {result.only_a}, only in B {result.only_b}"
    parts.append(
        f"Bits: {result.equal} of {total} common rows agree"
        + (only if result.only_a or result.only_b else "")
    )
    if result.different:
        body = [(d["row"], d["first_difference"]) for d in result.different]
        parts.append(
            "Rows that differ\n" + tabulate(body, ["row", "first differing stage"], disable_numparse=True)
        )
    if result.biases:
        values = [(d["row"], d["a"], d["b"], f"{d['z']:+.1f}") for d in result.biases]
        parts.append("Values that differ\n" + tabulate(values, ["row", "A", "B", "z"], disable_numparse=True))
    return "\n\n".join(parts)
