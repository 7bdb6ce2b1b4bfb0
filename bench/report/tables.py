"""Tables from rows: one cell a row, labels that name only what varies.

The tables are plain data; `render.py` turns them into text, Markdown or CSV.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.files.labels import kernel_labels, kernel_names, point_label, varying
from bench.files.load import Found
from bench.files.records import Row
from cases import known_case
from cases.headline import cell_text, headline

AWAITED = {
    "NVIDIA A100": r"\ba100\b",
    "NVIDIA RTX 4090": r"\b4090\b",
    "NVIDIA H200": r"\bh200\b",
    "Ascend 910B": r"910b",
}


@dataclass(frozen=True)
class Cell:
    """What one row says: text, verdict, and where the row stands."""

    text: str
    verdict: str = ""
    found: Found | None = None


@dataclass
class Table:
    """A titled grid. `note` says in plain words what the cells are."""

    title: str
    note: str
    columns: list[str]
    rows: list[tuple[str, list[Cell | None]]] = field(default_factory=list)
    corner: str = "kernel"


def is_fine(verdict: str) -> bool:
    """`pass`, `holds`, `stable@1500`, `measured`, or no verdict at all."""
    return verdict.partition("@")[0] in ("", "pass", "holds", "stable", "measured")


def case_table(case: str, found: Sequence[Found], machine: str) -> Table:
    """One case on one machine: kernels down, parameter points across."""
    rows = [f.row for f in found]
    names = varying(rows)
    columns = list(dict.fromkeys(point_label(row, names) or "all" for row in rows))
    grid: dict[str, list[Cell | None]] = {}
    for f, label in zip(found, kernel_labels(rows), strict=True):
        line = grid.setdefault(label, [None] * len(columns))
        at = columns.index(point_label(f.row, names) or "all")
        line[at] = Cell(cell_text(f.row), f.row.verdict, f)
    shown = headline(rows[0])
    known = known_case(case)
    note = known.question if known else ""
    if shown:
        note += f" Cells: {shown.label}; verdict."
    return Table(f"{case} · {machine}", note, columns, list(grid.items()))


def summary_table(found: Sequence[Found]) -> Table:
    """Case × kernel down, machines across; a cell counts the verdicts and shows the worst row."""
    machines = sorted({f.machine for f in found})
    table = Table(
        "Summary",
        "Each cell: verdicts of all parameter points, and the largest value among them.",
        machines,
        corner="case · kernel",
    )
    groups: dict[tuple[str, str], dict[str, list[Found]]] = {}
    for f, kernel in zip(found, kernel_names([f.row for f in found]), strict=True):
        key = (f.row.case, kernel)
        groups.setdefault(key, {}).setdefault(f.machine, []).append(f)
    for (case, kernel), by_machine in groups.items():
        cells = [_summary_cell(by_machine[m]) if m in by_machine else None for m in machines]
        table.rows.append((f"{case} · {kernel}", cells))
    return table


def _summary_cell(found: list[Found]) -> Cell:
    counts: dict[str, int] = {}
    for f in found:
        word = f.row.verdict.partition("@")[0] if f.row.status == "ok" else f.row.status
        counts[word] = counts.get(word, 0) + 1
    words = ", ".join(f"{word} {n}/{len(found)}" for word, n in sorted(counts.items()))
    worst = max(found, key=_badness)
    text = words
    if worst.row.status == "ok" and not is_fine(worst.row.verdict):
        step = _crash_step(worst.row)
        shown = cell_text(worst.row).rpartition(" ")[0]
        text += f": {shown}" if step is None else f": first at step {step:.0f}"
    return Cell(text, worst.row.verdict, worst)


def _badness(f: Found) -> tuple[bool, float]:
    """Sorts a group's rows: a failing verdict first, then by the headline (or the sooner crash)."""
    if (step := _crash_step(f.row)) is not None:
        return True, -step
    shown = headline(f.row)
    value = abs(f.row.metrics.get(shown.metric, 0.0)) if shown else 0.0
    if value != value:
        value = float("inf")
    elif shown and shown.worst == "low":
        value = -value
    return not is_fine(f.row.verdict), value


def _crash_step(row: Row) -> float | None:
    """The step of `exploded@STEP`; None for any other verdict."""
    word, _, _ = row.verdict.partition("@")
    return row.metrics.get("crash_step") if word == "exploded" else None


def digest_table(found: Sequence[Found]) -> Table:
    """Which machines agree bit for bit: one letter for each distinct set of output digests.

    Rows on other inputs are never compared. Empty for a single machine: nothing to agree with.
    """
    machines = sorted({f.machine for f in found})
    table = Table(
        "Same bits?",
        "Rows of determinism cases; equal letters are equal digests of all outputs.",
        machines,
        corner="case · kernel · point",
    )
    chosen = [f for f in found if f.row.status == "ok" and _compares_bits(f.row.case)]
    rows = [f.row for f in chosen]
    names = {
        case: varying([row for row in rows if row.case == case])
        for case in dict.fromkeys(row.case for row in rows)
    }
    groups: dict[str, list[Found]] = {}
    for f, kernel in zip(chosen, kernel_labels(rows), strict=True) if len(machines) > 1 else ():
        label_point = point_label(f.row, names[f.row.case])
        label = f"{f.row.case} · {kernel} · {label_point}".removesuffix(" · ")
        groups.setdefault(label, []).append(f)
    for label, members in groups.items():
        letters: dict[tuple[tuple[str, str], ...], str] = {}
        inputs = members[0].row.digests.get("inputs")
        cells: list[Cell | None] = []
        for machine in machines:
            own = [f for f in members if f.machine == machine]
            if not own:
                cells.append(None)
                continue
            texts = []
            for f in own:
                outputs = {k: v for k, v in f.row.digests.items() if k != "inputs"}
                bits = tuple(sorted(outputs.items()))
                if f.row.digests.get("inputs") != inputs:
                    texts.append("other inputs")
                else:
                    texts.append(letters.setdefault(bits, chr(ord("A") + len(letters))))
            cells.append(Cell(", ".join(texts), own[0].row.verdict, own[0]))
        table.rows.append((label, cells))
    return table


def _compares_bits(case: str) -> bool:
    known = known_case(case)
    return known is not None and known.compares_bits


def awaited(found: Sequence[Found]) -> list[str]:
    """The chips of the paper's claim that nobody has submitted yet."""
    return awaited_of({f.machine for f in found})


def awaited_of(machines: Iterable[str]) -> list[str]:
    """The same from the machines' slugs."""
    slugs = " ".join(machines)
    return [name for name, pattern in AWAITED.items() if not re.search(pattern, slugs)]
