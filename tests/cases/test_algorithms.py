"""Which of PyTorch's algorithms a unit runs with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from backends.kernels.sdpa import cuda_sdpa_kernels
from cases.algorithms import algorithms, strict

KERNELS = cuda_sdpa_kernels()


def state() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@pytest.fixture
def lenient() -> Iterator[None]:
    """As a GPU's backend sets it."""
    before = state()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize(
    ("name", "warn_only"), [("flash", False), ("efficient", False), ("cudnn", True), ("math", True)]
)
@pytest.mark.usefixtures("lenient")
def test_kernels_with_a_deterministic_backward_pass_run_it(name: str, warn_only: bool) -> None:
    # PyTorch picks it only where warn_only is off; cuDNN has none and would be refused.
    with strict(KERNELS[f"sdpa-{name}/stock"]):
        assert state() == (True, warn_only)
        with algorithms(deterministic=True):  # as training and timing do
            assert state() == (True, warn_only)
    assert state() == (True, True)


def test_no_algorithms_are_forced_on_those_who_asked_for_none() -> None:
    before = state()
    with strict(KERNELS["sdpa-flash/stock"]), algorithms(deterministic=False):
        assert not torch.are_deterministic_algorithms_enabled()
    assert state() == before
