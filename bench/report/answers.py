"""The answer table: machine × (is stock biased? does it leak? does it crash? which fix holds? at what cost?).

Every cell comes from the machine's current rows and leads to the one it quotes. What was not measured
says so; nothing is inferred.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.records import Row
from bench.report.collect import Found
from bench.report.tables import Cell, Table, headline, is_fine

QUESTIONS = (
    "is stock biased?", "does its δ error leak?", "does training crash?", "which fix holds?",
    "what does a fix cost?",
)  # fmt: skip
NOT_MEASURED = "not measured"
NOTE = (
    "One line a machine and backend. Bias: BF16, two equal row maxima (bias/tie_break, gap 12), mean error"
    " of O in ulps. Leak: rowsum(dS), exactly 0 in exact arithmetic (bias/leak). Crash: training of"
    " crash/ladder with M mantissa bits. A fix holds where it stops every leak and every explosion that the"
    " machine measured without it; in part: in some implementations only. Cost: time of forward and backward"
    " over that of stock."
)
FIXES = (
    "delta_fp32",
    "delta_dp",
    "stabilized",
    "stabilized+consistent_l",
    "consistent_l",
    "stochastic",
)
BIAS_POINT = {"repeats": 2, "gap": 12.0, "value_sign": "mixed"}
LEAK_POINT = {"repeats": 2, "other_values": "same_sign"}


def answer_table(found: Sequence[Found]) -> Table:
    """Lines by machine and backend, the accelerator's first."""
    table = Table("Answers", NOTE, list(QUESTIONS), corner="machine")
    machines: dict[tuple[str, str], list[Found]] = {}
    for f in found:
        machines.setdefault((f.machine, f.row.backend), []).append(f)
    for (machine, backend), rows in sorted(machines.items(), key=lambda item: _order(item[0])):
        cells = [_biased(rows), _leaks(rows), _crashes(rows), _holds(rows), _cost(rows)]
        if any(cell.text != NOT_MEASURED for cell in cells):
            table.rows.append((f"{machine} · {backend}", list(cells)))
    return table


def _order(key: tuple[str, str]) -> tuple[str, bool, str]:
    machine, backend = key
    return machine, backend == "cpu", backend


def is_answer(row: Row) -> bool:
    """Whether the answer table may look at this row."""
    if row.status != "ok":
        return False
    if row.case in ("crash/ladder", "speed/attention"):
        return True
    points = {"bias/tie_break": BIAS_POINT, "bias/leak": LEAK_POINT}
    return row.case in points and row.dtype == "bfloat16" and _at(row, points[row.case])


def _at(row: Row, point: dict[str, object]) -> bool:
    return all(row.params.get(name) == value for name, value in point.items())


def _of(found: Sequence[Found], case: str, fix: str) -> list[Found]:
    return [
        f for f in found if f.row.case == case and is_answer(f.row) and fix_of(f.row) == fix
    ]  # fmt: skip


def fix_of(row: Row) -> str:
    """`stabilized` of `eager-fused/stabilized`."""
    return row.kernel.partition("/")[2]


def implementation(row: Row) -> str:
    return row.kernel.partition("/")[0]


def _value(f: Found) -> float:
    shown = headline(f.row)
    return f.row.metrics.get(shown.metric, 0.0) if shown else 0.0


def _biased(found: Sequence[Found]) -> Cell:
    rows = [f for f in _of(found, "bias/tie_break", "stock") if f.row.params.get("row_jitter") != 0]
    return _split(rows, "{:+.2f} ulp", "biased")


def _leaks(found: Sequence[Found]) -> Cell:
    return _split(_of(found, "bias/leak", "stock"), "{:+.0e}", "leaking")


def _split(rows: list[Found], form: str, word: str) -> Cell:
    """`2 of 4: sdpa-flash +0.18 ulp, …` with the largest first; leads to the largest."""
    if not rows:
        return Cell(NOT_MEASURED)
    bad = sorted((f for f in rows if not is_fine(f.row.verdict)), key=lambda f: -abs(_value(f)))
    if not bad:
        return Cell(f"no, none of {len(rows)} kernels", "pass", rows[0])
    named = ", ".join(f"{implementation(f.row)} {form.format(_value(f))}" for f in bad)
    return Cell(f"{word}: {len(bad)} of {len(rows)}: {named}", bad[0].row.verdict, bad[0])


def _crashes(found: Sequence[Found]) -> Cell:
    """Stock by mantissa bits: `yes at M=1: step 1082–1278 (3 of 3 runs); no at M=2`."""
    rows = _of(found, "crash/ladder", "stock")
    if not rows:
        return Cell(NOT_MEASURED)
    groups: dict[object, list[Found]] = {}
    for f in rows:
        groups.setdefault(f.row.options.get("mantissa_bits"), []).append(f)
    parts, worst = [], rows[0]
    for bits, runs in sorted(groups.items(), key=lambda item: str(item[0])):
        crashed = [f for f in runs if f.row.verdict.startswith("exploded")]
        steps = sorted(f.row.metrics["crash_step"] for f in crashed)
        at = f"at M={bits}" if bits is not None else "in full precision"
        if crashed:
            worst = worst if worst in crashed else crashed[0]
            span = f"{steps[0]:.0f}" if len(steps) == 1 else f"{steps[0]:.0f} to {steps[-1]:.0f}"
            parts.append(f"yes {at}: step {span} ({len(crashed)} of {len(runs)} runs)")
        else:
            last = min(f.row.metrics["steps_run"] for f in runs)
            parts.append(f"no {at} to step {last:.0f} ({len(runs)} runs)")
    return Cell("; ".join(parts), worst.row.verdict, worst)


def _holds(found: Sequence[Found]) -> Cell:
    """Fixes that hold where stock leaks or explodes, fixes that hold in part, and the rest."""
    failing: set[tuple[str, str, object]] = set()
    for case in ("bias/leak", "crash/ladder"):
        failing |= {_where(f) for f in _of(found, case, "stock") if not is_fine(f.row.verdict)}
    if not failing:
        return Cell(NOT_MEASURED)
    answers: dict[str, list[str]] = {"yes": [], "in part": [], "no": []}
    best: tuple[str, Found] | None = None  # the answer and row that the cell leads to
    for fix in FIXES:
        rows = [f for case in ("bias/leak", "crash/ladder") for f in _of(found, case, fix)]
        rows = [f for f in rows if _where(f) in failing]
        bad = [f for f in rows if not is_fine(f.row.verdict)]
        good = {implementation(f.row) for f in rows} - {implementation(f.row) for f in bad}
        if not rows:
            continue
        answer = "yes" if not bad else "in part" if good else "no"
        answers[answer].append(f"{fix} ({_failures(bad) if bad else _kinds(rows)})")
        if best is None or (answer == "yes" and best[0] != "yes"):
            best = answer, rows[0]
    if best is None:
        return Cell(NOT_MEASURED)
    text = "; ".join(f"{answer}: {', '.join(fixes)}" for answer, fixes in answers.items() if fixes)
    return Cell(text, "pass" if best[0] == "yes" else best[1].row.verdict, best[1])


def _where(f: Found) -> tuple[str, str, object]:
    return f.row.case, implementation(f.row), f.row.options.get("mantissa_bits")


def _failures(bad: Sequence[Found]) -> str:
    """`leaks in eager-stored, eager-fused`"""
    places: dict[str, list[str]] = {}
    for f in bad:
        names = places.setdefault(f.row.verdict.partition("@")[0], [])
        if implementation(f.row) not in names:
            names.append(implementation(f.row))
    return "; ".join(f"{verdict} in {', '.join(names)}" for verdict, names in places.items())


def _kinds(rows: Sequence[Found]) -> str:
    """What a fix was seen to stop."""
    words = {"bias/leak": "leak", "crash/ladder": "explosion"}
    return " and ".join(
        word for case, word in words.items() if any(f.row.case == case for f in rows)
    )


def _cost(found: Sequence[Found]) -> Cell:
    """Largest time ratio of each fix over stock of the same implementation, shape and dtype."""
    stock = {_shape(f.row): f for f in _of(found, "speed/attention", "stock")}
    parts: list[str] = []
    first: Found | None = None
    for fix in FIXES:
        pairs = [
            (f.row.metrics["both_ms"] / stock[_shape(f.row)].row.metrics["both_ms"], f)
            for f in _of(found, "speed/attention", fix) if _shape(f.row) in stock
        ]  # fmt: skip
        if pairs:
            ratio, f = max(pairs, key=lambda pair: pair[0])
            parts.append(f"{fix} ×{ratio:.2f}")
            first = first or f
    return Cell(", ".join(parts), "measured", first) if parts else Cell(NOT_MEASURED)


def _shape(row: Row) -> str:
    return repr((implementation(row), row.dtype, row.seeds, sorted(row.params.items())))
