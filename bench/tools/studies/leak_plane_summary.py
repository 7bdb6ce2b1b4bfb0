"""What `leak_plane` measured, as a table: signs, shares, rates.

    python -m bench.tools.studies.leak_plane_summary docs/data/leak-plane-cpu.json

One line a run and layer, then means over them with Student's t interval (runs and layers taken as
independent), over the windows after step 400 and, for a run that exploded, up to 50 steps before it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tabulate import tabulate

from bench.errors import UsageError
from bench.report.explosions import student_t

FIRST, LAST = 400, 50  # steps: windows from here on, and up to this far before an explosion
FEWEST = 4  # windows: two of them have two neighbours, and a rank correlation takes two


@dataclass(frozen=True)
class Summary:
    """One layer of one run over the windows that count."""

    kernel: str
    seed: int
    layer: int
    leak: float  # mean leak
    agree: float  # share of windows whose rates both have the sign of −leak
    rank: float  # Spearman's correlation of −leak and rate_q over windows
    eigenvalue: float  # mean of ±√(rate_q·rate_k) a step, 0 where the signs differ
    growth: float  # of log √(|q̄|·|k̄|) a step
    follows: float  # Spearman's correlation of |eigenvalue| and that growth over windows
    by_leak: float  # change of the common score by the leak's part of the updates
    by_rest: float  # … by the rest of the gradient
    change: float  # observed


def summarize(run: dict[str, Any], layer: int) -> Summary:
    """UsageError where fewer than FEWEST windows count."""
    windows = _windows(run)
    points = [w["layers"][layer] for w in windows]
    leaks, rates = [p["leak"] for p in points], [p["rate_q"] for p in points]
    agree = [p["rate_q"] * p["leak"] < 0 and p["rate_k"] * p["leak"] < 0 for p in points]
    steps = [w["steps"] for w in windows]
    middles = [w["step"] - w["steps"] / 2 for w in windows]
    eigenvalues = [_eigenvalue(p) for p in points]
    size = [math.log(p["query"] * p["key"]) / 2 for p in points]
    growth = [_slope(middles, size, i) for i in range(1, len(size) - 1)]
    inner = list(zip(points, steps, strict=True))
    return Summary(
        kernel=run["kernel"],
        seed=run["seed"],
        layer=layer + 1,
        leak=mean(leaks),
        agree=mean(agree),
        rank=spearman([-x for x in leaks], rates),
        eigenvalue=mean(eigenvalues),
        growth=(size[-1] - size[0]) / (middles[-1] - middles[0]),
        follows=spearman([abs(x) for x in eigenvalues[1:-1]], growth),
        by_leak=_between(inner, "common_leak"),
        by_rest=_between(inner, "common_rest"),
        change=points[-1]["common"] - points[0]["common"],
    )


def _windows(run: dict[str, Any]) -> list[dict[str, Any]]:
    word, _, step = run["verdict"].partition("@")
    end = float(step) - LAST if word == "exploded" else math.inf
    found = [w for w in run["windows"] if w["step"] - w["steps"] >= FIRST and w["step"] <= end]
    if len(found) < FEWEST:
        raise UsageError(
            f"{run['kernel']} seed {run['seed']}, {run['verdict']}: {len(found)} windows after step {FIRST} "
            f"(and {LAST} steps before an explosion), at least {FEWEST} are needed"
        )
    return found


def _eigenvalue(point: dict[str, float]) -> float:
    """Of the growing mode, with the sign of the rates: + raises the common score, − lowers it."""
    product = point["rate_q"] * point["rate_k"]
    return math.copysign(math.sqrt(product), point["rate_q"]) if product > 0 else 0.0


def _slope(x: Sequence[float], y: Sequence[float], i: int) -> float:
    """At the point i, from its two neighbours."""
    return (y[i + 1] - y[i - 1]) / (x[i + 1] - x[i - 1])


def _between(windows: Sequence[tuple[dict[str, float], int]], name: str) -> float:
    """Sum of a change a step from the middle of the first window to the middle of the last."""
    whole = sum(point[name] * steps for point, steps in windows)
    ends = [point[name] * steps for point, steps in (windows[0], windows[-1])]
    return whole - sum(ends) / 2


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; no ties are expected."""
    x, y = _ranks(a), _ranks(b)
    middle = (len(a) - 1) / 2
    spread = sum((i - middle) ** 2 for i in x)
    return sum((i - middle) * (j - middle) for i, j in zip(x, y, strict=True)) / spread


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(values)
    for rank, index in enumerate(order):
        ranks[index] = rank
    return ranks


def interval(values: Sequence[float]) -> str:
    """`+0.83 (+0.70 to +0.96)`: mean and Student's t interval, 95 %."""
    middle = mean(values)
    half = student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return f"{middle:+.2g} ({middle - half:+.2g} to {middle + half:+.2g})"


def tables(document: dict[str, Any]) -> str:
    """The line of each run and layer, then the means of each kernel."""
    found = [
        summarize(run, layer) for run in document["runs"] for layer in range(len(_windows(run)[0]["layers"]))
    ]
    verdicts = {(run["kernel"], run["seed"]): run["verdict"] for run in document["runs"]}
    lines = [
        [
            s.kernel.partition("/")[2],
            s.seed,
            verdicts[s.kernel, s.seed],
            s.layer,
            f"{s.leak:+.1e}",
            f"{s.agree:.0%}",
            f"{s.rank:+.2f}",
            f"{s.eigenvalue:+.1e}",
            f"{s.growth:+.1e}",
            f"{s.follows:+.2f}",
            f"{s.change:+.3g}",
            f"{s.by_leak:+.3g}",
            f"{s.by_rest:+.3g}",
        ]
        for s in found
    ]
    heads = [
        "kernel",
        "seed",
        "verdict",
        "layer",
        "mean leak",
        *MEANS,
        "change of the common score",
        "by the leak",
        "by the rest",
    ]
    return _grid(lines, heads) + "\n\n" + _grid(list(_means(found)), ["kernel", *MEANS])


MEANS = {
    "signs agree": "agree",
    "rate follows leak": "rank",
    "eigenvalue": "eigenvalue",
    "growth": "growth",
    "growth follows eigenvalue": "follows",
}


def _means(found: Sequence[Summary]) -> Iterable[list[str]]:
    for kernel in dict.fromkeys(s.kernel for s in found):
        own = [s for s in found if s.kernel == kernel]
        yield [
            kernel.partition("/")[2],
            *(interval([getattr(s, name) for s in own]) for name in MEANS.values()),
        ]


def _grid(rows: list[list[Any]], headers: list[str]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    try:
        print(tables(json.loads(file.read_text())))
    except UsageError as error:
        parser.exit(2, f"{file}: {error}\n")


if __name__ == "__main__":
    main()
