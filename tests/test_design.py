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
backends: [cpu, mine]
seeds: 2
kernels: ["mine/stock", "eager-*/mine", "eager-fused/stock"]
cases:
  - case: bias/mine
    kernels: [eager-fused/stock]
  - case: bias/mean
    kernels: [eager-fused/stock]
  - case: bias/tie_break
    kernels: [mine/stock]
  - case: bias/leak
    kernels: ["eager-*/mine"]
"""
PAGES = (
    ("README.md", "Add your own"),
    ("DESIGN.md", "A case"),
    ("DESIGN.md", "A kernel"),
    ("DESIGN.md", "A fix"),
    ("DESIGN.md", "A backend"),
)


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


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the suite's own code with everything in it that the pages add."""
    copy = tmp_path_factory.mktemp("design") / "checkout"
    for name in ("bench", "cases", "backends", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "runner.py", copy)
    (copy / "mine.yaml").write_text(CONFIG)
    for page, heading in PAGES:
        follow(section(page, heading), copy)
    return copy


def runner(checkout: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "runner.py", *arguments, "--json"], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="module")
def rows(checkout: Path) -> list[dict[str, Any]]:
    """Those of a run on both backends; its file must be valid too."""
    ran = runner(checkout, "run", "mine.yaml")
    assert runner(checkout, "validate", ran["path"]) == {ran["path"]: []}
    return list(ran["rows"])


def test_what_was_added_is_listed(checkout: Path) -> None:
    found = runner(checkout, "list")
    cases = {case["name"]: case for case in found["cases"]}
    assert cases["bias/mine"]["question"].endswith("?")
    assert cases["bias/mean"]["question"].endswith("?")
    assert "mine/stock" in {kernel["kernel"] for kernel in found["kernels"]}
    assert "mine" in {backend["name"] for backend in found["backends"] if backend["available"]}


def test_cases(rows: list[dict[str, Any]]) -> None:
    found = [row for row in rows if row["case"] in ("bias/mine", "bias/mean")]
    assert {(row["case"], row["backend"]) for row in found} == {
        (case, backend) for case in ("bias/mine", "bias/mean") for backend in ("cpu", "mine")
    }
    for row in found:
        assert (row["status"], row["verdict"]) == ("ok", "pass"), row
        assert {"inputs", "o"} <= row["digests"].keys()


def test_a_kernel(rows: list[dict[str, Any]]) -> None:
    (row,) = (row for row in rows if row["kernel"] == "mine/stock")
    assert (row["case"], row["status"], row["verdict"]) == ("bias/tie_break", "ok", "pass"), row["reason"]


def test_a_fix(rows: list[dict[str, Any]]) -> None:
    found = [row for row in rows if row["kernel"].endswith("/mine")]
    implementations = {"eager-stored", "eager-fused", "eager-ladder"}
    assert {row["kernel"] for row in found} == {f"{name}/mine" for name in implementations}
    assert {row["status"] for row in found} == {"ok"}


def test_a_backend(rows: list[dict[str, Any]]) -> None:
    """Its eager kernels are the CPU's: the same bits."""
    here, there = (
        {
            row["kernel"]: row["digests"]
            for row in rows
            if row["case"] == "bias/leak" and row["backend"] == name
        }
        for name in ("cpu", "mine")
    )
    assert here == there != {}
