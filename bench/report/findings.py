"""What the rows of one machine say, in a few plain sentences. Every figure comes from a row."""

from __future__ import annotations

from collections.abc import Sequence

from bench.files.load import Found
from bench.files.records import Row
from bench.report.early_warning import SICK
from bench.report.select import sick_rows, told, training_groups, varied
from cases.crash.runs import is_complete, mantissa_bits


def findings(found: Sequence[Found], beside: Sequence[Found] = ()) -> list[str]:
    """Sentences about bias, leak and crash of the stock kernels and the fixes; empty if none was measured.

    `beside`: the machine's other rows, among which the healthiest training run may be.
    """
    lines = []
    backends = list(dict.fromkeys(f.row.backend for f in found))
    for backend in backends:
        own = [f for f in found if f.row.backend == backend]
        prefix = f"{backend}: " if len(backends) > 1 else ""
        parts = (_bias(own), _leak(own), _range(own), _drift(own), _crash(own, beside))
        lines += [prefix + line for part in parts for line in part]
    return lines


def _bias(found: Sequence[Found]) -> list[str]:
    """The mean error of stock kernels, and what the paper's shift does about it."""
    points = told(found, "bias")
    everything = [f for f in points if f.row.is_stock]
    if not everything:
        return []
    stock = [f.row for f in varied(everything) or everything]
    fine = [row.implementation for row in stock if row.verdict == "pass"]
    lines = [
        "Stock kernels where two keys share the row maximum: "
        + _split("biased", _list(stock, "biased", "aligned_ulp_mean", "{:+.2f} ulp"), fine)
    ]
    for row in stock:
        fixed = [r for r in _with_fix(points, row, "stabilized") if r.options.get("beta") == 2.0]
        if row.verdict != "biased" or not fixed:
            continue
        parts = [
            f"{r.metrics['aligned_ulp_mean']:+.3f} ulp where row maxima "
            + ("vary" if r.params["row_jitter"] else "are all the same")
            + f" ({r.verdict})"
            for r in fixed
        ]
        lines.append(f"The paper's shift on {row.implementation}: " + ", ".join(parts) + ".")
    return lines


def _leak(found: Sequence[Found]) -> list[str]:
    """The leak of stock kernels at every gap, and what the fixes leave of it."""
    points = [f for f in told(found, "leak", free=("gap",)) if "true_dq_abs_mean" in f.row.metrics]
    if not points:
        return []
    exact = points[0].row.metrics["true_dq_abs_mean"]
    stock = [f.row for f in points if f.row.is_stock]
    fine = [row.implementation for row in stock if row.verdict == "pass"]
    lines = [
        f"Stock kernels, dQ where the exact gradient is {exact:.0e}: "
        + _split("leaking", _list(stock, "leaks", "leak_mean", "{:+.1e}"), fine)
    ]
    for fix in ("delta_fp32", "delta_dp", "stabilized"):
        ratios = []
        for row in stock:
            fixed = _with_fix(points, row, fix)
            if row.verdict == "leaks" and fixed:
                before, after = row.metrics["leak_mean"], fixed[0].metrics["leak_mean"]
                ratios.append(f"{row.implementation} {before:+.1e} → {after:+.1e}")
        if ratios:
            lines.append(f"With {fix}: " + ", ".join(ratios) + ".")
    return lines


def _range(found: Sequence[Found]) -> list[str]:
    """Where the range of each shift ends."""
    points = [f.row for f in told(found, "range") if f.row.verdict == "out_of_range"]
    parts = [
        f"{row.kernel} (β={row.options['beta']:g}) {row.metrics['row_max_limit']:.4g}"
        for row in points
        if "beta" in row.options
    ]
    return ["Largest row maximum with a right result: " + ", ".join(parts) + "."] if parts else []


def _drift(found: Sequence[Found]) -> list[str]:
    """Who moves the planted channel, and how fast."""
    points = [f.row for f in told(found, "drift")]
    if not points:
        return []
    groups = []
    for verdict in dict.fromkeys(("drifts", "creeps", "wanders", "holds", *(row.verdict for row in points))):
        shown = [
            row.kernel + ("" if verdict == "holds" else f" ({row.metrics['drift_mean']:+.2f})")
            for row in points
            if row.verdict == verdict
        ]
        if shown:
            groups.append(f"{verdict}: {', '.join(shown)}")
    fp32 = points[0].metrics["fp32_drift_abs_mean"]
    return [
        "Drift of W_Q where the exact gradient is 0, learning rates a step "
        f"(FP32: {fp32:.0e}): " + "; ".join(groups) + "."
    ]


def _crash(found: Sequence[Found], beside: Sequence[Found]) -> list[str]:
    """Training, a sentence for each number of mantissa bits: which kernels explode, and when."""
    kernels_at: dict[int, dict[str, list[Row]]] = {}
    for row in (f.row for f in told(found, "crash")):
        if is_complete(row):
            kernels_at.setdefault(mantissa_bits(row), {}).setdefault(row.kernel, []).append(row)
    # Both: of two runs of one training the longer hides the shorter.
    sick = sick_rows(training_groups(found)) | sick_rows(training_groups([*found, *beside]))
    lines = []
    for bits, kernels in sorted(kernels_at.items()):
        explode, hold, ill = [], [], []
        for kernel, runs in kernels.items():
            steps = sorted(r.metrics["crash_step"] for r in runs if r.verdict.startswith("exploded"))
            shortest = min(r.metrics["steps_run"] for r in runs)
            if steps:
                some = "" if len(steps) == len(runs) else f", {len(steps)} of {len(runs)} runs"
                explode.append(f"{kernel} (step {', '.join(f'{s:.0f}' for s in steps)}{some})")
            elif several := sum(id(r) in sick for r in runs):
                some = "" if several == len(runs) else f", {several} of {len(runs)} runs"
                ill.append(f"{kernel} (to step {shortest:.0f}{some})")
            else:
                hold.append(f"{kernel} (to step {shortest:.0f})")
        limit = f"row maxima over {SICK:.0f} × the healthiest run's"
        lines.append(
            f"Training with O and P̄ in {bits} mantissa bit{'s'[: bits != 1]}: "
            + f"explodes: {', '.join(explode) or 'none'}; holds: {', '.join(hold) or 'none'}"
            + (f"; stable by its loss but sick ({limit}): {', '.join(ill)}" if ill else "")
            + "."
        )
    return lines


def _with_fix(found: Sequence[Found], stock: Row, fix: str) -> list[Row]:
    """Rows of the same implementation with this fix."""
    return [f.row for f in found if (f.row.implementation, f.row.fix) == (stock.implementation, fix)]


def _list(rows: Sequence[Row], verdict: str, metric: str, form: str) -> list[str]:
    return [
        f"{row.implementation} ({form.format(row.metrics[metric])})" for row in rows if row.verdict == verdict
    ]


def _split(what: str, yes: list[str], no: list[str]) -> str:
    """`biased: a, b; not biased: c.`"""
    return f"{what}: {', '.join(yes) or 'none'}; not {what}: {', '.join(no) or 'none'}."
