"""Milliseconds of single calls: by a device's events, or by the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 3


class DeviceTimer:
    """Times calls on a device by events, its L2 cache overwritten before each.

    Args:
        module: the device's in torch, as `torch.cuda`: it has `Event` and `synchronize`.
        flush_bytes: more than the L2 cache holds.
        hold: keeps the device busy until the host has queued the call, so that the host's launch time
            does not count; None where overwriting the cache takes long enough.
    """

    def __init__(
        self,
        module: Any,
        device: torch.device,
        flush_bytes: int,
        hold: Callable[[], object] | None = None,
    ):
        self.module, self.device, self.hold = module, device, hold
        self.flush = torch.empty(flush_bytes, dtype=torch.int8, device=device)

    def prepare(self) -> None:
        """Neither a warm cache nor the host's launch time is to count in what is queued next."""
        self.flush.zero_()
        if self.hold is not None:
            self.hold()

    def mark(self) -> Any:
        """An event where the device is now in its queue."""
        event = self.module.Event(enable_timing=True)
        event.record()
        return event

    def __call__(self, run: Callable[[], object], rounds: int, warm_up: int = WARM_UP) -> list[float]:
        """Milliseconds of each of `rounds` calls, after `warm_up` that do not count."""
        for _ in range(warm_up):
            run()
        starts = [self.module.Event(enable_timing=True) for _ in range(rounds)]
        ends = [self.module.Event(enable_timing=True) for _ in range(rounds)]
        for start, end in zip(starts, ends, strict=True):
            self.prepare()
            start.record()
            run()
            end.record()
        self.module.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def host_ms(run: Callable[[], object], rounds: int, warm_up: int = 1) -> list[float]:
    """Milliseconds of each of `rounds` calls that are over when they return."""
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def device_memory(module: Any, device: torch.device, run: Callable[[], object]) -> int:
    """Peak bytes that one call allocates on top, by the allocator of the device's `module` in torch."""
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    run()
    module.synchronize(device)
    return int(module.max_memory_allocated(device) - before)
