"""PyTorch's deterministic algorithms: in force where a kernel has some, without a tax on allocation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from backends.base import Kernel


@contextlib.contextmanager
def strict(kernel: Kernel) -> Iterator[None]:
    """Turn `warn_only` off around a kernel that asks for it, where algorithms are deterministic.

    With it, as a GPU's backend sets it for the sake of kernels that have no deterministic version,
    PyTorch's flash and memory-efficient attention run the backward pass that adds by atomics.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    if not (enabled and kernel.strict):
        yield
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)


@contextlib.contextmanager
def algorithms(deterministic: bool) -> Iterator[None]:
    """Deterministic algorithms or the usual ones; either way `torch.empty` fills nothing.

    Where algorithms are deterministic it does by default, with NaN. That shows a kernel that reads
    what it never wrote, so short cases keep it; timed cases and training do not pay for the stores.
    """
    knobs: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), knobs.fill_uninitialized_memory
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    knobs.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=warn_only)
        knobs.fill_uninitialized_memory = before[1]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread: the tensors are too small to share, and the bits must not depend on the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
