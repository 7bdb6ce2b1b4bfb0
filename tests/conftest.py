"""Shared pieces: a config that runs in a second, and a finished run of it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.ascend import unavailable_reason
from bench.files.records import Row
from bench.run.engine import execute, prepare
from bench.run.plan import PlannedRun, Request, Unit

TINY = """\
# Nine units, one second.
version: 1
name: tiny
kernels: ["eager-fused/*", "sdpa-math/*"]
seeds: 1
cases:
  - case: bias/shift_range
"""


ROOT = Path(__file__).resolve().parent.parent


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def committed_results(pattern: str = "results/*.json") -> list[Path]:
    """The result files under version control. What a run left in results/ (`make run` does) is this
    machine's own: no test reads it. Empty outside a git checkout, and where there is no git."""
    if shutil.which("git") is None:
        return []
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.splitlines()]


class Quiet:
    """A watcher that only counts; `stop_at` interrupts the run as Ctrl-C would."""

    def __init__(self, stop_at: int | None = None):
        self.stop_at, self.count = stop_at, 0

    def started(self, unit: Unit) -> None:
        if self.count == self.stop_at:
            raise KeyboardInterrupt
        self.count += 1

    def finished(self, unit: Unit, row: Row) -> None:
        pass

    def said(self, text: str) -> None:
        pass


@pytest.fixture
def tiny_config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


RunIt = Callable[..., PlannedRun]


@pytest.fixture
def run_tiny(tiny_config: Path, tmp_path: Path) -> RunIt:
    """Run the tiny config (again) into tmp_path/results; keyword arguments go to the request."""

    def run_it(watcher: Quiet | None = None, config: Path = tiny_config, **request: object) -> PlannedRun:
        asked = Request(config, tmp_path / "results", **request)  # type: ignore[arg-type]
        run = prepare(asked)
        execute(run, asked, watcher or Quiet())
        return run

    return run_it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("requires_npu") and (reason := unavailable_reason()):
            item.add_marker(pytest.mark.skip(reason=f"not run: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What needs torch_npu or an NPU and did not run is said at the end, with the reason."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        if "tests/ascend/" in report.nodeid and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"tests/ascend: {count} skipped: {reason}")
