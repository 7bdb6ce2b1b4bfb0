"""The leak's part of gradients and updates is split off exactly."""

from __future__ import annotations

from dataclasses import replace

import torch

from backends.base import Kernel
from bench.run.registry import load_backend
from bench.tools.studies.leak_plane import CASE, Inputs, Layer, Split, leak_gradients, run
from cases.algorithms import algorithms
from cases.crash.ladder import Params, make_text
from cases.crash.model import GPT, fresh_model
from cases.crash.signals import Attention
from cases.crash.steps import Step
from cases.crash.train import Log, batch_offsets, one_thread, train

PARAMS = Params(layers=2, width=32, context=32, batch=2, steps=4)


def kernel(fix: str) -> Kernel:
    return load_backend("cpu").kernels()[f"eager-ladder/{fix}"].configure(mantissa_bits=1)


def one_step(fix: str) -> tuple[GPT, Step, Inputs, Attention]:
    """Gradients of the first batch, not clipped."""
    model = fresh_model(CASE, PARAMS.size, 0)
    with torch.no_grad():  # larger weights, so that rows differ
        for block in model.blocks:
            block.w_q.mul_(20)
    text = make_text(PARAMS.vocabulary)
    recipe = replace(PARAMS.recipe, clip=1e9)
    step = Step(model, text, recipe, PARAMS.context, torch.float32)
    inputs = Inputs(model)
    attention = Attention(kernel(fix), look=True)
    order = batch_offsets(CASE, 0, PARAMS.steps, PARAMS.batch, len(text) - PARAMS.context)
    step.load(order[0], 1e-3)
    step.gradients(attention)
    return model, step, inputs, attention


def test_leak_gradients_are_what_a_delta_without_error_takes_away() -> None:
    stock, _, inputs, attention = one_step("stock")
    cured, *_ = one_step("delta_dp")
    last = PARAMS.layers - 1  # both kernels give it the same q, k, v and dO
    parts = leak_gradients(attention.seen[last], inputs.x[last])
    for name, part in zip(("w_q", "w_k"), parts, strict=True):
        with_leak, without = (getattr(m.blocks[last], name).grad for m in (stock, cured))
        assert part.norm() > 0.01 * without.norm()
        torch.testing.assert_close(part, with_leak - without, rtol=1e-3, atol=2e-7)


def test_parts_of_an_update_sum_to_the_update() -> None:
    model, step, inputs, attention = one_step("stock")
    layer = Layer.of(model.blocks[0])
    before = model.blocks[0].w_q.detach().clone()
    e_q, _ = leak_gradients(attention.seen[0], inputs.x[0])
    layer.q.add(e_q, step.recipe)
    step.apply()
    leak, rest = layer.q.updates(step, model.blocks[0].w_q, 1e-3)
    assert leak.norm() > 0
    torch.testing.assert_close(leak + rest, model.blocks[0].w_q.detach() - before, rtol=1e-3, atol=1e-6)


def test_a_gradient_that_is_all_leak_leaves_no_rest() -> None:
    model, step, _, _ = one_step("stock")
    weight = model.blocks[0].w_k
    split = Split(torch.zeros_like(weight))
    split.add(weight.grad.clone(), step.recipe)
    step.apply()
    _, rest = split.updates(step, weight, 1e-3)
    assert float(rest.abs().max()) < 1e-8


def train_as_the_case(params: Params) -> Log:
    text = make_text(params.vocabulary)
    offsets = batch_offsets(CASE, 0, params.steps, params.batch, len(text) - params.context)
    model = fresh_model(CASE, params.size, 0)
    return train(model, text, offsets, kernel("stock"), params.recipe, params.size, CASE, 0)


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
