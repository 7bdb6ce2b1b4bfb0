"""What `make` installs where, and what the Ascend checks of CI do where they cannot install: with stand-ins
for Python and pip that only note what they were asked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT

# Answers for an interpreter of version $VERSION; `-m venv` makes an environment with itself in it.
PYTHON = """#!/bin/sh
echo "$*" >> {log}
for last; do :; done
case "$*" in
  "-m venv"*) rm -rf "$last"; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
  *"pip download"*" $UNREACHABLE"*|*"pip download"*"$MISSING"*) exit 1 ;;
  *base_prefix*) echo "/usr {version}" ;;
  *--version*) echo "Python {version}" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that `make` and .ci/ read, and a `.venv`-less folder."""
    for path in (ROOT / "Makefile", ROOT / "constraints.txt", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    return tmp_path


def stand_in(checkout: Path, version: str) -> Path:
    path = checkout / f"python{version}"
    path.write_text(PYTHON.format(log=checkout / "log", version=version))
    path.chmod(0o755)
    return path


def asked(checkout: Path, *arguments: str) -> list[str]:
    """The installations and environments that `make` asks for."""
    log = checkout / "log"
    log.write_text("")
    subprocess.run(["make", "-s", *arguments], cwd=checkout, capture_output=True, check=True)
    lines = log.read_text().splitlines()
    return [
        line.split()[-1] for line in lines if line.startswith("-m venv") or line.startswith("-m pip install")
    ]


def test_every_requirements_file_is_installed_once(checkout: Path) -> None:
    python = f"PYTHON={stand_in(checkout, '3.11')}"
    assert asked(checkout, ".venv/run.done", python) == [".venv", "requirements.txt"]
    assert asked(checkout, ".venv/run.done", python) == []
    ascend = "REQUIREMENTS=requirements-ascend.txt"
    assert asked(checkout, ".venv-ascend/run.done", ascend, python) == [
        ".venv-ascend",
        "requirements-ascend.txt",
    ]
    assert asked(checkout, ".venv/run.done", python) == []
    shared = (ascend, "VENV=.venv", python)  # the same environment for both: installed all the same
    assert asked(checkout, ".venv/run.done", *shared) == ["requirements-ascend.txt"]


def test_another_interpreter_makes_the_environment_anew(checkout: Path) -> None:
    old, new = stand_in(checkout, "3.11"), stand_in(checkout, "3.12")
    assert asked(checkout, ".venv/dev.done", f"PYTHON={old}") == [
        ".venv",
        "requirements.txt",
        "requirements-dev.txt",
    ]
    anew = [".venv", "requirements.txt", "requirements-dev.txt"]
    assert asked(checkout, ".venv/dev.done", f"PYTHON={new}") == anew
    assert asked(checkout, ".venv/dev.done") == [], "not asked for, the environment stays"


def test_triton_ascend_is_not_installed_beside_triton(checkout: Path) -> None:
    """Both are a package `triton`: whichever comes second is unpacked over the other."""
    chosen = ("REQUIREMENTS=requirements-triton-ascend.txt", f"PYTHON={stand_in(checkout, '3.11')}")
    found = asked(checkout, ".venv-triton-ascend/dev.done", *chosen)
    assert found == [".venv-triton-ascend", "requirements-triton-ascend.txt", "requirements-test.txt"]
    for name in ("requirements-triton-ascend.txt", "requirements-ascend.txt", "requirements-test.txt"):
        lines = (ROOT / name).read_text().splitlines()
        assert not [line for line in lines if line.startswith("triton") and "ascend" not in line]
    assert "torch==2.13.0+cpu" in (ROOT / "requirements-ascend.txt").read_text(), (
        "a CUDA build asks for triton"
    )
    assert "torch==2.13.0\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize(
    ("script", "unreachable", "missing", "code", "said"),
    [
        ("ascend-torch-npu", "", "nothing", 0, "SKIPPED"),  # every download ends without a wheel
        ("ascend-triton", "", "nothing", 0, "SKIPPED"),
        (
            "ascend-torch-npu",
            "nothing",
            "torch_npu",
            1,
            "FAILED: the registry answers, but not all of 'torch_npu'",
        ),
        ("ascend-triton", "nothing", "triton-ascend", 1, "triton-ascend needs Python 3.11"),
    ],
)
def test_only_a_missing_network_skips_the_ascend_checks(
    checkout: Path, script: str, unreachable: str, missing: str, code: int, said: str
) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    stand_in(checkout, "3.12").rename(checkout / ".venv" / "bin" / "python")
    tools = checkout / "tools"
    tools.mkdir()
    for tool in ("gcc", "nm", "readelf"):
        (tools / tool).symlink_to("/bin/true")
    done = subprocess.run(
        ["bash", f".ci/{script}"],
        cwd=checkout,
        env={"PATH": f"{tools}:/usr/bin:/bin", "UNREACHABLE": unreachable, "MISSING": missing},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def test_a_missing_compiler_fails_and_is_named(checkout: Path) -> None:
    tools = checkout / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "nm", "readelf"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    done = subprocess.run(
        ["/bin/bash", ".ci/ascend-torch-npu"],
        cwd=checkout,
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "FAILED: gcc is needed" in done.stderr
