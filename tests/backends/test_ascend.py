"""The Ascend backend on a machine without torch_npu: it says why, and everything else works.

With the real torch_npu: tests/ascend.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from backends import ascend
from backends.kernels.composite_kernels import composite_kernels
from backends.kernels.npu_fusion import npu_fusion_kernels
from bench.run.config import read_config
from bench.run.engine import offered_kernels
from bench.run.plan import make_plan

HERE = importlib.util.find_spec("torch_npu") is not None
pytestmark = pytest.mark.skipif(HERE, reason="torch_npu is installed: tests/ascend has these with it")


@pytest.fixture(autouse=True)
def asked_afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in ascend.DETERMINISTIC_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)  # and takes it away again, should loading set it
    monkeypatch.setattr(torch.version, "cuda", None)  # the states of a CPU build, on a GPU machine too
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


def test_beside_a_cuda_build_of_torch_it_is_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu 2.13.0 ends the process there, on import. CI's torch is a CPU build and would not show it."""
    pretend(monkeypatch, None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ascend, "load", lambda: pytest.fail("torch_npu was loaded"))
    assert ascend.unavailable_reason() == (
        f"torch_npu 2.13.0 cannot be loaded beside a CUDA build of torch ({torch.__version__}): docs/ascend.md"
    )


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
    device = SimpleNamespace(is_available=lambda: available)
    monkeypatch.setattr(ascend, "npu", lambda: device)
    monkeypatch.setattr(ascend, "computes", lambda: right)
    assert ascend.unavailable_reason() == expected


def test_a_device_that_fails_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("aclInit failed,\n error code is 507008")

    pretend(monkeypatch, types.ModuleType("torch_npu"))
    monkeypatch.setattr(ascend, "npu", lambda: SimpleNamespace(is_available=broken))
    assert ascend.unavailable_reason() == (
        "torch_npu 2.13.0 cannot use the NPU: aclInit failed, error code is 507008"
    )


def test_the_config_of_a_910b_can_be_planned_without_one() -> None:
    kernels = {**npu_fusion_kernels(), **composite_kernels()}
    offered = offered_kernels([SimpleNamespace(name="ascend", kernels=lambda: kernels)])  # type: ignore[list-item]
    config, _ = read_config(Path(__file__).parents[2] / "configs" / "ascend910b.yaml")
    plan = make_plan(config, offered)
    assert {unit.kernel for unit in plan} == set(kernels)
    for unit in plan:
        assert kernels[unit.kernel].configure(**unit.options)
    layouts = [unit.options for unit in plan if unit.options.get("layout") == "TND"]
    assert sorted(options["sparse_mode"] for options in layouts) == [2, 3]


def test_triton_is_offered_where_it_is_triton_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend, "triton_kernels", lambda: {"triton/stock": None})
    for version, expected in ((None, False), ("3.2.0", True)):
        monkeypatch.setattr(ascend, "_triton_ascend_version", lambda version=version: version)
        assert ("triton/stock" in ascend._all_kernels()) == expected
