"""From a config to the list of units. The plan depends on the config and on the kernels offered alone.

So a reader of a submission can redo it: the file holds the config's text and the kernels that the
machine offered.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from backends.base import Backend
from backends.names import KNOWN_KERNELS
from bench.errors import UsageError, explain, nearest
from bench.files.records import MAX_ROWS, DTypeName, Machine, Offered, Row, Scalar, row_key, unit_id
from bench.run.config import CaseEntry, Config
from cases import load_case

MAX_UNITS = MAX_ROWS
MAX_VALUES = 2**27  # random values of one unit: anyone must be able to make the inputs again


@dataclass(frozen=True)
class Unit:
    """Case × parameters × kernel (with options) × dtype on one backend: one row of the result."""

    case: str
    case_version: int
    kernel: str
    backend: str
    dtype: str
    params: dict[str, Scalar]
    options: dict[str, Scalar]
    seeds: int
    kernel_version: int = 1

    @property
    def key(self) -> str:
        return row_key(self)


@dataclass(frozen=True)
class Request:
    """What a user asked for."""

    config: Path
    results: Path
    backend: str | None = None  # globs
    kernel: str | None = None
    case: str | None = None
    unit: str | None = None  # id of one unit
    only: Sequence[str] = ()  # key=value of a parameter or option
    force: bool = False
    jobs: int = 1  # units side by side


@dataclass
class PlannedRun:
    """A planned run: what will be measured, on what, into which file."""

    config: Config
    text: str
    backends: list[Backend]
    machine: Machine
    offered: list[Offered]
    plan: list[Unit]  # everything the config asks for
    units: list[Unit]  # what the filters leave of it
    path: Path
    jobs: int = 1
    rows: dict[str, Row] = field(default_factory=dict)  # by key; from an earlier run or this one
    redo: set[str] = field(default_factory=set)  # keys to measure again; kept until they are
    notes: list[str] = field(default_factory=list)  # for the user: files set aside, …

    @property
    def todo(self) -> list[Unit]:
        return [u for u in self.units if u.key not in self.rows or u.key in self.redo]

    def selected_rows(self) -> list[Row]:
        return [self.rows[unit.key] for unit in self.units if unit.key in self.rows]

    def work_folder(self, unit: Unit) -> Path:
        """Where a long unit keeps its checkpoints; hidden, beside the result file."""
        name = f"{unit.kernel}-{unit.dtype}".replace("/", "-")
        key = hashlib.sha256(unit.key.encode()).hexdigest()[:8]
        return self.path.parent / f".{self.config.name}.work" / f"{name}-{key}"


def make_plan(config: Config, offered: Sequence[Offered]) -> list[Unit]:
    """Every unit of `config` for the offered kernels, in the order in which they run.

    A case's parameter points come before kernels, so that kernels share one set of inputs. Raises
    UsageError with the key path for whatever the config gets wrong.
    """
    _check_backends(config, offered)
    _select(config.kernels, offered, "kernels")
    units: dict[str, Unit] = {}
    asked = 0  # before equal units are merged
    for number, entry in enumerate(config.cases):
        where = f"cases[{number}]"
        case = _within(f"{where}.case", lambda entry=entry: load_case(entry.case))  # type: ignore[misc]
        kernels = _select(entry.kernels or config.kernels, offered, f"{where}.kernels")
        if not kernels:
            continue  # none of them runs here; elsewhere one may
        _check_options(entry, kernels, f"{where}.options")
        seeds = entry.seeds or config.seeds
        params = _lists(entry.params, f"{where}.params")
        options = _lists(entry.options, f"{where}.options")
        size = _size(params) * _size(options) * len(kernels)
        asked += size
        if asked > MAX_UNITS:
            raise UsageError(f"{where}: {asked} units up to here; a config has at most {MAX_UNITS}")
        for point in _product(params):
            dtype = point.pop("dtype", "bfloat16")
            if dtype not in get_args(DTypeName):
                raise UsageError(f"{where}.params.dtype: '{dtype}'{nearest(str(dtype), get_args(DTypeName))}")
            try:
                params_model = case.Params.model_validate(point)
                full = params_model.recorded()
            except ValidationError as error:
                raise UsageError(f"{where}.params: {explain(error, case.Params)}") from error
            if (values := case.values(params_model) * seeds) > MAX_VALUES:
                raise UsageError(f"{where}: {values} input values a unit, at most {MAX_VALUES}")
            for kernel in kernels:
                for chosen in _product({k: v for k, v in options.items() if k in kernel.options}):
                    unit = Unit(
                        entry.case,
                        case.version,
                        kernel.kernel,
                        kernel.backend,
                        dtype,
                        full,
                        kernel.options | chosen,
                        seeds,
                        kernel.kernel_version,
                    )
                    units.setdefault(unit.key, unit)
    if not units:
        raise UsageError(f"kernels: none of {_patterns(config)} is available on this machine")
    return list(units.values())


def _patterns(config: Config) -> list[str]:
    return list(dict.fromkeys(p for e in config.cases for p in e.kernels or config.kernels))


def filter_units(
    units: Iterable[Unit],
    backend: str | None,
    kernel: str | None,
    case: str | None,
    only: Sequence[str] = (),
    unit: str | None = None,
) -> list[Unit]:
    """The units that match every given glob and every `key=value` of `only` (a parameter or an option), or
    the one with the id `unit`; UsageError names the filter that leaves nothing."""
    left = list(units)
    if unit is not None:
        left = [item for item in left if unit_id(item) == unit]
        if not left:
            raise UsageError(f"--unit {unit}: no unit of this config on this machine has this id")
    for flag, pattern in (("backend", backend), ("kernel", kernel), ("case", case)):
        if pattern is None:
            continue
        names = {getattr(unit, flag) for unit in left}
        left = [unit for unit in left if fnmatch.fnmatchcase(getattr(unit, flag), pattern)]
        if not left:
            raise UsageError(f"--{flag} '{pattern}' matches no unit{nearest(pattern, names)}")
    for condition in only:
        left = _matching(left, condition)
    return left


def _matching(units: Sequence[Unit], condition: str) -> list[Unit]:
    """The units whose parameter or option has one of the values of `key=value,value`."""
    key, equals, values = condition.partition("=")
    if not equals:
        raise UsageError(f"--only '{condition}': expected key=value, as in seed=0")
    having = [(u, (u.params | u.options)[key]) for u in units if key in u.params | u.options]
    if not having:
        known = {name for u in units for name in u.params | u.options}
        raise UsageError(f"--only {key}: no unit has it{nearest(key, known)}")
    wanted = values.split(",")
    left = [unit for unit, value in having if any(_writes(value, text) for text in wanted)]
    if not left:
        found = ", ".join(sorted({str(value) for _, value in having}))
        raise UsageError(f"--only {condition}: no unit; the values are {found}")
    return left


def _writes(value: Scalar, text: str) -> bool:
    """Whether `text` writes `value`: numbers in any form, true and false in any case."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).lower() == text.lower()
    try:
        return value == float(text)
    except ValueError:
        return False


def _within(where: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _check_backends(config: Config, offered: Sequence[Offered]) -> None:
    if not offered:
        raise UsageError("backends: none of this config's backends offers a kernel here")


def _select(patterns: Sequence[str], offered: Sequence[Offered], where: str) -> list[Offered]:
    """Offered kernels that match any pattern and no pattern after a `!`, in the offered order.

    A misspelt pattern is refused.
    """
    names = [item.kernel for item in offered]
    for pattern in (p.removeprefix("!") for p in patterns):
        known = {*names, *KNOWN_KERNELS}
        if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
            raise UsageError(f"{where}: unknown kernel '{pattern}'{nearest(pattern, known)}")
    wanted = [p for p in patterns if not p.startswith("!")]
    refused = [p.removeprefix("!") for p in patterns if p.startswith("!")]

    def matches(item: Offered, globs: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(item.kernel, glob) for glob in globs)

    return [o for o in offered if matches(o, wanted) and not matches(o, refused)]


def _check_options(entry: CaseEntry, kernels: Sequence[Offered], where: str) -> None:
    known = {name for kernel in kernels for name in kernel.options}
    for name in entry.options:
        if name not in known:
            raise UsageError(f"{where}.{name}: no selected kernel has this option{nearest(name, known)}")


def _lists(values: dict[str, Any], where: str) -> dict[str, list[Any]]:
    """Every value as a list of distinct scalars."""
    lists: dict[str, list[Any]] = {}
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        if not items:
            raise UsageError(f"{where}.{name}: an empty list leaves nothing to run")
        for item in items:
            if not isinstance(item, bool | int | float | str | None):
                raise UsageError(f"{where}.{name}: a {type(item).__name__}, expected plain values")
        lists[name] = list({repr(item): item for item in items}.values())
    return lists


def _size(lists: dict[str, list[Any]]) -> int:
    size = 1
    for items in lists.values():
        size *= len(items)
    return size


def _product(lists: dict[str, list[Any]]) -> Iterable[dict[str, Any]]:
    for combination in itertools.product(*lists.values()):
        yield dict(zip(lists, combination, strict=True))
