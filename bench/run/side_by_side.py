"""Units side by side in processes of their own, for runs of many small ones (`run --jobs N`).

Every unit is measured as in a serial run, in an interpreter that knows only the unit's names. What is
timed is never run beside anything else: the engine measures that alone, afterwards.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from bench.files.records import Row
from bench.run.plan import Unit
from cases import load_case
from cases.base import LongCase

Measure = Callable[[Unit], Row]


def may_share(unit: Unit) -> bool:
    """False for a unit whose result is a time, and for one that keeps checkpoints and reports progress."""
    case = load_case(unit.case)
    return not (case.timed or isinstance(case, LongCase))


def measure_side_by_side(
    units: Sequence[Unit], jobs: int, measure: Measure
) -> Generator[tuple[Unit, Row], None, None]:
    """(unit, row) as they finish, in any order. `measure` is a module's function, for pickling.

    Raises what a worker raised, and once all that finished are out `BrokenProcessPool` if one was killed.
    """
    killed: BrokenProcessPool | None = None
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    with ProcessPoolExecutor(jobs, context, initializer=_ignore_interrupts) as pool, _ended():
        futures = {pool.submit(measure, unit): unit for unit in units}
        for future in as_completed(futures):
            try:
                row = future.result()
            except BrokenProcessPool as error:
                killed = error
                continue
            yield futures[future], row
    if killed is not None:
        raise killed


@contextmanager
def _ended() -> Iterator[None]:
    """Workers do not outlive an interrupted run: their unit is lost, as in a serial run."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for worker in set(multiprocessing.active_children()) - before:
            worker.terminate()
        raise


def _ignore_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal; the parent ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
