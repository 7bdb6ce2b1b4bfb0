"""Imports point one way, every case and backend is registered, and nothing vendor-specific loads early."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from backends import BACKENDS
from backends.fixes import ABLATIONS, FIXES
from bench.report.select import NEEDED
from bench.run.registry import load_backend
from cases import CASES, load_case
from cases.base import Case

ROOT = Path(__file__).resolve().parent.parent
# Who may import whom, besides itself: `a.b` allows a.b and all below it, `=a` the package's `__init__` alone
# (the registries `backends` and `cases` are names without torch). A module counts for the longest of these
# names that begins its own.
ALLOWED: dict[str, tuple[str, ...]] = {
    "runner": ("bench", "cases.processes"),
    "bench": ("=backends",),  # errors.py, and what must be set before torch is imported
    "bench.measure": (),
    "bench.files": ("bench.errors", "=bench"),
    "bench.run": (
        *("bench.errors", "bench.measure", "bench.files", "=backends", "backends.base", "backends.host"),
        "backends.names",
        *("=cases", "cases.algorithms", "cases.base", "cases.processes"),
    ),
    "bench.check": (
        *("bench.errors", "bench.measure", "bench.files", "bench.run.config", "bench.run.plan", "=bench"),
        *("=backends", "backends.names", "=cases", "cases.base"),
    ),
    "bench.report": (
        *(
            "=bench",
            "bench.errors",
            "bench.files",
            "bench.check.stale",
            "=cases",
            "cases.base",
            "cases.headline",
        ),
        "cases.crash.runs",  # groups of training runs, which it draws
    ),
    "bench.compare": ("bench.errors", "bench.measure", "bench.files", "cases.headline"),
    "bench.tools": ("bench", "backends", "cases"),
    "cases": ("bench.errors", "bench.measure", "bench.files", "backends.base"),
    "backends": ("bench.measure",),
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


PACKAGES = ("bench", "cases", "backends")
SOURCES = {
    module_of(path): path
    for path in (ROOT / "runner.py", *(path for top in PACKAGES for path in (ROOT / top).rglob("*.py")))
}


@cache
def imports_of(module: str) -> frozenset[str]:
    """Our modules that a module imports, in functions too; `from a import b` is a.b where that is a module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & SOURCES.keys()
            names |= inner or {node.module}
    return frozenset(name for name in names if name.partition(".")[0] in ("runner", *PACKAGES))


def package_of(module: str) -> str:
    parts = module.split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next(name for name in names if name in ALLOWED)


def allows(rule: str, name: str) -> bool:
    if rule.startswith("="):
        return name == rule[1:]
    return name == rule or name.startswith(rule + ".")


def test_imports_point_one_way() -> None:
    for module in SOURCES:
        own = package_of(module)
        for name in imports_of(module):
            inside = package_of(name) == own
            assert inside or any(allows(rule, name) for rule in ALLOWED[own]), f"{module} imports {name}"


def test_the_rule_goes_in_no_circle_and_has_no_dead_line() -> None:
    used: dict[str, set[str]] = {package: set() for package in ALLOWED}
    for module in SOURCES:
        used[package_of(module)] |= imports_of(module)
    for package, rules in ALLOWED.items():
        for rule in rules:
            assert any(allows(rule, name) for name in used[package]), f"{package}: nothing needs {rule}"
    graph = {
        package: {package_of(name) for name in names if name not in PACKAGES} - {package}
        for package, names in used.items()
    }
    tuple(TopologicalSorter(graph).static_order())  # CycleError names the circle
    assert not [package for package, below in graph.items() if "bench.tools" in below], (
        "nobody imports the tools"
    )


@pytest.mark.parametrize("room", [name for name in ALLOWED if name.startswith("bench.")])
def test_each_room_says_what_lives_there(room: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / room.replace(".", "/") / "__init__.py").read_text()))
    assert text is not None
    assert "mports" in text, "a room says what it may import"


@pytest.mark.parametrize("name", CASES)
def test_case_is_registered_under_its_name_and_documented(name: str) -> None:
    case = load_case(name)
    assert isinstance(case, Case)
    assert case.name == name
    assert case.question.endswith("?")
    assert "Verdict:" in case.documentation


def test_every_case_is_registered() -> None:
    """A class under cases/ that has a name such as bias/leak is in the registry."""
    found = set()
    for module in SOURCES:
        tree = ast.parse(SOURCES[module].read_text())
        for node in ast.walk(tree) if module.startswith("cases.") else ():
            names = [
                (target.id, part.value)
                for line in (node.body if isinstance(node, ast.ClassDef) else ())
                if isinstance(line, ast.Assign)
                for target, part in pairs(line)
                if isinstance(target, ast.Name) and isinstance(part, ast.Constant)
            ]
            found |= {f"{module}:{node.name}" for key, value in names if key == "name" and "/" in str(value)}  # type: ignore[attr-defined]
    assert found == set(CASES.values())


def pairs(line: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """Targets with their values, of `a = 1` and `a, b = 1, 2`."""
    target, value = line.targets[0], line.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def test_no_room_knows_a_case_by_its_name() -> None:
    """What a room must know of a case, the case says of itself."""
    groups = "|".join({name.partition("/")[0] for name in CASES})
    quoted = re.compile(f"[\"']({groups})/")
    for path in (ROOT / "runner.py", *(ROOT / "bench").rglob("*.py"), *(ROOT / "bench").rglob("*.js")):
        if not {"tools", "vendor"} & set(path.parts):
            assert not quoted.search(path.read_text()), path


def test_a_question_is_answered_by_one_case_at_a_point_that_it_has() -> None:
    subjects = [case.subject for name in CASES if (case := load_case(name)).subject is not None]
    assert sorted(subjects) == sorted(NEEDED)
    for name in CASES:
        case = load_case(name)
        assert case.told_at.keys() <= {"dtype", *case.Params.model_fields}, name
        case.Params(**{key: value for key, value in case.told_at.items() if key != "dtype"})


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_loads_or_says_why(name: str) -> None:
    from bench.run.registry import unavailable_reason

    if reason := unavailable_reason(name):
        assert len(reason) > 10
        return
    assert load_backend(name).name == name


def test_no_ablation_has_the_name_of_a_fix() -> None:
    assert not set(FIXES) & set(ABLATIONS)


@pytest.mark.parametrize("module", ["backends", "backends.fixes", "backends.names"])
def test_names_are_free_of_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


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
