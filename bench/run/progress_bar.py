"""What a run says while it goes on: a bar on a terminal, lines elsewhere. A `Watcher` of the engine."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bench.files.records import Row
from bench.run.plan import Unit


class ProgressBar:
    """A bar with ETA on a terminal; elsewhere a line every tenth of the run."""

    def __init__(self, units: int, messages: Console):
        self.total, self.done, self.messages = units, 0, messages
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=messages,
            disable=not messages.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("", total=self.total)

    def started(self, unit: Unit) -> None:
        self.bar.update(self.task, description=f"{unit.case} {unit.kernel}")

    def said(self, text: str) -> None:
        self.bar.console.print(text)

    def finished(self, unit: Unit, row: Row) -> None:
        self.done += 1
        self.bar.advance(self.task)
        if row.status == "error":
            self.bar.console.print(f"error: {unit.case} {unit.kernel}: {row.reason}")
        step = max(1, self.total // 10)
        if not self.messages.is_terminal and (self.done % step == 0 or self.done == self.total):
            self.messages.print(f"{self.done}/{self.total} {unit.case} {unit.kernel}")
