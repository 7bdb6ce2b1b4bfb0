"""The CPU backend, besides what every backend keeps (test_contract)."""

from __future__ import annotations

import torch

from backends.cpu import CpuBackend


def test_the_accelerator_is_the_cpu_with_its_cores() -> None:
    assert "cores" in CpuBackend().facts().identity["accelerator"]


def test_what_is_not_deterministic_is_refused() -> None:
    with CpuBackend().deterministic():
        assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_one_call_warms_up() -> None:
    calls: list[int] = []
    CpuBackend().time_ms(lambda: calls.append(1), 5)
    assert len(calls) == 6
