"""What every backend and every kernel keeps, whoever wrote it. A new one needs no test of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from backends import BACKENDS
from backends.base import Backend, Call, Kernel
from backends.cpu import CpuBackend
from backends.fixes import ALL_FIXES
from backends.kernels.composite_kernels import composite_kernels
from backends.kernels.eager_kernels import eager_kernels
from backends.kernels.flash_attn import flash_attn_kernels
from backends.kernels.flex import flex_kernels
from backends.kernels.npu_fusion import npu_fusion_kernels
from backends.kernels.sdpa import cpu_sdpa_kernels, cuda_sdpa_kernels
from backends.kernels.triton_kernels import triton_kernels
from backends.knobs import Knob, attribute, deterministic
from backends.names import KNOWN_KERNELS, kernel_version
from bench.files.privacy import personal
from bench.files.records import slug_of
from bench.run.registry import load_backend, unavailable_reason

OTHER = {True: False, False: True, "highest": "medium"}  # what a knob may be set to besides
SETTINGS = SimpleNamespace(fast=True)


class FakeBackend(CpuBackend):
    """A vendor whose knob is an attribute, and whose device warns where it is not deterministic."""

    name = "fake"

    def knobs(self) -> dict[str, Knob]:
        return {"fast": attribute(SETTINGS, "fast", False)}

    def deterministic(self) -> AbstractContextManager[None]:
        return deterministic(self.knobs(), warn_only=True)


HERE = [name for name in BACKENDS if unavailable_reason(name) is None]
KERNELS: dict[str, Kernel] = {
    **eager_kernels(),
    **composite_kernels(),
    **triton_kernels(),
    **cpu_sdpa_kernels(),
    **cuda_sdpa_kernels(),
    **flex_kernels(),
    **flash_attn_kernels(),
    **npu_fusion_kernels(),
}


@pytest.fixture(params=[*HERE, "fake"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return FakeBackend() if request.param == "fake" else load_backend(request.param)


def switches() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@pytest.fixture
def turned(backend: Backend) -> Iterator[dict[str, Any]]:
    """Every knob set to what a measurement does not want; put back afterwards."""
    with ExitStack() as back:
        back.callback(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(False)
        for knob in backend.knobs().values():
            back.callback(knob.set, knob.get())
            knob.set(OTHER[knob.value])
        yield {name: knob.get() for name, knob in backend.knobs().items()}


def values(backend: Backend) -> dict[str, Any]:
    return {name: knob.get() for name, knob in backend.knobs().items()}


def test_the_accelerator_is_named_and_facts_hold_nothing_personal(backend: Backend) -> None:
    assert isinstance(backend, Backend)
    facts = backend.facts()
    assert slug_of({backend.name: facts.identity}) != "unknown"
    assert list(personal(asdict(facts))) == []


def test_knobs_are_recorded(backend: Backend) -> None:
    recorded = backend.facts().identity["knobs"]
    assert recorded["deterministic_algorithms"] is True
    if backend.name != "fake":  # which takes over the CPU's facts
        assert {n: k.value for n, k in backend.knobs().items()}.items() <= recorded.items()


def test_knobs_are_set_and_put_back(backend: Backend, turned: dict[str, Any]) -> None:
    with backend.deterministic():
        assert switches()[0]
        assert values(backend) == {name: knob.value for name, knob in backend.knobs().items()}
    assert values(backend) == turned
    assert switches() == (False, False)


def test_knobs_are_put_back_after_an_error(backend: Backend, turned: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.raises(ZeroDivisionError), backend.deterministic():
        raise ZeroDivisionError
    assert values(backend) == turned
    assert switches() == (True, True)


def test_time_and_memory(backend: Backend) -> None:
    def run() -> None:
        calls.append(torch.ones(1024, device=backend.device).sum())

    calls: list[torch.Tensor] = []
    times = backend.time_ms(run, 3)
    assert len(times) == 3
    assert all(time >= 0 for time in times)
    assert len(calls) > 3, "it warms up"
    for size in (backend.memory_of(run), backend.peak_memory()):
        assert size is None or (isinstance(size, int) and size >= 0)
    backend.synchronize()


def test_a_backends_kernels_are_known_by_name(backend: Backend) -> None:
    kernels = backend.kernels()
    assert kernels
    assert {kernel.name: kernel for kernel in kernels.values()} == kernels
    assert kernels.keys() <= set(KNOWN_KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_says_what_it_is(name: str) -> None:
    kernel = KERNELS[name]
    assert isinstance(kernel, Kernel)
    assert kernel.name == name
    assert name in KNOWN_KERNELS
    assert kernel.version == kernel_version(name)
    assert kernel.fix in ALL_FIXES
    assert kernel.dtypes <= {torch.bfloat16, torch.float16, torch.float32}
    assert isinstance(kernel.strict, bool)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernels_options_are_its_own(name: str) -> None:
    kernel = KERNELS[name]
    assert kernel.option_names <= set(type(kernel.options).model_fields)
    assert kernel.configure() == kernel
    with pytest.raises(ValidationError):
        kernel.configure(no_such_option=1)
    assert kernel.draws == ("seed" in kernel.option_names)
    again = kernel.reseeded(2**128 - 1)
    assert again.name == name
    assert (again != kernel) == kernel.draws


@pytest.mark.parametrize("name", KERNELS)
def test_launch_facts_are_plain_scalars(name: str) -> None:
    kernel, shape = KERNELS[name], (1, 2, 16, 32)
    dtype = sorted(kernel.dtypes, key=str)[0]
    facts = kernel.launch_facts(Call(shape, shape, dtype, torch.device("cpu"), causal=True))
    assert facts
    assert all(isinstance(value, str | int | float | None) for value in facts.values())
