"""Training on a GPU: the same losses twice, graphs change none, compiled parts change last bits alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends import cuda
from backends.kernels.eager_ladder import product
from bench.measure.inputs import digest, key_of, normal
from bench.run.registry import load_backend
from cases.crash.documents import documents
from cases.crash.training.log import TrainingLog
from cases.crash.training.loop import Watch, train
from cases.crash.training.model import Size, fresh_model
from cases.crash.training.recipe import Recipe
from cases.crash.training.text_trainer import TextTrainer, batch_offsets

pytestmark = pytest.mark.skipif(cuda.unavailable_reason() is not None, reason=str(cuda.unavailable_reason()))
SIZE = Size(layers=2, width=128, context=128, vocabulary=1024, heads=2)
CASES: list[tuple[str, dict[str, Any], torch.dtype]] = [
    ("eager-ladder/stock", {"mantissa_bits": 3}, torch.bfloat16),
    ("eager-ladder/stock", {"mantissa_bits": 3}, torch.float32),
    ("eager-ladder/delta_dp", {"mantissa_bits": 3, "compiled": True}, torch.bfloat16),
    ("triton/stock", {}, torch.bfloat16),
]


def trained(name: str, options: dict[str, Any], dtype: torch.dtype, graph: bool) -> TrainingLog:
    backend = load_backend("cuda")
    text = documents(1024, 256)
    model = fresh_model("x", SIZE, 0).to(backend.device)
    offsets = batch_offsets("x", 0, 40, 8, len(text) - SIZE.context)
    kernel = backend.kernels()[name].configure(**options)
    recipe, text, offsets = Recipe(40, 8, 3e-3, 100), text.to(backend.device), offsets.to(backend.device)
    with backend.deterministic():
        trainer = TextTrainer(model, kernel, recipe, ("x", 0), dtype, text, offsets, graph)
        return train(trainer, Watch(read_every=0))


@pytest.mark.parametrize(("name", "options", "dtype"), CASES)
def test_graphs_and_second_runs_give_the_same_losses(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    plain = trained(name, options, dtype, graph=False)
    assert plain.loss[-1] < plain.loss[0] - 0.5
    for graph in (False, True, True):
        again = trained(name, options, dtype, graph)
        assert digest(torch.tensor(again.loss)) == digest(torch.tensor(plain.loss))
        assert repr(again.curves) == repr(plain.curves)


def test_random_rounding_is_the_same_from_run_to_run() -> None:
    stochastic = ("eager-ladder/stochastic", {"mantissa_bits": 2}, torch.bfloat16)
    first, second = (trained(*stochastic, graph=False) for _ in range(2))
    assert first.loss == second.loss


def test_tensor_core_products_are_fp32_products_of_the_same_values() -> None:
    a, b = (torch.from_numpy(normal(key_of("product", n), (2, 3, 64, 64))) for n in "ab")
    a, b = a.bfloat16().cuda(), b.bfloat16().cuda()
    found, exact = product(a, b), a.double() @ b.double()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_compiled_parts_differ_in_last_bits_alone() -> None:
    backend = load_backend("cuda")
    kernel = backend.kernels()["eager-ladder/stock"].configure(mantissa_bits=7)
    q, k, v = (
        torch.from_numpy(normal(key_of("compiled", n), (2, 2, 128, 64))).bfloat16().cuda() for n in "qkv"
    )
    plain, fused = (
        kernel(q, k, v, causal=True),
        kernel.configure(compiled=True)(q, k, v, causal=True),
    )
    torch.testing.assert_close(fused, plain, rtol=2**-7, atol=2**-9)
    assert float((fused != plain).float().mean()) < 0.05
