"""The leak's part of gradients and updates is split off exactly."""

from __future__ import annotations

from dataclasses import replace

import torch

from backends.base import Kernel
from bench.run.registry import load_backend
from bench.tools.studies.leak_plane import CASE, BlockInputs, Layer, Split, leak_gradients, run
from cases.algorithms import algorithms, one_thread
from cases.crash.ladder import Params, make_text
from cases.crash.training.attention import Seen
from cases.crash.training.log import TrainingLog
from cases.crash.training.loop import Watch, train
from cases.crash.training.model import GPT, fresh_model
from cases.crash.training.recipe import Recipe
from cases.crash.training.text_trainer import TextTrainer, batch_offsets

PARAMS = Params(layers=2, width=32, context=32, batch=2, steps=4)


def kernel(fix: str) -> Kernel:
    return load_backend("cpu").kernels()[f"eager-ladder/{fix}"].configure(mantissa_bits=1)


def trainer_of(model: GPT, fix: str, params: Params, recipe: Recipe) -> TextTrainer:
    text = make_text(params.vocabulary)
    offsets = batch_offsets(CASE, 0, params.steps, params.batch, len(text) - params.context)
    return TextTrainer(model, kernel(fix), recipe, (CASE, 0), torch.float32, text, offsets)


def one_step(fix: str) -> tuple[GPT, TextTrainer, BlockInputs, dict[int, Seen]]:
    """Gradients of the first batch, not clipped."""
    model = fresh_model(CASE, PARAMS.size, 0)
    with torch.no_grad():  # larger weights, so that rows differ
        for block in model.blocks:
            block.w_q.mul_(20)
    recipe = replace(PARAMS.recipe, lr=1e-3, warmup=1, clip=1e9)
    trainer = trainer_of(model, fix, PARAMS, recipe)
    inputs = BlockInputs(model)
    trainer.gradients(0, look=True)
    return model, trainer, inputs, trainer.present.seen


def test_leak_gradients_are_what_a_delta_without_error_takes_away() -> None:
    stock, _, inputs, seen = one_step("stock")
    cured, *_ = one_step("delta_dp")
    last = PARAMS.layers - 1  # both kernels give it the same q, k, v and dO
    parts = leak_gradients(seen[last], inputs.x[last])
    for name, part in zip(("w_q", "w_k"), parts, strict=True):
        with_leak, without = (getattr(m.blocks[last], name).grad for m in (stock, cured))
        assert part.norm() > 0.01 * without.norm()
        torch.testing.assert_close(part, with_leak - without, rtol=1e-3, atol=2e-7)


def test_parts_of_an_update_sum_to_the_update() -> None:
    model, trainer, inputs, seen = one_step("stock")
    layer = Layer.of(model.blocks[0])
    before = model.blocks[0].w_q.detach().clone()
    e_q, _ = leak_gradients(seen[0], inputs.x[0])
    layer.q.add(e_q, trainer.recipe)
    trainer.update(0)
    leak, rest = layer.q.updates(trainer, model.blocks[0].w_q, 1e-3)
    assert leak.norm() > 0
    torch.testing.assert_close(leak + rest, model.blocks[0].w_q.detach() - before, rtol=1e-3, atol=1e-6)


def test_a_gradient_that_is_all_leak_leaves_no_rest() -> None:
    model, trainer, _, _ = one_step("stock")
    weight = model.blocks[0].w_k
    split = Split(torch.zeros_like(weight))
    split.add(weight.grad.clone(), trainer.recipe)
    trainer.update(0)
    _, rest = split.updates(trainer, weight, 1e-3)
    assert float(rest.abs().max()) < 1e-8


def train_as_the_case(params: Params) -> TrainingLog:
    model = fresh_model(CASE, params.size, 0)
    return train(trainer_of(model, "stock", params, params.recipe), Watch())


def test_windows_cover_every_step_and_training_is_the_case_s() -> None:
    params = Params(layers=2, width=32, context=32, batch=2, steps=60)
    with one_thread(), algorithms(deterministic=True):
        document, losses = run(kernel("stock"), params)
        log = train_as_the_case(params)
    assert losses == log.loss
    assert len(losses) == 60
    assert document["verdict"] == "stable@60"
    assert [w["steps"] for w in document["windows"]] == [50, 10]
    first = document["windows"][0]["layers"][0]
    assert first["leak_abs"] > abs(first["leak"]) > 0
