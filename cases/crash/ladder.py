"""`crash/ladder`: does training with this attention blow up, and at which step?"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from backends.base import Backend, Kernel, Unsupported
from bench.inputs import digest, tensor_bytes
from cases.base import BaseCase, CaseParams, Headline, Measurement, Metrics
from cases.crash.language import tokens
from cases.crash.model import Size, fresh_model, initial_weights
from cases.crash.train import (
    LEAK_WINDOW,
    Log,
    Recipe,
    batch_offsets,
    one_thread,
    spectral_norms,
    train,
)  # fmt: skip


class Params(CaseParams):
    """One training run. `mantissa_bits` and β are options of the kernel, not of the case."""

    seed: Annotated[int, Field(ge=0, lt=1024)] = 0  # of the weights, the batches, random rounding
    steps: Annotated[int, Field(ge=1, le=100_000)] = 1500
    lr: Annotated[float, Field(gt=0, le=1)] = 6e-3
    batch: Annotated[int, Field(ge=1, le=256)] = 4
    layers: Annotated[int, Field(ge=1, le=12)] = 3
    width: Annotated[int, Field(ge=8, le=248)] = 64  # and head_dim: there is one head
    context: Annotated[int, Field(ge=8, le=1024)] = 128
    mlp_ratio: Annotated[int, Field(ge=1, le=8)] = 2

    @property
    def size(self) -> Size:
        return Size(self.layers, self.width, self.context, self.mlp_ratio)


class Ladder(BaseCase):
    """Claim (arXiv 2510.04212): the error that O's rounding leaves in δ makes training explode. With
    fewer mantissa bits the same failure takes seconds instead of GPU-days, so that every fix can be
    tried; `delta_fp32` and `delta_dp` should hold, and the ablations tell what matters.

    Inputs: a small GPT (3 layers, width 64, one head) trained on `cases.crash.language`; weights and
    batch order from integers. All is FP32 except what the kernel rounds: meant for `eager-ladder`,
    whose option `mantissa_bits` is M. One row is one training run, with its curves: the seed is a
    parameter and `seeds` must be 1, so that a run that was cut off costs one run, and no mean over
    seeds hides a step.

    Metrics: `crash_step` by the rule of `cases.crash.detector` (inf: none), `steps_run`, `spikes`;
    best (moving average) and last loss; rowsum(dS) pooled over logged steps 100 to 400 (`leak_mean`,
    `leak_rms`, `leak_coherence` = Σ leak / Σ |leak|, also by layer); the last max |row-max score|,
    share of repeated row maxima, ‖W_Q‖₂ and ‖W_K‖₂. Curves: one point each ten steps.

    Verdict: `exploded@STEP`, `stable@STEPS`, or `spike` where the loss left its best by a nat and came
    back (or the run ended first). `stable` says nothing about later steps.
    """

    name = "crash/ladder"
    Params = Params
    outputs = ("loss",)
    headline = Headline("best_loss", "best loss, nats", "{:.2f}")

    def run(
        self, kernel: Kernel, backend: Backend, params: CaseParams, dtype: torch.dtype, seeds: int
    ) -> Measurement:
        assert isinstance(params, Params)
        if dtype != torch.float32:
            raise Unsupported("trains in float32: set params.dtype to float32")
        if seeds != 1:
            raise Unsupported("one row is one training run: set seeds to 1 and list params.seed")
        text, offsets = tokens(), _offsets(self.name, params)
        model = fresh_model(self.name, params.size, params.seed).to(backend.device)
        recipe = Recipe(params.steps, params.lr, params.batch)
        with one_thread():
            log = train(
                model, text.to(backend.device), offsets.to(backend.device), kernel, recipe,
                params.size, self.name, params.seed,
            )  # fmt: skip
        metrics = run_metrics(log)
        for layer, norms in enumerate(spectral_norms(model)):
            metrics |= {f"{weight}_norm_{layer}": norm for weight, norm in norms.items()}
        losses = torch.from_numpy(np.array(log.loss, dtype=np.float32))
        digests = {"inputs": self.inputs_digest(params, dtype, seeds), "loss": digest(losses)}
        return Measurement(metrics, digests, log.curves)

    def inputs_digest(self, params: CaseParams, dtype: torch.dtype, seeds: int) -> str:
        """sha256 over the text, the initial weights and the batch order."""
        assert isinstance(params, Params)
        h = hashlib.sha256(tensor_bytes(tokens()))
        for parameter, values in initial_weights(self.name, params.size, params.seed):
            h.update(f"{parameter} {tuple(values.shape)}".encode())
            h.update(tensor_bytes(values))
        h.update(tensor_bytes(_offsets(self.name, params)))
        return h.hexdigest()

    def verdict(self, params: CaseParams, metrics: Metrics) -> str:
        crash = metrics["crash_step"]
        if math.isfinite(crash):
            return f"exploded@{crash:.0f}"
        return "spike" if metrics["spikes"] > 0 else f"stable@{metrics['steps_run']:.0f}"


def _offsets(name: str, params: Params) -> Tensor:
    """Batch order, int64 [steps, batch]."""
    length = len(tokens()) - params.context
    return batch_offsets(name, params.seed, params.steps, params.batch, length)


def run_metrics(log: Log) -> Metrics:
    """What a finished run's log says; losses in nats, steps from 0."""
    detector = log.detector
    metrics = {
        "crash_step": math.inf if detector.crash is None else float(detector.crash),
        "spikes": float(detector.spikes),
        "steps_run": float(len(log.loss)),
        "best_loss": detector.best,
        "last_loss": log.loss[-1],
        "gradient_norm_last": log.gradient_norm[-1],
        "row_max_abs": log.curves["row_max_abs"][-1],
        "repeated_max_share": log.curves["repeated_max_share"][-1],
    }
    first, last = LEAK_WINDOW
    chosen = [leak for step, leak in zip(log.steps, log.leak, strict=True) if first <= step <= last]
    if not chosen:
        return metrics  # too short a run: no leak to speak of
    leak = torch.stack(chosen)  # [logs, layers, B·T]
    metrics |= {
        "leak_mean": float(leak.mean()),
        "leak_rms": float(leak.square().mean().sqrt()),
        "leak_coherence": _coherence(leak),
    }
    for layer in range(leak.shape[1]):
        metrics[f"leak_coherence_{layer}"] = _coherence(leak[:, layer])
    return metrics


def _coherence(leak: Tensor) -> float:
    """Σ leak / Σ |leak|, with its sign; 0 where there is none."""
    total = float(leak.abs().sum())
    return float(leak.sum()) / total if total else 0.0
