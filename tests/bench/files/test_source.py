"""Which commit a result file names: that of the suite's own checkout, and no other."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.errors import UsageError
from bench.files import source
from bench.files.source import commit_note, describe_suite, no_checkout, source_sha256
from conftest import needs_git

pytestmark = needs_git


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def outer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with a commit, and in it a folder `suite` that stands in for this checkout."""
    source_sha256()  # of the real files; it is remembered
    (tmp_path / "suite" / "backends").mkdir(parents=True)
    (tmp_path / "suite" / "backends" / "a.py").write_text("a = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "base")
    monkeypatch.setattr(source, "ROOT", (tmp_path / "suite").resolve())
    for name in source.OF_A_HOOK | {"ATTNREPRO_COMMIT"}:
        monkeypatch.delenv(name, raising=False)
    describe_suite.cache_clear()
    yield tmp_path
    describe_suite.cache_clear()


@pytest.fixture
def inner(outer: Path) -> Path:
    """The same with the folder a checkout of its own, at another commit."""
    suite = outer / "suite"
    git(suite, "init", "-q")
    git(suite, "add", ".")
    git(suite, "commit", "-qm", "suite")
    return suite


def test_a_tree_inside_another_repository_has_no_commit(outer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert no_checkout() == source.NO_CHECKOUT
    assert describe_suite().commit == "unknown"
    assert commit_note() is None, "an exported tree is no mistake"
    (outer / "suite" / "backends" / "a.py").write_text("a = 2\n")
    monkeypatch.setenv("ATTNREPRO_COMMIT", "ab" * 20)
    describe_suite.cache_clear()
    assert describe_suite().commit == "ab" * 20
    assert not describe_suite().dirty, "the other repository's state says nothing"


def test_a_commit_that_is_none_is_refused_in_one_line(outer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREPRO_COMMIT", "main")
    with pytest.raises(UsageError, match="ATTNREPRO_COMMIT: 'main'; expected 40 hex digits"):
        describe_suite()


def test_the_checkout_s_own_commit_counts(inner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREPRO_COMMIT", "ab" * 20)
    monkeypatch.setenv("GIT_DIR", str(inner.parent / ".git"))  # as a hook of another repository sets it
    assert no_checkout() is None
    assert describe_suite().commit == (inner / ".git" / "refs" / "heads" / branch(inner)).read_text().strip()
    assert not describe_suite().dirty
    describe_suite.cache_clear()
    (inner / "backends" / "a.py").write_text("a = 2\n")
    assert describe_suite().dirty


def branch(repository: Path) -> str:
    return (repository / ".git" / "HEAD").read_text().strip().rpartition("/")[2]


def test_another_user_s_checkout_is_read(inner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's mount. git takes the owner for another one where this variable of its own tests is set."""
    commit = git(inner, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    with pytest.raises(subprocess.CalledProcessError):
        git(inner, "rev-parse", "HEAD")
    assert describe_suite().commit == commit
    assert commit_note() is None


def test_a_checkout_that_git_refuses_is_said(inner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    monkeypatch.setattr(source, "__file__", "/dev/null/none")  # its owner is not known to be this code's
    assert describe_suite().commit == "unknown"
    assert "git does not read this checkout (detected dubious ownership" in str(commit_note())


def test_a_checkout_without_git_is_said(inner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert shutil.which("git") is None
    assert describe_suite().commit == "unknown"
    assert str(commit_note()).startswith("git is not installed: the result file says commit 'unknown'")
