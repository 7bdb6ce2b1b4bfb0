"""DESIGN.md and README done literally: each thing that they say how to add is added to a copy, and runs.

A block of code begins with the file that it is: `# cases/bias/mine.py`, or with its place in a file that is
there: `# cases/__init__.py, in CASES` (a table), or `# …, instead of` a line.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT

BLOCK = re.compile(
    r"^```python\n# (\S+\.py)(?:, in (\w+)|, instead of `([^\n]+)`)?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
CONFIG = """\
version: 1
name: mine
backends: [{backend}]
kernels: ["{kernel}"]
seeds: 2
cases:
  - case: {case}
"""


def section(page: str, heading: str) -> str:
    """The text under a heading, to the next one."""
    text = (ROOT / page).read_text()
    found = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no heading '{heading}'"
    return found[1]


def follow(text: str, checkout: Path) -> None:
    """Do what the blocks say."""
    blocks = BLOCK.findall(text)
    assert blocks
    for name, table, line, code in blocks:
        path = checkout / name
        if not table and not line:
            assert not path.exists(), f"{name} is there already"
            path.write_text(code)
            continue
        lines = path.read_text().splitlines(keepends=True)
        if line:
            (at,) = (number for number, old in enumerate(lines) if old.strip() == line)
            lines[at] = code
        else:
            (at,) = (number for number, old in enumerate(lines) if old.startswith(f"{table}: "))
            if lines[at + 2].startswith("    for "):  # { x.name: x for x in (
                at += 2
            lines.insert(at + 1, code)
        path.write_text("".join(lines))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the suite's own code."""
    copy = tmp_path / "checkout"
    for name in ("bench", "cases", "backends", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "runner.py", copy)
    return copy


def runner(checkout: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "runner.py", *arguments, "--json"], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def measure(checkout: Path, **chosen: str) -> list[dict[str, Any]]:
    """The rows of a run of one case on the kernels of a glob; the file must be valid too."""
    (checkout / "mine.yaml").write_text(CONFIG.format(**chosen))
    ran = runner(checkout, "run", "mine.yaml")
    assert runner(checkout, "validate", ran["path"]) == {ran["path"]: []}
    return list(ran["rows"])


@pytest.mark.parametrize(("page", "heading"), [("README.md", "Add your own"), ("DESIGN.md", "A case")])
def test_a_case(checkout: Path, page: str, heading: str) -> None:
    follow(section(page, heading), checkout)
    (listed,) = (case for case in runner(checkout, "list")["cases"] if case["name"] == "bias/mine")
    assert listed["question"].endswith("?")
    (row,) = measure(checkout, backend="cpu", kernel="eager-fused/stock", case="bias/mine")
    assert row["status"] == "ok", row["reason"]
    assert row["verdict"]
    assert {"inputs", "o"} <= row["digests"].keys()


def test_a_kernel(checkout: Path) -> None:
    follow(section("DESIGN.md", "A kernel"), checkout)
    assert "mine/stock" in {kernel["kernel"] for kernel in runner(checkout, "list")["kernels"]}
    (row,) = measure(checkout, backend="cpu", kernel="mine/*", case="bias/tie_break")
    assert (row["status"], row["verdict"]) == ("ok", "pass"), row["reason"]


def test_a_fix(checkout: Path) -> None:
    follow(section("DESIGN.md", "A fix"), checkout)
    rows = measure(checkout, backend="cpu", kernel="eager-*/mine", case="bias/leak")
    assert {row["kernel"] for row in rows} == {"eager-stored/mine", "eager-fused/mine", "eager-ladder/mine"}
    assert {row["status"] for row in rows} == {"ok"}


def test_a_backend(checkout: Path) -> None:
    follow(section("DESIGN.md", "A backend"), checkout)
    assert "mine" in {
        backend["name"] for backend in runner(checkout, "list")["backends"] if backend["available"]
    }
    rows = measure(checkout, backend="mine", kernel="eager-fused/*", case="bias/shift_range")
    assert {row["backend"] for row in rows} == {"mine"}
    assert {row["status"] for row in rows} == {"ok"}
