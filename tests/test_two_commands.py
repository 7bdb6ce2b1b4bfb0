"""README's two commands in a row: what `make run` leaves in results/ is nothing to `make test`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, committed_results, needs_git

# The reader of results/ that a first run used to break.
READERS = ("tests/bench/report/test_page.py::test_a_row_opens_with_its_file_and_the_command_that_repeats_it",)

TRAINING = next(iter(committed_results("results/*/ladder-cpu.json")), Path())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout of its own with the files of this one as they are now, of the results one alone."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    copy = tmp_path / "checkout"
    for name in listed.stdout.splitlines():
        kept = not name.startswith("results/") or (ROOT / name) == TRAINING
        if kept and (ROOT / name).is_file():  # not one that is deleted, and not yet committed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=copy, check=True)
    return copy


@needs_git
def test_a_first_run_changes_no_test(checkout: Path) -> None:
    """A machine whose folder comes before all committed ones, with rows of the cases that tests look at."""
    folder = checkout / "results" / "aaa"
    folder.mkdir()
    text = TRAINING.read_text().replace('"name": "ladder-cpu"', '"name": "quick"')
    text = text.replace(f'"slug": "{TRAINING.parent.name}"', '"slug": "aaa"')
    (folder / "quick.json").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *READERS],
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "skipped" in done.stdout.lower():
        pytest.skip("the page needs playwright and a Chromium")
