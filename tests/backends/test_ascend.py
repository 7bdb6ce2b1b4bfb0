"""The Ascend backend on a machine without torch_npu: it says why, and everything else works.

With the real torch_npu: tests/ascend.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator

import pytest

from backends import ascend

HERE = importlib.util.find_spec("torch_npu") is not None
pytestmark = pytest.mark.skipif(
    HERE, reason="torch_npu is installed: tests/ascend has these with it"
)


@pytest.fixture(autouse=True)
def asked_afresh() -> Iterator[None]:
    ascend.unavailable_reason.cache_clear()
    yield
    ascend.unavailable_reason.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None) -> None:
    """As if torch_npu were installed: it loads as `module`, or not at all."""
    spec = importlib.machinery.ModuleSpec("torch_npu", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(ascend, "torch_npu_version", lambda: "2.13.0")
    if module is not None:
        monkeypatch.setitem(sys.modules, "torch_npu", module)


def test_without_torch_npu() -> None:
    assert ascend.unavailable_reason() == "torch_npu is not installed (docs/ascend.md)"


def test_a_torch_npu_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    reason = str(ascend.unavailable_reason())
    assert reason.startswith("torch_npu 2.13.0 is installed but does not load: No module named")
    assert "set_env.sh" in reason


@pytest.mark.parametrize(
    ("available", "right", "expected"),
    [
        (False, True, "torch_npu 2.13.0 sees no NPU (driver, or ASCEND_RT_VISIBLE_DEVICES)"),
        (
            True,
            False,
            "the NPU computes small sums wrongly: a stand-in for CANN, or a broken device",
        ),
        (True, True, None),
    ],
)
def test_every_reason(
    monkeypatch: pytest.MonkeyPatch, available: bool, right: bool, expected: str | None
) -> None:
    pretend(monkeypatch, types.ModuleType("torch_npu"))
    device = types.SimpleNamespace(is_available=lambda: available)
    monkeypatch.setattr(ascend, "npu", lambda: device)
    monkeypatch.setattr(ascend, "computes", lambda: right)
    assert ascend.unavailable_reason() == expected


def test_a_device_that_fails_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("aclInit failed,\n error code is 507008")

    pretend(monkeypatch, types.ModuleType("torch_npu"))
    monkeypatch.setattr(ascend, "npu", lambda: types.SimpleNamespace(is_available=broken))
    assert ascend.unavailable_reason() == (
        "torch_npu 2.13.0 cannot use the NPU: aclInit failed, error code is 507008"
    )
