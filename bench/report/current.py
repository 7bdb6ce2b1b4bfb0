"""Which rows a report shows: the newest of each machine; older runs are counted, stale ones set apart.

A machine may have sent a row more than once: with two configs, or again after a while. The newest stands
for it, and the others say how reproducible it is: `3 of 3 runs agree` bit for bit. Rows of an older
version of their case are stale: they are listed, and never mixed with today's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.check.stale import is_stale
from bench.files.load import Found
from bench.files.records import Row

CURRENT, OLDER, STALE = "current", "older run", "stale"


class Entry(NamedTuple):
    """What decides a row's state."""

    unit: object  # machine and row key: equal for repetitions of one unit
    written: str  # ISO time of its file
    bits: object  # digests of all outputs; None where there are none
    stale: bool


class State(NamedTuple):
    """`agree` of `runs` runs of this unit gave the newest run's bits; 0 where a row has no digests."""

    state: str
    agree: int
    runs: int


def entry(row: Row, machine: str, written: str) -> Entry:
    """A row's entry; digests of inputs are no output."""
    outputs = tuple(sorted((k, v) for k, v in row.digests.items() if k != "inputs"))
    return Entry((machine, row.key), written, outputs or None, is_stale(row))


def states(entries: Sequence[Entry]) -> list[State]:
    """The state of every entry, in their order."""
    units: dict[object, list[int]] = {}
    found = [State(STALE, 0, 1)] * len(entries)
    for number, item in enumerate(entries):
        if not item.stale:
            units.setdefault(item.unit, []).append(number)
    for numbers in units.values():
        newest = max(numbers, key=lambda n: (entries[n].written, n))
        bits = entries[newest].bits
        agree = 0 if bits is None else sum(entries[n].bits == bits for n in numbers)
        for number in numbers:
            found[number] = State(CURRENT if number == newest else OLDER, agree, len(numbers))
    return found


@dataclass
class Current:
    """Rows by state; `repeated` counts units that several runs measured, `agreeing` those that agree."""

    rows: list[Found] = field(default_factory=list)
    older: list[Found] = field(default_factory=list)
    stale: list[Found] = field(default_factory=list)
    states: dict[tuple[int, int], State] = field(default_factory=dict)  # by id of file, row's index
    repeated: int = 0
    agreeing: int = 0

    def state(self, found: Found) -> State:
        return self.states[id(found.loaded), found.index]


def current(found: Sequence[Found]) -> Current:
    """Sort the rows of all files by their state."""
    entries = [entry(f.row, f.machine, f.written) for f in found]
    result = Current()
    for f, state in zip(found, states(entries), strict=True):
        place = {CURRENT: result.rows, OLDER: result.older, STALE: result.stale}[state.state]
        place.append(f)
        result.states[id(f.loaded), f.index] = state
        if state.state == CURRENT and state.runs > 1 and state.agree:
            result.repeated += 1
            result.agreeing += state.agree == state.runs
    return result
