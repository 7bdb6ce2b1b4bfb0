"""Figures from result files: the ladder, and the curves of a run that explodes beside runs that do not.

SVG with glyphs as paths, a fixed hash salt and no date: the same files and matplotlib give the same bytes.
matplotlib is an optional dependency, imported when a figure is asked for.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.errors import UsageError
from bench.files.load import Loaded, all_rows
from bench.report.current import current
from bench.report.select import training_groups
from cases.crash.runs import Group, TrainingRun, median_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, safe for colour-blind readers; each kernel has a marker too.
STYLES = {
    "stock": ("#D55E00", "o"),
    "stabilized": ("#CC79A7", "s"),
    "stochastic": ("#E69F00", "D"),
    "delta_fp32": ("#0072B2", "^"),
    "delta_dp": ("#009E73", "v"),
}
VARIANTS = ("P", "X", "*", "h")  # markers of a fix in other kernels, or with another β
CURES = ("delta_fp32", "delta_dp")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "attnrepro",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "white",
}
STEP_TICKS = (1, 10, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


def figures(loaded: list[Loaded]) -> dict[str, str]:
    """SVG text by file name: `ladder.svg`, and `explosion-<machine>.svg` where a pair was measured."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("matplotlib is not installed: pip install matplotlib -c constraints.txt") from None
    chosen = training_groups(current(all_rows(loaded)).rows)
    if not chosen:
        raise UsageError("no finished runs of crash/ladder in these files: nothing to draw")
    made: dict[str, str] = {}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        made["ladder.svg"] = _svg(ladder_figure(chosen))
        for group in chosen:
            if runs := explosion_and_cures(group):
                made[_free_name(f"explosion-{group.machine}", made)] = _svg(explosion_figure(group, runs))
    return made


def _free_name(stem: str, taken: dict[str, str]) -> str:
    name, number = f"{stem}.svg", 2
    while name in taken:
        name, number = f"{stem}-{number}.svg", number + 1
    return name


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def ladder_figure(chosen: Sequence[Group]) -> Figure:
    """Step of explosion over M, a panel for each machine and size."""
    drawn = [len({run.label for run in group.runs if run.row.fix in STYLES}) for group in chosen]
    figure = _new_figure(4.3 * len(chosen), 4.0 + 0.2 * math.ceil(max(drawn) / 2))  # with legends
    panels = figure.subplots(1, len(chosen), sharey=True, squeeze=False)[0]
    for axes, group in zip(panels, chosen, strict=True):
        _ladder_panel(axes, group)
    _scale_steps(panels[0], [run.step for group in chosen for run in group.runs])
    panels[0].set_ylabel("step of explosion (open, arrow: none by then)")
    return figure


def _scale_steps(axes: Axes, steps: Sequence[float]) -> None:
    low, high = 0.6 * min(steps), 1.6 * max(steps)
    ticks = [step for step in STEP_TICKS if low <= step <= high]
    axes.set_yscale("log")
    axes.set_yticks(ticks, [str(step) for step in ticks])
    axes.minorticks_off()
    axes.set_ylim(low, high)


def _ladder_panel(axes: Axes, group: Group) -> None:
    fixes = {run.label: run.row.fix for run in group.runs if run.row.fix in STYLES}
    labels = list(fixes)
    for place, label in enumerate(labels):
        color, marker = STYLES[fixes[label]]
        if variant := [x for x in labels[:place] if fixes[x] == fixes[label]]:
            marker = VARIANTS[(len(variant) - 1) % len(VARIANTS)]
        medians = []
        for bits in group.bits():
            runs = group.runs_at(label, bits)
            there = [x for x in labels if group.runs_at(x, bits)]  # side by side about their M
            x = bits + 0.09 * (there.index(label) - (len(there) - 1) / 2) if runs else bits
            _points(axes, runs, x, color, marker)
            if (middle := median_step(runs)) is not None:
                medians.append((x, middle))
        axes.plot(*zip(*medians, strict=True) if medians else ((), ()), color=color, linewidth=1.4)
        axes.plot([], [], marker=marker, color=color, label=label, linewidth=1.4, markersize=5)
    axes.set_xticks(group.bits())
    axes.set_xlim(min(group.bits()) - 0.5, max(group.bits()) + 0.5)
    axes.set_xlabel("mantissa bits M of P̄ and O")
    axes.set_title(_panel_title(group), fontsize=9)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8)


def _points(axes: Axes, runs: Sequence[TrainingRun], x: float, color: str, marker: str) -> None:
    """Every run: a filled mark where it exploded, an open one with an arrow where it did not."""
    lost = [run.step for run in runs if run.exploded]
    held = sorted({run.step for run in runs if not run.exploded})
    axes.plot([x] * len(lost), lost, marker, color=color, markersize=5, alpha=0.85)
    axes.plot([x] * len(held), held, marker, color=color, markersize=5, fillstyle="none")
    for step in held:
        axes.annotate("", (x, step * 1.22), (x, step * 1.03), arrowprops={"arrowstyle": "->", "color": color})


def _panel_title(group: Group) -> str:
    size = ", ".join(x for x in (group.shape, group.dtype) if x)
    return f"{group.machine}\n{size}"


def explosion_and_cures(group: Group) -> list[TrainingRun]:
    """A stock run that explodes and the runs of CURES with the same M and seed, if there are any."""
    best: list[TrainingRun] = []
    for run in sorted(group.runs, key=lambda r: (r.seed, r.bits)):
        if not (run.is_stock and run.exploded):
            continue
        cures = [
            other
            for fix in CURES
            for other in group.runs
            if other.row.fix == fix and (other.bits, other.seed) == (run.bits, run.seed)
        ]
        if len(cures) > max(0, len(best) - 1):
            best = [run, *cures]
    return best


def explosion_figure(group: Group, runs: Sequence[TrainingRun]) -> Figure:
    """Loss, gradient norm, row maxima and ‖W_Q‖₂ by layer; a column a run."""
    rows = ("loss", "gradient_norm", "row_max_abs", "w_q_norm")
    labels = ("loss, nats", "gradient norm", "max |row-max score|", "‖W_Q‖₂")
    figure = _new_figure(3.1 * len(runs) + 0.5, 8.4)
    grid = figure.subplots(len(rows), len(runs), sharex=True, sharey="row", squeeze=False)
    for column, run in enumerate(runs):
        for axes, row in zip(grid[:, column], rows, strict=True):
            _curves(axes, run, row)
            if run.exploded:
                axes.axvline(run.step, color="#555555", linewidth=0.9, linestyle=":")
        grid[0][column].set_title(f"{run.row.fix}, M = {run.bits}: {run.row.verdict}", fontsize=9)
        grid[-1][column].set_xlabel("step")
    for axes, label in zip(grid[:, 0], labels, strict=True):
        axes.set_ylabel(label)
    grid[-1][-1].legend(loc="upper left", fontsize=7, ncols=2)
    figure.suptitle(f"{_panel_title(group)}, seed {runs[0].seed}", fontsize=9)
    return figure


def _curves(axes: Axes, run: TrainingRun, name: str) -> None:
    color, _ = STYLES[run.row.fix]
    if name != "w_q_norm":
        _curve(axes, run, name, color=color)
    else:
        layers = [n for n in sorted(run.row.series) if n.startswith("w_q_norm_")]
        for number, layer in enumerate(layers):
            style = {"color": _shade(number, len(layers)), "linestyle": ("-", "--")[number % 2]}
            _curve(axes, run, layer, label=f"layer {number + 1}", **style)
    if name != "loss":
        axes.set_yscale("log")


def _curve(axes: Axes, run: TrainingRun, name: str, **style: Any) -> None:
    values = [v if math.isfinite(v) else math.nan for v in run.row.series[name]]
    axes.plot(run.row.series["step"], values, linewidth=1.2, **style)


def _shade(number: int, count: int) -> Any:
    """viridis without its pale end: in order, and told apart by brightness alone."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.88 * number / max(1, count - 1))
