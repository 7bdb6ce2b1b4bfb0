"""Training runs from rows, in groups that may be put side by side: one machine, one model, one recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from bench.files.labels import kernel_labels
from bench.files.load import Found
from bench.files.records import Row
from bench.measure.numerics import FORMATS

NOT_THE_SIZE = (
    "seed",
    "steps",
    "log_every",
    "stop_after_explosion",
)  # two runs may differ in these


@dataclass(frozen=True)
class TrainingRun:
    """One run: the step at which it exploded, or the steps that it stayed stable for."""

    found: Found
    label: str  # kernel and its varying options, without M
    bits: int  # M

    @property
    def row(self) -> Row:
        return self.found.row

    @property
    def exploded(self) -> bool:
        return self.row.verdict.startswith("exploded")

    @property
    def step(self) -> float:
        """Of the explosion; for a censored run the steps that it was trained for."""
        return self.row.metrics["crash_step" if self.exploded else "steps_run"]

    @property
    def seed(self) -> int:
        return int(str(self.row.params["seed"]))

    @property
    def is_stock(self) -> bool:
        return self.row.is_stock

    @property
    def name(self) -> str:
        return f"{self.label} M={self.bits} seed {self.seed}"


@dataclass(frozen=True)
class Group:
    """Runs of one machine that differ in kernel, M, seed and length alone."""

    machine: str
    backend: str
    dtype: str
    size: dict[str, object]
    runs: list[TrainingRun]

    @property
    def shape(self) -> str:
        """`3 layers, width 64, batch 4`"""
        parts = [f"{self.size[name]} layers" for name in ("layers",) if name in self.size]
        parts += [f"{name} {self.size[name]}" for name in ("width", "batch") if name in self.size]
        return ", ".join(parts)

    @property
    def title(self) -> str:
        return " · ".join(x for x in (self.machine, self.backend, self.dtype, self.shape) if x)

    def labels(self) -> list[str]:
        return list(dict.fromkeys(run.label for run in self.runs))

    def bits(self) -> list[int]:
        return sorted({run.bits for run in self.runs})

    def runs_at(self, label: str, bits: int) -> list[TrainingRun]:
        """The runs of one kernel at one M, by seed."""
        chosen = [run for run in self.runs if run.label == label and run.bits == bits]
        return sorted(chosen, key=lambda run: run.seed)


def groups(found: Sequence[Found]) -> list[Group]:
    """The finished runs of one case by machine and size, in order of appearance."""
    by_size: dict[str, list[Found]] = {}
    for f in found:
        if f.row.status == "ok" and is_complete(f.row):
            key = repr((f.machine, f.row.backend, f.row.dtype, sorted(_size(f.row).items())))
            by_size.setdefault(key, []).append(f)
    return [_group(members) for members in by_size.values()]


def _group(found: Sequence[Found]) -> Group:
    longest: dict[str, Found] = {}
    for f in found:  # the same training in two files is one run
        key = repr((f.row.kernel, sorted(f.row.options.items(), key=str), f.row.params["seed"]))
        if key not in longest or _says_more(f.row, longest[key].row):
            longest[key] = f
    kept = sorted(longest.values(), key=lambda f: _rank(f.row))
    labels = kernel_labels([_without_bits(f.row) for f in kept])
    runs = [TrainingRun(f, label, mantissa_bits(f.row)) for f, label in zip(kept, labels, strict=True)]
    first = found[0]
    return Group(first.machine, first.row.backend, first.row.dtype, _size(first.row), runs)


def _rank(row: Row) -> tuple[bool, bool]:
    """Stock first, the ladder's own kernel before others."""
    return not row.is_stock, row.implementation != "eager-ladder"


def is_complete(row: Row) -> bool:
    """Whether the row has what the tables read; files are shown before they are validated."""
    bits = row.options.get("mantissa_bits", 0)
    numbers = (row.params.get("seed"), row.params.get("warmup", 0), 0 if bits is None else bits)
    lengths = {len(curve) for curve in row.series.values()}
    return (
        all(type(number) is int for number in numbers)  # a bool is none
        and row.metrics.keys() >= {"crash_step", "steps_run", "best_loss"}
        and (not row.series or (len(lengths) == 1 and {"step", "loss"} <= row.series.keys()))
    )


def _size(row: Row) -> dict[str, object]:
    return {name: value for name, value in row.params.items() if name not in NOT_THE_SIZE}


def _says_more(row: Row, other: Row) -> bool:
    def rank(r: Row) -> tuple[bool, float]:
        return r.verdict.startswith("exploded"), r.metrics["steps_run"]

    return rank(row) > rank(other)


def _without_bits(row: Row) -> Row:
    options = {name: value for name, value in row.options.items() if name != "mantissa_bits"}
    return row.model_copy(update={"options": options})


def mantissa_bits(row: Row) -> int:
    """M of P̄ and O: the kernel's option, or what the dtype stores."""
    chosen = row.options.get("mantissa_bits")
    return FORMATS[getattr(torch, row.dtype)].mantissa_bits if chosen is None else int(str(chosen))


def median_step(runs: Iterable[TrainingRun]) -> float | None:
    """The median step of explosion, a censored run counting as later than all; None if it is one."""
    runs = list(runs)
    steps = sorted(run.step if run.exploded else math.inf for run in runs)
    middle = median(steps) if steps else math.inf
    known = all(run.exploded or run.step >= middle for run in runs)
    return middle if math.isfinite(middle) and known else None
