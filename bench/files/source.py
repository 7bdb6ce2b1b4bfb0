"""Which code measured: release, git commit, and a hash over the files that decide the numbers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from bench import SUITE_VERSION
from bench.errors import UsageError
from bench.files.records import Suite

ROOT = Path(__file__).resolve().parents[2]
# A result belongs to the code of these folders; the report's code, say, may change freely.
MEASURING = ("backends", "cases", "bench/measure")
COMMIT = re.compile(r"[0-9a-f]{40}|unknown")
NO_CHECKOUT = "this is no git checkout"
OF_A_HOOK = frozenset(
    {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"}
)


@cache
def source_sha256() -> str:
    """sha256 over names and contents of the measuring source files, in sorted order."""
    files = [path for folder in MEASURING for path in (ROOT / folder).rglob("*.py")]
    h = hashlib.sha256()
    for path in sorted(files, key=lambda p: p.relative_to(ROOT).as_posix()):
        h.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        h.update(path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return h.hexdigest()


@cache
def describe_suite() -> Suite:
    """Release, commit and state of this checkout. A tree exported from git may name its commit in
    ATTNREPRO_COMMIT; else it is `unknown`. `source_sha256` tells either way which code it was."""
    commit, dirty = os.environ.get("ATTNREPRO_COMMIT", "unknown"), False
    if no_checkout() is None:
        commit = git("rev-parse", "HEAD").strip() or "unknown"  # before its first commit
        dirty = bool(git("status", "--porcelain", "--untracked-files=no", "--", *MEASURING))
    elif not COMMIT.fullmatch(commit):
        raise UsageError(f"ATTNREPRO_COMMIT: {commit!r}; expected 40 hex digits")
    return Suite(version=SUITE_VERSION, commit=commit, dirty=dirty, source_sha256=source_sha256())


def no_checkout() -> str | None:
    """Why git cannot say which commit this is; None where it can.

    Only the suite's own checkout counts: for a tree unpacked inside another repository git names that one.
    """
    if not (ROOT / ".git").exists():
        return NO_CHECKOUT
    if shutil.which("git") is None:
        return "git is not installed"
    try:
        found = _run_git("rev-parse", "--show-toplevel")
    except (OSError, subprocess.SubprocessError) as error:
        return f"git does not answer ({type(error).__name__})"
    if found.returncode != 0:
        said = found.stderr.splitlines() or ["no reason given"]
        return f"git does not read this checkout ({said[0].removeprefix('fatal: ')})"
    if Path(found.stdout.rstrip("\n")).resolve() != ROOT:
        return NO_CHECKOUT
    return None


def commit_note() -> str | None:
    """For the user of a run: why its file cannot name the commit of this checkout; None where it can."""
    reason = no_checkout()
    if reason in (None, NO_CHECKOUT) or describe_suite().commit != "unknown":
        return None
    return f"{reason}: the result file says commit 'unknown'; its source_sha256 tells which code it was"


def git(*arguments: str) -> str:
    """What git prints about the suite's folder; empty where it fails or there is no git."""
    try:
        done = _run_git(*arguments)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _run_git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """git in the suite's folder.

    git refuses the checkout of another user, as a container mounts one, for what its settings could start.
    Where the same user also wrote this file, which is running already, that adds nothing: it is read.
    """
    trusted: list[str] = []
    with contextlib.suppress(OSError):
        if (ROOT / ".git").stat().st_uid == Path(__file__).stat().st_uid:
            trusted = ["-c", f"safe.directory={ROOT}"]
    # A hook's settings name the hook's repository, which may be another.
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_HOOK}
    return subprocess.run(
        ["git", *trusted, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=10,
    )
