"""How a case wants its rows to be shown: one metric, and what stands beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.files.records import Row
from cases import known_case


@dataclass(frozen=True)
class Headline:
    """The metric that reports show: its name, what it says, how it is written, its standard error."""

    metric: str
    label: str  # with the unit
    form: str = "{:+.3f}"
    sem: str | None = None
    worst: Literal["high", "low"] = "high"  # which end of |value| a summary shows


def headline(row: Row) -> Headline | None:
    """How a row's case wants to be shown; None for a case that this version does not know."""
    case = known_case(row.case)
    return case.headline if case else None


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
