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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout of its own with the files of this one as they are now."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    copy = tmp_path / "checkout"
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():  # not one that is deleted, and not yet committed
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
    (training, *_) = committed_results("results/*/ladder-cpu.json")
    text = training.read_text().replace('"name": "ladder-cpu"', '"name": "quick"')
    text = text.replace(f'"slug": "{training.parent.name}"', '"slug": "aaa"')
    (folder / "quick.json").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *READERS],
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
