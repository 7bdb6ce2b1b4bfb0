"""Errors that end a command with one clear line instead of a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


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


def explain(error: ValidationError, *models: type[BaseModel]) -> str:
    """The first problem of a validation error as `key path: problem (nearest name)`."""
    first = error.errors(include_url=False)[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    if first["type"] == "extra_forbidden":
        known = {name for model in models for name in model.model_fields}
        return f"{path}: unknown key{nearest(str(first['loc'][-1]), known)}"
    if first["type"] == "value_error":  # raised by a model's own check, which names what is wrong
        return f"{path}: {first['ctx']['error']}".removeprefix(": ")
    message = first["msg"][0].lower() + first["msg"][1:]
    got = "" if first["type"] == "missing" else f", got {_short(first['input'])}"
    return f"{path}: {message}{got}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
