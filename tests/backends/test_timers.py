"""Timing by events, on a device that only counts."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from backends.timers import DeviceTimer


class Event:
    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        seen.append("mark")

    def elapsed_time(self, end: Event) -> float:
        return 2.0


seen: list[str] = []


def test_each_call_is_held_back_and_stands_between_two_marks() -> None:
    seen.clear()
    module = SimpleNamespace(Event=Event, synchronize=lambda device: seen.append("wait"))
    timer = DeviceTimer(module, torch.device("cpu"), 16, lambda: seen.append("hold"))
    assert timer(lambda: seen.append("run"), 2, warm_up=1) == [2.0, 2.0]
    assert seen == ["run", *["hold", "mark", "run", "mark"] * 2, "wait"]
