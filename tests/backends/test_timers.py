"""Timing by events, on a device that only counts."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from backends.timers import DeviceTimer


class Event:
    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        LOG.append("mark")

    def elapsed_time(self, end: Event) -> float:
        return 2.0


LOG: list[str] = []


def test_each_call_is_held_back_and_stands_between_two_marks() -> None:
    LOG.clear()
    module = SimpleNamespace(Event=Event, synchronize=lambda device: LOG.append("wait"))
    timer = DeviceTimer(module, torch.device("cpu"), 16, lambda: LOG.append("hold"))
    assert timer(lambda: LOG.append("run"), 2, warm_up=1) == [2.0, 2.0]
    assert LOG == ["run", *["hold", "mark", "run", "mark"] * 2, "wait"]
