"""`crash/ladder`: does training with this attention blow up, and at which step?"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from backends.base import Backend, Call, Kernel, Unsupported
from bench.files.load import Found
from bench.measure.inputs import tensor_bytes
from bench.measure.numerics import FORMATS
from cases.algorithms import algorithms, one_thread
from cases.base import Case, CaseParams, Measurement, Metrics, Problem
from cases.crash.documents import documents
from cases.crash.language import tokens
from cases.crash.runs import Group, groups
from cases.crash.training.loop import Watch, train
from cases.crash.training.model import Size, fresh_model, hash_weights, initial_weights
from cases.crash.training.norms import weight_norms
from cases.crash.training.outcome import leak_of_tensors, run_metrics, training_verdict
from cases.crash.training.recipe import Recipe
from cases.crash.training.text_trainer import TextTrainer, batch_offsets
from cases.headline import Headline

MAX_HEAD_DIM = 248  # the kernels take 256, and the probe needs a channel


class Params(CaseParams):
    """One training run. `mantissa_bits` and β are options of the kernel, not of the case."""

    added_later: ClassVar[frozenset[str]] = frozenset(
        {"heads", "vocabulary", "warmup", "log_every", "stop_after_explosion"}
    )

    seed: Annotated[int, Field(ge=0, lt=1024)] = 0  # of the weights, the batches, random rounding
    steps: Annotated[int, Field(ge=1, le=100_000)] = 1500
    lr: Annotated[float, Field(gt=0, le=1)] = 6e-3
    batch: Annotated[int, Field(ge=1, le=256)] = 4
    layers: Annotated[int, Field(ge=1, le=12)] = 3
    width: Annotated[int, Field(ge=8, le=1024)] = 64
    context: Annotated[int, Field(ge=8, le=1024)] = 128
    mlp_ratio: Annotated[int, Field(ge=1, le=8)] = 2
    heads: Annotated[int, Field(ge=1, le=16)] = 1
    vocabulary: Literal[64, 1024, 8192] = 64  # 64: `language`; more: `documents`
    warmup: Annotated[int, Field(ge=1, le=10_000)] = 100  # steps
    log_every: Annotated[int, Field(ge=1, le=1000)] = 10  # steps a point of the curves, at least
    stop_after_explosion: bool = True

    @model_validator(mode="after")
    def _heads_fit(self) -> Params:
        if self.width % self.heads or self.width // self.heads > MAX_HEAD_DIM:
            raise ValueError(
                f"width: {self.width} in {self.heads} heads; it must be a multiple of heads, "
                f"at most {MAX_HEAD_DIM} a head"
            )
        return self

    @property
    def size(self) -> Size:
        return Size(self.layers, self.width, self.context, self.mlp_ratio, self.vocabulary, self.heads)

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.steps, self.batch, self.lr, self.warmup)


class Ladder(Case[Params]):
    """Claim (arXiv 2510.04212): the error that O's rounding leaves in δ makes training explode. With
    fewer mantissa bits the same failure takes seconds instead of GPU-days, so that every fix can be
    tried; `delta_fp32` and `delta_dp` should hold, and the ablations tell what matters.

    Inputs: a small GPT (3 layers, width 64, one head) trained on `cases.crash.language`, or a larger
    one on `cases.crash.documents`; weights and batch order from integers. Meant for `eager-ladder`,
    whose option `mantissa_bits` is M; in bfloat16 any kernel can be trained with that takes the head_dim and
    a wider one for the probe. In float32 all but what the
    kernel rounds is FP32, and M may be 1 to 10 and more. In bfloat16 weights and optimiser are FP32
    and the forward pass is autocast, so that the kernel gets BF16 q, k and v; M is 1 to 7 there.
    One row is one training run, with its curves: the seed is a parameter and `seeds` must be 1, so
    that a run that was cut off costs one run, and no mean over seeds hides a step.

    Metrics: `crash_step` by the rule of `cases.crash.training.detector` (inf: none), `steps_run`, `spikes`;
    best (moving average) and last loss; rowsum(dS) pooled over logged steps 100 to 400 (`leak_mean`,
    `leak_rms`, `leak_coherence` = Σ leak / Σ |leak|, also by layer and of each layer's most one-sided
    head); the last max |row-max score|, share of repeated row maxima, ‖W_Q‖₂ and ‖W_K‖₂ (on a device,
    where losses are read late, of up to `log_every` − 1 steps past an explosion). Curves: one point
    each `log_every` steps, 499 at most.

    Verdict: `exploded@STEP`, `stable@STEPS`, or `spike` where the loss left its best by a nat and came
    back (or the run ended first). `stable` says nothing about later steps.
    """

    name = "crash/ladder"
    outputs = ("loss",)
    headline = Headline("best_loss", "best loss, nats", "{:.2f}")
    subject = "crash"

    def run(self, kernel: Kernel, backend: Backend, problem: Problem[Params]) -> Measurement:
        params, dtype = problem.params, problem.dtype
        _refuse(kernel, dtype, problem.seeds)
        device = backend.device
        model = fresh_model(self.name, params.size, params.seed).to(device)
        text = make_text(params.vocabulary).to(device)
        offsets = _offsets(self.name, params).to(device)
        graph = device.type == "cuda" and not kernel.draws
        stream = (self.name, params.seed)
        trainer = TextTrainer(model, kernel, params.recipe, stream, dtype, text, offsets, graph)
        watch = Watch(
            params.log_every,
            read_every=1 if device.type == "cpu" else 0,
            stop_after_explosion=params.stop_after_explosion,
        )
        with one_thread(), algorithms(deterministic=True):
            log = train(trainer, watch)
        metrics = run_metrics(log) | leak_of_tensors(log.leak) | weight_norms(model)
        return Measurement(metrics, {"loss": log.loss_digest()}, log.curves)

    def hash_inputs(self, problem: Problem[Params]) -> str:
        """sha256 over the text, the initial weights and the batch order; the same for every dtype."""
        params = problem.params
        h = _hash_of_model(self.name, params.size, params.seed).copy()
        h.update(tensor_bytes(_offsets(self.name, params)))
        return str(h.hexdigest())

    def values(self, params: Params) -> int:
        size = params.size
        blocks = size.layers * (4 + 2 * size.mlp_ratio) * size.width**2
        return blocks + (size.vocabulary + size.context) * size.width + params.steps * params.batch

    def call(self, problem: Problem[Params], device: torch.device) -> Call:
        """Attention of one layer; in float32 the probe is one of its channels."""
        params = problem.params
        head_dim = params.size.head_dim + (problem.dtype == torch.float32)
        shape = (params.batch, params.heads, params.context, head_dim)
        return Call(shape, shape, problem.dtype, device, causal=True)

    def verdict(self, params: Params, metrics: Metrics) -> str:
        return training_verdict(metrics)

    def overview(self, found: Sequence[Found]) -> list[Group]:
        return groups(found)


def _refuse(kernel: Kernel, dtype: torch.dtype, seeds: int) -> None:
    if seeds != 1:
        raise Unsupported("one row is one training run: set seeds to 1 and list params.seed")
    if dtype == torch.float16:
        raise Unsupported("trains in float32 or bfloat16: float16 would need loss scaling")
    bits, own = getattr(kernel.options, "mantissa_bits", None), FORMATS[dtype].mantissa_bits
    if bits is not None and bits > own:
        raise Unsupported(f"mantissa_bits {bits}: {dtype} stores {own}; set params.dtype to float32")


def make_text(vocabulary: int) -> Tensor:
    """Token ids [length] of the language with this vocabulary."""
    return tokens() if vocabulary == 64 else documents(vocabulary)


def _offsets(name: str, params: Params) -> Tensor:
    """Batch order, int64 [steps, batch]."""
    length = len(make_text(params.vocabulary)) - params.context
    return batch_offsets(name, params.seed, params.steps, params.batch, length)


@lru_cache(maxsize=4)
def _hash_of_model(name: str, size: Size, seed: int) -> Any:
    """sha256 so far: text, initial weights. Copy it before updating."""
    h = hashlib.sha256(tensor_bytes(make_text(size.vocabulary)))
    hash_weights(h, initial_weights(name, size, seed))
    return h
