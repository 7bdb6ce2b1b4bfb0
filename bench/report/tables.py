"""Tables from rows: one cell a row, labels that name only what varies.

The tables are plain data; `render.py` turns them into text, Markdown or CSV.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.files.load import Found
from bench.files.records import Row
from cases import CASES, load_case
from cases.base import Headline, question

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


def headline(row: Row) -> Headline | None:
    """How a row's case wants to be shown; None for a case that this version does not know."""
    return load_case(row.case).headline if row.case in CASES else None


def cell_text(row: Row) -> str:
    """`+0.219±0.003 biased`; what was not measured says why in one word."""
    if row.status != "ok":
        return row.status
    shown = headline(row)
    if shown is None or shown.metric not in row.metrics:
        return row.verdict
    text = shown.form.format(row.metrics[shown.metric])
    if shown.sem and (sem := row.metrics.get(shown.sem)) is not None:
        text += "±" + shown.form.replace("+", "").format(sem)
    return f"{text} {row.verdict}"


def point(row: Row) -> dict[str, object]:
    """Everything but the kernel that tells two rows apart."""
    return {**row.params, "dtype": row.dtype, "seeds": row.seeds, "version": row.case_version}


def is_fine(verdict: str) -> bool:
    """`pass`, `holds`, `stable@1500`, `measured`, or no verdict at all."""
    return verdict.partition("@")[0] in ("", "pass", "holds", "stable", "measured")


def varying(rows: Sequence[Row]) -> list[str]:
    """Names of the parameters that take more than one value in `rows`, in order of appearance."""
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in point(row).items():
            values.setdefault(name, set()).add(repr(value))
    return [name for name, seen in values.items() if len(seen) > 1]


def point_label(row: Row, names: Sequence[str]) -> str:
    """`repeats=2 gap=12 float16`: the values of the varying parameters."""
    own = point(row)
    parts = [
        str(own[name]) if name == "dtype" else f"{name}={_short(own[name])}" for name in names if name in own
    ]
    return " ".join(parts)


def kernel_labels(rows: Sequence[Row]) -> list[str]:
    """For each row the kernel, its backend if there are several, and those of its options that vary."""
    own: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        own.setdefault((row.kernel, row.backend), []).append(row)
    options = {kernel: _varying_options(members) for kernel, members in own.items()}
    return [
        _label(name, row, options[row.kernel, row.backend])
        for name, row in zip(kernel_names(rows), rows, strict=True)
    ]


def kernel_label(row: Row, rows: Sequence[Row]) -> str:
    """The label of one row of `rows`; for the labels of all, `kernel_labels`."""
    own = [r for r in rows if r.kernel == row.kernel and r.backend == row.backend]
    return _label(_name(row, _several(rows)), row, _varying_options(own))


def _label(name: str, row: Row, shown: set[str]) -> str:
    options = [f"{key}={_short(value)}" for key, value in row.options.items() if key in shown]
    return " ".join([name, *options])


def _varying_options(rows: Sequence[Row]) -> set[str]:
    """Options that take more than one value in `rows`; one left out counts as None."""
    names = {name for row in rows for name in row.options}
    return {name for name in names if len({repr(row.options.get(name)) for row in rows}) > 1}


def kernel_names(rows: Sequence[Row]) -> list[str]:
    """`eager-fused/stock`, or `eager-fused/stock @cuda` where `rows` come from several backends."""
    several = _several(rows)
    return [_name(row, several) for row in rows]


def _several(rows: Sequence[Row]) -> bool:
    return len({row.backend for row in rows}) > 1


def _name(row: Row, several: bool) -> str:
    return f"{row.kernel} @{row.backend}" if several else row.kernel


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
    note = question(load_case(case)) if case in CASES else ""
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
    chosen = [f for f in found if f.row.case.startswith("determinism/") and f.row.status == "ok"]
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


def awaited(found: Sequence[Found]) -> list[str]:
    """The chips of the paper's claim that nobody has submitted yet."""
    return awaited_of({f.machine for f in found})


def awaited_of(machines: Iterable[str]) -> list[str]:
    """The same from the machines' slugs."""
    slugs = " ".join(machines)
    return [name for name, pattern in AWAITED.items() if not re.search(pattern, slugs)]


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
