"""The answer table: machine × (is stock biased? does it leak? does it crash? which fix holds? at what cost?).

Every cell comes from the machine's current rows and leads to the one it quotes. What was not measured
says so; nothing is inferred.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.files.load import Found
from bench.files.records import Row
from bench.report.select import is_told, sick_rows, subject_of, told, training_groups, varied
from bench.report.tables import Cell, Table, is_fine
from cases.base import Subject
from cases.crash.runs import TrainingRun

QUESTIONS = (
    "is stock biased?",
    "does its δ error leak?",
    "does training crash?",
    "which fix holds?",
    "what does a fix cost?",
)
NOT_MEASURED = "not measured"
NOTE = (
    "One line a machine and backend. Bias: BF16, two equal row maxima (bias/tie_break, gap 12), mean error"
    " of O in ulps. Leak: rowsum(dS), exactly 0 in exact arithmetic (bias/leak, gap 12). Crash: training of"
    " crash/ladder with P̄ and O in M mantissa bits. Fix, yes: holds wherever it was tried; in part: in some"
    " implementations only, or stable by its loss but sick (row maxima over 10 × the healthiest run's)."
    " Tried: on the same kernel, and on the same training (implementation, M, dtype, model, seed) to the"
    " step of stock's explosion or further. Cost: time of forward and backward"
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
SUBJECTS: tuple[Subject, ...] = ("bias", "leak", "crash", "cost")  # what the questions are answered from


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
    return subject_of(row) in SUBJECTS and is_told(row)


def _biased(found: Sequence[Found]) -> Cell:
    rows = varied(told(found, "bias", "stock"))
    return _split(rows, "aligned_ulp_mean", "{:+.2f} ulp", "biased")


def _leaks(found: Sequence[Found]) -> Cell:
    return _split(told(found, "leak", "stock"), "leak_mean", "{:+.0e}", "leaking")


def _split(rows: list[Found], metric: str, form: str, word: str) -> Cell:
    """`2 of 4: sdpa-flash +0.18 ulp, …` with the largest first; leads to the largest.

    A kernel counts once, with its worst row.
    """
    if not rows:
        return Cell(NOT_MEASURED)
    kernels: dict[str, Found] = {}
    for f in sorted(rows, key=lambda f: (is_fine(f.row.verdict), -abs(f.row.metrics[metric]))):
        kernels.setdefault(f.row.implementation, f)
    bad = {name: f for name, f in kernels.items() if not is_fine(f.row.verdict)}
    if not bad:
        return Cell(f"no, none of {len(kernels)} kernels", "pass", rows[0])
    named = ", ".join(f"{name} {form.format(f.row.metrics[metric])}" for name, f in bad.items())
    worst = next(iter(bad.values()))
    return Cell(f"{word}: {len(bad)} of {len(kernels)}: {named}", worst.row.verdict, worst)


def _crashes(found: Sequence[Found]) -> Cell:
    """Stock by mantissa bits: `yes at M=1: step 1082 to 1278 (3 of 3 runs); no at M=2 to step 1500`."""
    lines = [
        (group, label, [run for run in group.runs if run.label == label])
        for group in training_groups(found)
        for label in dict.fromkeys(run.label for run in group.runs if run.is_stock)
    ]
    if not lines:
        return Cell(NOT_MEASURED)
    parts = []
    for group, label, runs in lines:
        bits = sorted({run.bits for run in runs})
        told = "; ".join(_crash(f"at M={m}", [run for run in runs if run.bits == m]) for m in bits)
        several = ", ".join(x for x in (label, group.dtype, group.shape) if x)
        parts.append(f"{several}: {told}" if len(lines) > 1 else told)
    stock = [run for _, _, runs in lines for run in runs]
    worst = next((run for run in stock if run.exploded), stock[0])
    return Cell("; ".join(parts), worst.row.verdict, worst.found)


def _crash(at: str, runs: Sequence[TrainingRun]) -> str:
    steps = sorted(run.step for run in runs if run.exploded)
    if not steps:
        last = min(run.step for run in runs)
        return f"no {at} to step {last:.0f} ({len(runs)} run{'s'[: len(runs) != 1]})"
    span = f"{steps[0]:.0f}" if len(steps) == 1 else f"{steps[0]:.0f} to {steps[-1]:.0f}"
    return f"yes {at}: step {span} ({len(steps)} of {len(runs)} run{'s'[: len(runs) != 1]})"


Place = tuple[object, ...]  # the subject, then what a fix and the stock that it is held against share


@dataclass(frozen=True)
class Outcome:
    """A row that leaked or exploded, or did not."""

    found: Found
    place: Place
    failed: bool
    step: float = 0.0  # of the explosion, or trained for
    sick: bool = False  # stable, with row maxima far beyond those of the healthiest run

    @property
    def fix(self) -> str:
        return self.found.row.fix


def _outcomes(found: Sequence[Found]) -> list[Outcome]:
    """Leaks by kernel; trainings by model (size and dtype), implementation, M and seed."""
    leaks = [
        Outcome(f, ("leak", f.row.implementation), not is_fine(f.row.verdict)) for f in told(found, "leak")
    ]
    runs, models = [], training_groups(found)
    sick = sick_rows(models)
    for model, group in enumerate(models):
        for run in group.runs:
            place = ("crash", model, run.row.implementation, run.bits, run.seed)
            runs.append(Outcome(run.found, place, run.exploded, run.step, id(run.row) in sick))
    return leaks + runs


def _holds(found: Sequence[Found]) -> Cell:
    """Fixes that hold where stock leaks or explodes, fixes that hold in part, and the rest."""
    outcomes = _outcomes(found)
    failing: dict[Place, float] = {}  # with the step that a fix must get past
    for stock in outcomes:
        if stock.fix == "stock" and stock.failed:
            failing[stock.place] = max(stock.step, failing.get(stock.place, 0.0))
    answers: dict[str, list[str]] = {"yes": [], "in part": [], "no": []}
    best: tuple[str, Found] | None = None  # the answer and row that the cell leads to
    for fix in FIXES:
        tried = [
            o
            for o in outcomes
            if o.fix == fix and o.place in failing and (o.failed or o.step >= failing[o.place])
        ]
        if not tried:
            continue
        bad = [o.found for o in tried if o.failed]
        good = {o.found.row.implementation for o in tried} - {f.row.implementation for f in bad}
        sick = sum(o.sick for o in tried)
        answer = "yes" if not bad and not sick else "in part" if good else "no"
        told = [_failures(bad)] if bad else []
        told += [f"stable but sick in {sick} run{'s'[: sick != 1]}"] if sick else []
        answers[answer].append(f"{fix} ({'; '.join([*told, _tried(tried, failing)])})")
        if best is None or (answer == "yes" and best[0] != "yes"):
            best = answer, tried[0].found
    if best is None:
        return Cell(NOT_MEASURED)
    text = "; ".join(f"{answer}: {', '.join(fixes)}" for answer, fixes in answers.items() if fixes)
    return Cell(text, "pass" if best[0] == "yes" else best[1].row.verdict, best[1])


def _tried(tried: Sequence[Outcome], failing: Iterable[Place]) -> str:
    """`tried on 3 of 7 leaking kernels, 1 of 9 exploded runs`: of all places where stock failed."""
    places = {outcome.place for outcome in tried}
    parts = []
    for subject, word in (("leak", "leaking kernel"), ("crash", "exploded run")):
        of = [place for place in failing if place[0] == subject]
        if of:
            own = len(places.intersection(of))
            parts.append(f"{own} of {len(of)} {word}{'s'[: len(of) != 1]}")
    return "tried on " + ", ".join(parts)


def _failures(bad: Sequence[Found]) -> str:
    """`leaks in eager-stored, eager-fused`"""
    places: dict[str, list[str]] = {}
    for f in bad:
        names = places.setdefault(f.row.verdict.partition("@")[0], [])
        if f.row.implementation not in names:
            names.append(f.row.implementation)
    return "; ".join(f"{verdict} in {', '.join(names)}" for verdict, names in places.items())


def _cost(found: Sequence[Found]) -> Cell:
    """Largest time ratio of each fix over stock of the same implementation, shape and dtype."""
    stock = {_shape(f.row): f for f in told(found, "cost", "stock")}
    parts: list[str] = []
    first: Found | None = None
    for fix in FIXES:
        pairs = [
            (f.row.metrics["both_ms"] / stock[_shape(f.row)].row.metrics["both_ms"], f)
            for f in told(found, "cost", fix)
            if _shape(f.row) in stock
        ]
        if pairs:
            ratio, f = max(pairs, key=lambda pair: pair[0])
            parts.append(f"{fix} ×{ratio:.2f}")
            first = first or f
    return Cell(", ".join(parts), "measured", first) if parts else Cell(NOT_MEASURED)


def _shape(row: Row) -> str:
    return repr((row.implementation, row.dtype, row.seeds, sorted(row.params.items())))
