"""What docs/crash.md says of the ladder beyond the report's tables: growth in parts, who goes first, heads.

    python -m bench.tools.studies.ladder_statistics results/nvidia-h200/ladder-*.json
    python -m bench.tools.studies.ladder_statistics results/*/ladder-cpu*.json

A block for each machine and model. Intervals are Student's, runs taken as independent.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from tabulate import tabulate

from bench.errors import UsageError
from bench.files.load import all_rows, load_all
from bench.files.records import Row
from bench.report.current import current
from bench.report.early_warning import alarm_step, healthy, lost_step, threshold
from bench.report.explosions import growth, student_t
from bench.report.select import training_groups
from cases.crash.runs import Group, TrainingRun

ROW_MAX = "row_max_abs"


def growth_lines(group: Group) -> list[str]:
    """Growth of stock's step a bit: of all runs, of the lower and upper half of M, of each seed."""
    stock = [run for run in group.runs if run.row.kernel == "eager-ladder/stock"]
    lines = [f"all: {found}, {drawn_on(stock)}"] if (found := growth(stock)) else []
    if found and len(found.bits) > 2:
        middle = found.bits[len(found.bits) // 2]
        parts = {
            f"M <= {middle}": [run for run in stock if run.bits <= middle],
            f"M >= {middle}": [run for run in stock if run.bits >= middle],
        }
        parts |= {f"seed {s}": [r for r in stock if r.seed == s] for s in (0, 1, 2)}
        lines += [f"{name}: {part}" for name, runs in parts.items() if (part := growth(runs))]
    return lines


def drawn_on(runs: Sequence[TrainingRun]) -> str:
    """The line through log2(step) at the next M, with the interval of one run: an extrapolation."""
    used = [run for run in runs if run.exploded]
    m = np.array([run.bits for run in used], dtype=float)
    y = np.log2([run.step for run in used])
    slope, start = np.polyfit(m, y, 1)
    freedom, ahead = len(used) - 2, m.max() + 1
    scatter = math.sqrt(((y - start - slope * m) ** 2).sum() / freedom)
    away = (ahead - m.mean()) ** 2 / ((m - m.mean()) ** 2).sum()
    margin = student_t(freedom) * scatter * math.sqrt(1 + 1 / len(m) + away)
    low, middle, high = (2 ** (start + slope * ahead + x) for x in (-margin, 0, margin))
    return f"drawn on to M = {ahead:.0f}: {middle:.0f} ({low:.0f} to {high:.0f} for one run)"


def first_layer(row: Row, limits: dict[str, float]) -> str:
    """The layer, from 1, whose ‖W_Q‖₂ passes its limit first: `2 at 1000`."""
    alarms = [(alarm_step(row, f"w_q_norm_{n}", limits[f"w_q_norm_{n}"]), n) for n in range(len(limits) - 1)]
    passed = [(step, n + 1) for step, n in alarms if step is not None]
    return "{1} at {0:.0f}".format(*min(passed)) if passed else "–"


def run_line(run: TrainingRun, limits: dict[str, float]) -> list[str]:
    """One run: largest row maximum, share of the run that it warned for, first layer, worst head, leak."""
    row, warned, first = run.row, "–", "–"
    if limits and row.series:
        first = first_layer(row, limits)
        alarm = alarm_step(row, ROW_MAX, limits[ROW_MAX])
        if run.exploded and alarm is not None:
            warned = f"{1 - alarm / lost_step(row):.0%}"
    finite = [value for value in row.series.get(ROW_MAX, []) if math.isfinite(value)]
    heads = [v for name, v in row.metrics.items() if name.startswith("leak_coherence_head_")]
    return [
        run.name,
        row.verdict,
        f"{max(finite, default=math.nan):.0f}",
        warned,
        first,
        f"{max(heads, key=abs):+.3f}" if heads else "–",
        f"{row.metrics.get('leak_rms', math.nan):.1e}",
    ]


def coherence_lines(group: Group, layers: int) -> list[list[str]]:
    """Mean coherence of the leak over seeds and layers, with its t, by kernel and M and over all M."""
    lines = []
    for label in group.labels():
        runs = [run for run in group.runs if run.label == label]
        bits = sorted({run.bits for run in runs})
        parts = {str(m): [run for run in runs if run.bits == m] for m in bits}
        if len(bits) > 1:
            parts["all"] = runs
        for name, members in parts.items():
            found = [run.row.metrics.get(f"leak_coherence_{n}") for run in members for n in range(layers)]
            values = [value for value in found if value is not None]
            if len(values) > 2:
                t = mean(values) / (stdev(values) / math.sqrt(len(values)))
                lines.append([label, name, str(len(values)), f"{mean(values):+.4f}", f"{t:+.1f}"])
    return lines


def block(group: Group) -> str:
    """Everything about one machine and model."""
    layers = int(str(group.size.get("layers", 0)))
    fine, _ = healthy(group.runs)
    names = [ROW_MAX, *(f"w_q_norm_{n}" for n in range(layers))]
    limits = {name: limit for name in names if (limit := threshold(name, fine)) is not None}
    limits = limits if len(limits) == len(names) else {}
    runs = sorted(group.runs, key=lambda run: (run.label, run.bits, run.seed))
    head = ["run", "verdict", "largest row max", "warned", "‖W_Q‖₂ first", "worst head", "leak rms"]
    means = ["kernel", "M", "seed-layers", "coherence", "t"]
    return "\n".join(
        [
            f"== {group.title}",
            *growth_lines(group),
            "",
            tabulate([run_line(run, limits) for run in runs], head, disable_numparse=True),
            "",
            tabulate(coherence_lines(group, layers), means, disable_numparse=True),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    try:
        loaded, problems = load_all(parser.parse_args().files)
    except UsageError as error:
        parser.error(str(error))
    found = training_groups(current(all_rows(loaded)).rows)
    for problem in problems:
        print(f"left out: {problem}")
    if not found:
        parser.error("no finished runs of crash/ladder in these files")
    for group in found:
        print(block(group))


if __name__ == "__main__":
    main()
