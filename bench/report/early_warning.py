"""How many steps before the loss does each logged signal rise?

The loss is lost at the first logged step from which on every logged loss is 0.3 nats above the best moving
average, or at the explosion if that comes first. A signal's alarm is the first logged step at which it
passes 1.25 × the highest value that any healthy run of the same machine and model shows. The warm-up
of the learning rate is left out of both. Steps are those of the logs: 10 or 25 apart.

Stable is not healthy: a run whose scores have drifted away may be lost later. One whose largest |row-max
score| is more than 10 × the smallest such value among the stable runs is `sick`, and sets no threshold.
Where all healthy runs are of a fix without any leak, the signals of the leak alarm at once and say little.
The thresholds come from the same few runs that the alarms are tried on: no held-out run tests them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from statistics import median

from bench.files.records import Row
from bench.report.tables import Cell, Table
from cases.crash.runs import Group, TrainingRun, is_complete

LOSS_MARGIN = 0.3  # nats above the best moving average
ALARM = 1.25  # times the highest value of a healthy run
SICK = 10.0  # times the smallest of the stable runs' largest row maxima
WARM_UP = 100  # steps, of the rows written before `warmup` was a parameter
NAMES = {
    "row_max_abs": "max |row-max score|",
    "key_mean_ratio": "|mean key| / mean |key|",
    "leak_share": "Σ|rowsum dS| / Σ|dS|",
    "max_p_mean": "mean max P",
    "gradient_norm": "gradient norm",
    "repeated_max_share": "repeated maxima, share",
    "leak_mean": "|mean leak|",
    "leak_coherence": "|leak coherence|",
    "leak_coherence_head": "|leak coherence|, largest of a head",
}
AT_MOST_ONE = ("key_mean_ratio", "max_p_mean", "repeated_max_share", "leak_coherence", "leak_coherence_head")
_NORM = re.compile(r"w_([qk])_norm_(\d+)")


def signal_name(series: str) -> str:
    """For people; layers count from 1."""
    if match := _NORM.fullmatch(series):
        return f"‖W_{match[1].upper()}‖₂ of layer {int(match[2]) + 1}"
    return NAMES.get(series, series)


def signals_of(runs: Sequence[TrainingRun]) -> list[str]:
    """The curves of these rows that may warn: the known ones, then norms by layer."""
    present = {name for run in runs for name in run.row.series}
    norms = sorted((n for n in present if _NORM.fullmatch(n)), key=lambda n: (n[2] == "k", n))
    return [name for name in NAMES if name in present] + norms


def lost_step(row: Row) -> float:
    """Where the loss leaves its best moving average by 0.3 nats for good; of an exploded run."""
    limit = row.metrics["best_loss"] + LOSS_MARGIN
    lost = row.metrics["crash_step"]
    for step, loss in reversed(list(zip(row.series["step"], row.series["loss"], strict=True))):
        if loss <= limit:
            break
        lost = min(lost, step)
    return lost


def healthy(runs: Sequence[TrainingRun]) -> tuple[list[TrainingRun], list[TrainingRun]]:
    """Stable runs that set thresholds, and sick ones that do not."""
    stable = [r for r in runs if r.row.verdict.startswith("stable") and r.row.series.get("row_max_abs")]
    if not stable:
        return [], []
    largest = [_largest(_after_warm_up(run.row, "row_max_abs")[1]) for run in stable]
    limit = SICK * min((v for v in largest if not math.isnan(v)), default=math.inf)
    well = [value <= limit for value in largest]  # NaN is not
    return list(compress(stable, well)), list(compress(stable, (not w for w in well)))


def _largest(values: Sequence[float]) -> float:
    """The largest; NaN is larger than all."""
    return max(values, key=lambda v: math.inf if math.isnan(v) else v)


def peak(row: Row) -> dict[str, list[float]]:
    """A row's series cut down to the one point that `healthy` looks at; empty where there is none."""
    if not is_complete(row) or not row.series.get("row_max_abs"):
        return {}
    steps, values = _after_warm_up(row, "row_max_abs")
    at = row.series["step"].index(steps[values.index(_largest(values))])
    return {name: [row.series[name][at]] for name in ("step", "loss", "row_max_abs")}


def threshold(signal: str, runs: Sequence[TrainingRun]) -> float | None:
    """1.25 × the highest value that any of the (healthy) runs shows; None if none has the signal."""
    values = [v for run in runs if signal in run.row.series for v in _after_warm_up(run.row, signal)[1]]
    finite = [v for v in values if math.isfinite(v)]
    return ALARM * max(finite) if finite else None


def alarm_step(row: Row, signal: str, limit: float) -> float | None:
    """The first logged step at which the signal passes the limit (or is not a number); None: no alarm."""
    steps, values = _after_warm_up(row, signal)
    return next((s for s, v in zip(steps, values, strict=True) if not v <= limit), None)


def warning_steps(row: Row, signal: str, limit: float) -> float | None:
    """From the alarm to the loss; negative where the loss went first. None: no alarm by the end."""
    alarm = alarm_step(row, signal, limit)
    return None if alarm is None else lost_step(row) - alarm


def warning_table(group: Group, machine: str = "") -> Table | None:
    """Signals down, exploded runs of each kernel and M across; None where no run exploded."""
    exploded = [run for run in group.runs if run.exploded and run.row.series.get("step")]
    if not exploded:
        return None
    fine, sick = healthy(group.runs)
    labels = group.labels()
    columns = sorted({(run.label, run.bits) for run in exploded}, key=lambda c: (labels.index(c[0]), c[1]))
    table = Table(
        f"early warning · {group.title or machine}",
        _note(fine, sick),
        [f"{label} M={bits}" for label, bits in columns],
        corner="signal",
    )
    for signal in signals_of(exploded) if fine else ():
        limit = threshold(signal, fine)
        cells = [
            _cell([run for run in exploded if (run.label, run.bits) == column], signal, limit)
            for column in columns
        ]
        table.rows.append((_row_label(signal, limit), cells))
    return table


def _row_label(signal: str, limit: float | None) -> str:
    if limit is None:
        return f"{signal_name(signal)} (no healthy run has it)"
    reach = ": out of reach" if signal in AT_MOST_ONE and limit >= 1 else ""
    return f"{signal_name(signal)} (alarm above {limit:.3g}{reach})"


def _note(fine: Sequence[TrainingRun], sick: Sequence[TrainingRun]) -> str:
    if not fine:
        return "No stable run of this size: nothing to compare the signals with."
    note = (
        "Steps from a signal's alarm to the step at which the loss leaves its best by 0.3 for good: median "
        f"(range). An alarm is {ALARM} × the highest value after warm-up of the healthy runs: "
        + ", ".join(f"{label} ({count})" for label, count in Counter(r.label for r in fine).items())
        + "."
    )
    if sick:
        names = ", ".join(run.name for run in sick)
        note += f" Stable but sick (row maxima over {SICK:g} × the healthiest run's), left out: {names}."
    return note


def _cell(runs: Sequence[TrainingRun], signal: str, limit: float | None) -> Cell | None:
    runs = [run for run in runs if signal in run.row.series]
    if not runs or limit is None:
        return None
    found = [warning_steps(run.row, signal, limit) for run in runs]
    steps = sorted(x for x in found if x is not None)
    silent = len(runs) - len(steps)
    if not steps:
        return Cell("no alarm", "", runs[0].found)
    text = f"{median(steps):.0f}"
    if len(steps) > 1:
        text += f" ({steps[0]:.0f} to {steps[-1]:.0f})"
    if silent:
        text += f", no alarm in {silent} of {len(runs)}"
    return Cell(text, "", runs[0].found)


def _after_warm_up(row: Row, signal: str) -> tuple[list[float], list[float]]:
    """Steps and |values| from the end of the learning rate's warm-up on; all, if none is left."""
    begin = float(str(row.params.get("warmup", WARM_UP)))
    points = [(s, abs(v)) for s, v in zip(row.series["step"], row.series[signal], strict=True)]
    kept = [point for point in points if point[0] >= begin] or points
    return [s for s, _ in kept], [v for _, v in kept]
