"""PyTorch's deterministic algorithms without their tax on every allocation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def algorithms(deterministic: bool) -> Iterator[None]:
    """Deterministic algorithms or the usual ones; either way `torch.empty` fills nothing.

    Where algorithms are deterministic it does by default, with NaN. That shows a kernel that reads
    what it never wrote, so short cases keep it; timed cases and training do not pay for the stores.
    """
    knobs: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), knobs.fill_uninitialized_memory
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    knobs.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=warn_only)
        knobs.fill_uninitialized_memory = before[1]
