"""Imports point one way, every case and backend is registered, and nothing vendor-specific loads early."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from backends import ABLATION_NAMES, BACKENDS, FIX_NAMES, KNOWN_KERNELS
from backends.kernels.fixes import ABLATIONS, FIXES
from bench.run.registry import load_backend
from cases import CASES, load_case
from cases.base import Case, documentation, question

ROOT = Path(__file__).resolve().parent.parent
# Who may import whom. `backends` knows nothing of cases; cases see only the protocols of backends.
FORBIDDEN = {
    "backends": ("cases", "runner", "bench.run.engine", "bench.run.plan", "bench.report"),
    "cases": (
        "runner",
        "bench.run.engine",
        "bench.run.plan",
        "bench.report",
        "backends.kernels",
        "backends.cpu",
    ),
    "bench": ("runner", "backends.kernels", "backends.cpu"),
}


CRASH_HELPERS = ("detector", "documents", "language", "model", "signals", "steps", "train")


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        if "tools" in path.parts:
            continue  # benchmarks time concrete code
        for name in imports_of(path):
            for forbidden in FORBIDDEN[package]:
                assert name != forbidden, f"{path} imports {name}"
                assert not name.startswith(forbidden + "."), f"{path} imports {name}"


@pytest.mark.parametrize("name", CASES)
def test_case_is_registered_under_its_name_and_documented(name: str) -> None:
    case = load_case(name)
    assert isinstance(case, Case)
    assert case.name == name
    assert question(case).endswith("?")
    assert "Verdict:" in documentation(case)


def test_every_case_file_is_registered() -> None:
    modules = {target.partition(":")[0] for target in CASES.values()}
    helpers = {"cases.algorithms", "cases.base", "cases.sinks", "cases.determinism.problems"}
    helpers |= {f"cases.crash.{name}" for name in CRASH_HELPERS}
    helpers |= {
        f"cases.crash.gpt2.{name}"
        for name in ("batches", "checkpoint", "data", "loop", "optimizer", "progress", "signals")
    }
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "cases").rglob("*.py")
        if path.name != "__init__.py"
    }
    assert files - helpers == modules


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_loads_or_says_why(name: str) -> None:
    from bench.run.registry import unavailable_reason

    if reason := unavailable_reason(name):
        assert len(reason) > 10
        return
    backend = load_backend(name)
    assert backend.name == name
    for kernel_name, kernel in backend.kernels().items():
        assert kernel.name == kernel_name
        assert kernel_name in KNOWN_KERNELS
        assert set(kernel.option_names) <= set(type(kernel.options).model_fields)


def test_known_names_are_those_of_the_fixes() -> None:
    assert tuple(FIXES) == FIX_NAMES
    assert tuple(ABLATIONS) == ABLATION_NAMES
    assert not set(FIXES) & set(ABLATIONS)


def test_listing_imports_no_vendor_package() -> None:
    code = (
        "import sys; sys.argv = ['runner.py', 'list']\n"
        "import runner\n"
        "try:\n    runner.main()\nexcept SystemExit:\n    pass\n"
        "bad = {'torch_npu', 'triton', 'flash_attn'} & set(sys.modules)\n"
        "print(sorted(bad), file=sys.stderr); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
