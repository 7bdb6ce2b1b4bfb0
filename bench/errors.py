"""Errors that end a command with one clear line instead of a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """Bad usage, config or file: exit code 2. The text says what, where and what is allowed."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?` or `; valid: a, b, c`: the tail of an unknown-name message."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    listed = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"; valid: {listed}" if names else ""
