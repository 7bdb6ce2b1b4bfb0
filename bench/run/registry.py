"""Names to objects, lazily: a backend's or case's module is imported when its name is asked for."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING

from backends import BACKENDS
from bench.errors import UsageError, nearest

if TYPE_CHECKING:  # torch comes with it
    from backends.base import Backend


def unavailable_reason(name: str) -> str | None:
    """Why a backend cannot run here; None if it can."""
    if name not in BACKENDS:
        raise UsageError(f"unknown backend '{name}'{nearest(name, ['auto', *BACKENDS])}")
    reason: str | None = importlib.import_module(BACKENDS[name]).unavailable_reason()
    return reason


@cache
def load_backend(name: str) -> Backend:
    """The backend registered as `name`; UsageError with the reason where it cannot run."""
    if reason := unavailable_reason(name):
        raise UsageError(f"backend '{name}' is not available here: {reason}")
    backend: Backend = importlib.import_module(BACKENDS[name]).create()
    return backend
