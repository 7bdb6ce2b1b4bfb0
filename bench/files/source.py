"""Which code measured: release, git commit, and a hash over the files that decide the numbers."""

from __future__ import annotations

import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path

from bench import SUITE_VERSION
from bench.files.records import Suite

ROOT = Path(__file__).resolve().parents[2]
# A result belongs to the code of these folders; the report's code, say, may change freely.
MEASURING = ("backends", "cases", "bench/measure")


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
    commit = _git("rev-parse", "HEAD") or os.environ.get("ATTNREPRO_COMMIT", "unknown")
    dirty = bool(_git("status", "--porcelain", "--untracked-files=no", "--", *MEASURING))
    return Suite(version=SUITE_VERSION, commit=commit, dirty=dirty, source_sha256=source_sha256())


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
