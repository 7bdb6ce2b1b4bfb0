"""The crash ladder as a table: step of explosion by mantissa bits, and its growth a bit.

Runs that did not explode are censored: named with the steps that they were trained for, never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mpmath
import numpy as np

from bench.report.early_warning import warning_table
from bench.report.tables import Cell, Table
from cases.crash.runs import Group, TrainingRun, median_step

MIN_BITS, MIN_RUNS = 2, 4  # fewer values of M or runs allow no fit
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Growth:
    """log2 of the step of explosion over M, least squares: slope and its Student-t interval."""

    slope: float
    low: float
    high: float
    runs: int
    bits: tuple[int, ...]

    def __str__(self) -> str:
        factor, low, high = (2**x for x in (self.slope, self.low, self.high))
        bits = ", ".join(map(str, self.bits))
        interval = f"{CONFIDENCE:.0%}: {low:.2f} to {high:.2f}"
        return f"×{factor:.2f} a bit ({interval}; {self.runs} runs, M = {bits})"


def growth(runs: Sequence[TrainingRun]) -> Growth | None:
    """Of the M at which every run exploded; None for fewer than two such M or four runs.

    An M with a censored run is left out: the runs that did explode are the early ones. The interval
    takes log2(step) as linear in M, with independent scatter of one size around it.
    """
    censored = {run.bits for run in runs if not run.exploded}
    used = [run for run in runs if run.bits not in censored and run.step > 0]
    bits = tuple(sorted({run.bits for run in used}))
    if len(bits) < MIN_BITS or len(used) < MIN_RUNS:
        return None
    m = np.array([run.bits for run in used], dtype=float)
    y = np.log2([run.step for run in used])
    spread = ((m - m.mean()) ** 2).sum()
    slope = ((m - m.mean()) * (y - y.mean())).sum() / spread
    rest = y - y.mean() - slope * (m - m.mean())
    freedom = len(used) - 2
    error = math.sqrt((rest**2).sum() / freedom / spread)
    margin = student_t(freedom) * error
    return Growth(float(slope), float(slope - margin), float(slope + margin), len(used), bits)


def student_t(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Half width of the two-sided interval, in standard errors."""

    def outside(t: float) -> float:
        return float(mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))

    low, high = 0.0, 1.0
    while outside(high) > 1 - confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if outside(middle) > 1 - confidence else (low, middle)
    return high


def group_tables(groups: Sequence[Group], machine: str = "") -> list[Table]:
    """For each machine and size the ladder and its warnings."""
    tables = []
    for group in groups:
        if len(group.runs) == len(group.labels()):
            continue  # a run a kernel: the case's own table says it all
        tables.append(ladder_table(group, machine))
        if warnings := warning_table(group, machine):
            tables.append(warnings)
    return tables


def ladder_table(group: Group, machine: str = "") -> Table:
    """Kernels down, M across."""
    bits = group.bits()
    note = "Step of explosion: median (range; runs). Runs that did not explode are censored, not averaged. "
    table = Table(
        f"step of explosion · {group.title or machine}", note + _growth_note(group), [f"M={m}" for m in bits]
    )
    for label in group.labels():
        cells = [_cell(group.runs_at(label, m)) for m in bits]
        table.rows.append((label, cells))
    return table


def _growth_note(group: Group) -> str:
    parts = []
    for label in dict.fromkeys(run.label for run in group.runs if run.is_stock):
        runs = [run for run in group.runs if run.label == label]
        found = growth(runs)
        left_out = sorted({run.bits for run in runs if not run.exploded})
        text = str(found) if found else "not fitted: too few M at which every run exploded"
        if left_out:
            text += f"; left out for censored runs: M = {', '.join(map(str, left_out))}"
        parts.append(f"{label} {text}")
    how = "Growth, least squares of log2(step) on M over runs taken as independent, with Student's t: "
    return how + "; ".join(parts) + "." if parts else ""


def _cell(runs: Sequence[TrainingRun]) -> Cell | None:
    if not runs:
        return None
    lost = sorted((run for run in runs if run.exploded), key=lambda run: run.step)
    if not lost:
        shortest = min(runs, key=lambda run: run.step)
        return Cell(f"none by {shortest.step:.0f} ({_count(runs)})", shortest.row.verdict, shortest.found)
    first = lost[0]
    if len(runs) == 1:
        return Cell(f"{first.step:.0f}", first.row.verdict, first.found)
    held = [run for run in runs if not run.exploded]
    middle = median_step(runs)
    low, high = f"{first.step:.0f}", f"{lost[-1].step:.0f}"
    if held:
        high = f">{max(lost[-1].step, *(run.step for run in held)):.0f}"
    censored = f", {len(held)} censored" if held else ""
    text = "no median" if middle is None else f"{middle:.0f}"
    text += f" ({low} to {high}; {_count(runs)}{censored})"
    return Cell(text, first.row.verdict, first.found)


def _count(runs: Sequence[TrainingRun]) -> str:
    spikes = sum(run.row.verdict == "spike" for run in runs)
    text = f"{len(runs)} run{'s'[: len(runs) != 1]}"
    return text + (f", {spikes} with a spike" if spikes else "")
