"""Find and read the result files of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.errors import UsageError
from bench.files.records import Row, Submission
from bench.files.store import BadFile, read_submission


@dataclass(frozen=True)
class Loaded:
    """One readable submission, with the line of each row in its file (for links)."""

    path: Path
    submission: Submission
    first_row_line: int

    @property
    def machine(self) -> str:
        """Its folder's name. Several processes add in another order: they are another machine."""
        machine = self.submission.machine
        counts = [facts.get("processes") for facts in machine.backends.values()]
        several = max((n for n in counts if isinstance(n, int)), default=1)
        return machine.slug if several <= 1 else f"{machine.slug}, {several} processes"

    def line_of(self, index: int) -> int:
        return self.first_row_line + index


@dataclass(frozen=True)
class LeftOut:
    """A file that is no submission, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Found:
    """A row with where it stands; `loaded` is None for a run that is still in memory."""

    row: Row
    loaded: Loaded | None
    index: int

    @property
    def machine(self) -> str:
        return self.loaded.machine if self.loaded else ""

    @property
    def written(self) -> str:
        return str(self.loaded.submission.volatile.get("written", "")) if self.loaded else ""

    @property
    def file(self) -> str:
        return self.loaded.path.name if self.loaded else ""


def submission_files(path: Path) -> list[Path]:
    """The result files at `path`: itself, or `<machine>/<config>.json` below a results folder."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"{path}: no such file or directory")
    return sorted(p for p in path.rglob("*.json") if not p.name.startswith("."))


def read_each(paths: Sequence[Path], strict: bool = True) -> Iterator[Loaded | LeftOut]:
    """The files at `paths` one by one, each once: no more than one is in memory, unless the caller keeps it.

    Args: strict: as of `read_submission`. Raises UsageError for a path that does not exist.
    """
    for file in dict.fromkeys(file for path in paths for file in submission_files(path)):
        try:
            submission, text = read_submission(file, strict)
        except BadFile as problem:
            yield LeftOut(file, str(problem))
            continue
        yield Loaded(file, submission, text[: text.find('"rows": [')].count("\n") + 2)


def load_all(paths: Sequence[Path]) -> tuple[list[Loaded], list[str]]:
    """Every readable submission at `paths`, and a line for every file that is not one."""
    loaded, problems = [], []
    for item in read_each(paths):
        if isinstance(item, Loaded):
            loaded.append(item)
        else:
            problems.append(f"{item.path}: {item.reason}")
    return loaded, problems


def all_rows(loaded: list[Loaded]) -> list[Found]:
    """Every row of every submission, in file order."""
    return [Found(row, item, i) for item in loaded for i, row in enumerate(item.submission.rows)]
