"""`crash/drift`: does the δ error of a kernel move W_Q where the exact gradient is zero?"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from backends.base import Backend, Call, Kernel
from bench.measure.inputs import (
    Float64Array,
    Inputs,
    digest,
    key_of,
    normal,
    signs,
    tensor_bytes,
    to_storage,
)
from bench.measure.metrics import over_seeds, ratio
from bench.measure.numerics import FORMATS, ulp
from bench.measure.reference import attention_reference
from cases.algorithms import one_thread
from cases.base import MAX_ERROR_ULP, Case, CaseParams, Measurement, Metrics, Problem
from cases.bias.leak import PROBE_KEY
from cases.crash.training.norms import spectral_norms
from cases.headline import Headline
from cases.passes import forward_backward
from cases.sinks import HEAD_DIM, SCALE, SINK, sink_inputs

TOKENS, KEYS, FEATURES = 64, 32, 32
TOKEN_NOISE = 0.25  # of each feature; row maxima then vary by gap·0.25/√32, 0.5 at gap 12
BETAS = (0.9, 0.95)  # the paper's
DELTA = HEAD_DIM * 1e-2 * 2.3  # δ of `sink_inputs`: the gradient is divided by it
CURVE_POINTS = 25
MAX_HELD = 0.1  # of full speed: what `holds` may hide, the random walk of 100 steps
Gradient = Callable[[int, Inputs], tuple[Tensor, Tensor]]  # step, problem → o, dq


class Params(CaseParams):
    repeats: Annotated[int, Field(ge=1, le=16)] = 2
    gap: Annotated[float, Field(gt=0, le=80)] = 12.0
    values: Literal["fresh", "fixed"] = "fresh"  # keys, values and dO: anew each step, or the same
    other_values: Literal["same_sign", "quiet"] = "same_sign"  # of the tokens that are no sinks
    steps: Annotated[int, Field(ge=10, le=500)] = 100
    lr: Annotated[float, Field(gt=0, le=1)] = 1e-3
    eps: Annotated[float, Field(gt=0, le=1)] = 2.0**-13  # AdamW's, in relative errors of δ
    max_ratio: Annotated[float, Field(ge=1, le=1e6)] = 500.0  # of the drift over the FP32 run's
    min_walk: Annotated[float, Field(ge=1, le=20)] = 2.5  # of the summed leak over a random walk's
    min_speed: Annotated[float, Field(ge=0, le=1)] = 0.04  # of a drift; a slower one creeps

    @property
    def planted(self) -> Params:
        """What the inputs depend on: the same for every optimiser and threshold."""
        names = {"repeats", "gap", "values", "other_values", "steps"}
        return Params(**self.model_dump(include=names))


@dataclass(frozen=True)
class Layer:
    """Tokens of every step and the query projection at the start; float64 on BF16's grid."""

    tokens: Tensor  # X [seeds, steps, T, F]
    w_q: Tensor  # [seeds, F, D]
    direction: Tensor  # u [seeds, F], ±1: the tokens' mean


@dataclass(frozen=True)
class Path:
    """Where W_Q went."""

    leak: Tensor  # rowsum(dS)/δ [steps, seeds, T]
    steps: list[int]  # logged: after so many
    w_q: Tensor  # [points, seeds, F, D]
    row_max: list[float]  # mean over rows, before the logged step
    error_ulp: float  # mean |error| of O in the last step

    def drift(self, direction: Tensor, lr: float) -> Tensor:
        """Change of the planted channel along u, in learning rates a coordinate. [points, seeds]"""
        channel = self.w_q[..., 0]  # 0 at the start
        return (channel * direction).mean(-1) / lr


class Drift(Case[Params]):
    """Claim (arXiv 2510.04212, section 3; issue 4): a δ error of one sign adds up in W_Q, step by step,
    along a direction in which the exact gradient is zero, and AdamW makes each step a full one.

    Planted: one head; q = X·W_Q with tokens X = u + 0.25·N(0,1); `repeats` sink keys, identical, that
    hold each row's maximum (about `gap`), with different values; dO along the values. Channel 0 of
    every key is 4 and W_Q's channel 0 starts at 0: it adds the same number to all scores of a row, so
    softmax, O and the loss do not depend on it and its gradient Xᵀ·(α·4·rowsum(dS)) is exactly 0. What
    trains it is the kernel's δ error. W_Q is FP64 and trained by AdamW (no weight decay) on the host:
    only the kernel rounds. The other channels are trained too; their true gradient is e^-gap small.
    `fresh`: keys, values and dO are drawn anew each step, so only an error with a preferred sign adds
    up; `fixed`: they stay, as sinks do in training, and an error that merely repeats adds up too.

    `eps`: AdamW divides by √v + eps, so below eps an error moves W_Q in proportion to its size, above
    it by a whole learning rate a step, however small it is. The gradient is divided by α·4·|δ|, which
    makes it the relative error of δ: stock BF16 kernels have 1e-4 to 2e-3, FP32 1e-9 to 1e-8 (mean
    over tokens). 2^-13 = 1.2e-4 lies between; with 1e-8 FP32's dust drifts as well (docs/crash.md).

    Metrics: `drift` = change of channel 0 along u a step, in learning rates: ±1 = one-sided at full
    speed, 1/√steps = a random walk at full speed; `drift_abs` without its sign; `drift_over_fp32`, its
    rms over seeds over that of the same training with plain FP32 attention on the host (`fp32_…`);
    `walk_ratio` = |Σ leak|/√Σ leak² over steps, rms over seeds: 1 random, √steps directed;
    `leak_over_delta`; growth of ‖W_Q‖₂ and of the row maxima (logits).

    Verdict: `holds` if the drift stays within `max_ratio` of the FP32 run's. Beyond it `wanders` where the
    leak has no lasting sign (`walk_ratio` below `min_walk`; sixteen seeds of a random walk pass 2.5
    with a probability below 1e-13), else `drifts`, or `creeps` below `min_speed`. `inconclusive` for
    one seed, or where FP32 itself moves so fast that `max_ratio` times as much is a tenth of full
    speed (eps too small); `out_of_range` where W_Q is not finite or O is wrong.
    """

    name = "crash/drift"
    outputs = ("w_q",)
    headline = Headline(
        "drift_abs_mean",
        "drift of W_Q where the gradient is 0, learning rates a step",
        "{:.4f}",
        "drift_abs_sem",
    )
    subject = "drift"
    told_at = {
        "dtype": "bfloat16",
        "repeats": 2,
        "gap": 12.0,
        "values": "fresh",
        "other_values": "same_sign",
        "eps": 2.0**-13,
    }

    def inputs(self, params: Params, dtype: torch.dtype, seed: int) -> Inputs:
        """The problems of a seed; q is that of the W_Q of the start."""
        problems = params.steps if params.values == "fresh" else 1
        planted = sink_inputs(
            self.name,
            seed,
            dtype,
            sinks=list(range(params.repeats)),
            gap=params.gap,
            row_jitter=0.0,
            value_sign="mixed",
            keys=KEYS,
            probe=PROBE_KEY,
            batch=problems,
            queries=TOKENS,
            quiet_values=params.other_values == "quiet",
        )
        layer = plant_layer(self.name, params, seed)
        return replace(planted, q=queries(layer.tokens[:problems], layer.w_q, dtype))

    def values(self, params: Params) -> int:
        a_step = TOKENS * FEATURES + 2 * (TOKENS + KEYS) * HEAD_DIM
        return params.steps * a_step + FEATURES * HEAD_DIM

    def made_from(self, params: Params) -> Params:
        return params.planted

    def hash_inputs(self, problem: Problem[Params]) -> str:
        """Covers the tokens and W_Q too."""
        layer = problem.once(planted_layer)
        h = hashlib.sha256(super().hash_inputs(problem).encode())
        for tensor in (layer.tokens, layer.w_q):
            h.update(tensor_bytes(tensor))
        return h.hexdigest()

    def run(self, kernel: Kernel, backend: Backend, problem: Problem[Params]) -> Measurement:
        params, layer = problem.params, problem.source.once(planted_layer)

        def measured(step: int, inputs: Inputs) -> tuple[Tensor, Tensor]:
            found = forward_backward(_reseeded(kernel, self.name, step), backend, inputs)
            return found.o, found.dq

        with one_thread():
            plain = problem.once(plain_path)
            path = descend(layer, problem.inputs, measured, params, problem.dtype)
        drift, fp32_drift = (p.drift(layer.direction, params.lr) for p in (path, plain))
        metrics = drift_metrics(path, drift[-1] / params.steps, fp32_drift[-1] / params.steps)
        norm, start = (spectral_norms(w).mean(-1) for w in (path.w_q, layer.w_q))  # over seeds
        metrics |= {"w_q_norm": float(norm[-1]), "w_q_norm_growth": float(norm[-1] - start)}
        series = {
            "step": [float(step) for step in path.steps],
            "drift": drift.mean(1).tolist(),
            "drift_abs": drift.abs().mean(1).tolist(),
            "fp32_drift_abs": fp32_drift.abs().mean(1).tolist(),
            "leak_over_delta": path.leak.mean((1, 2))[[s - 1 for s in path.steps]].tolist(),
            "w_q_norm": norm.tolist(),
            "row_max": path.row_max,
        }
        return Measurement(metrics, {"w_q": digest(path.w_q[-1])}, series)

    def call(self, problem: Problem[Params], device: torch.device) -> Call:
        """One step of all seeds."""
        q_shape, kv_shape = ((problem.seeds, 1, length, HEAD_DIM) for length in (TOKENS, KEYS))
        return Call(q_shape, kv_shape, problem.dtype, device, causal=False)

    def verdict(self, params: Params, metrics: Metrics) -> str:
        finite = math.isfinite(metrics["drift_abs_mean"])
        if not finite or not metrics["abs_ulp_mean"] <= MAX_ERROR_ULP:
            return "out_of_range"
        if metrics["drift_over_fp32"] <= params.max_ratio:
            tells = params.max_ratio * metrics["fp32_drift_abs_mean"] <= MAX_HELD
            return "holds" if tells else "inconclusive"
        if math.isnan(metrics["drift_abs_sem"]):
            return "inconclusive"
        if metrics["walk_ratio"] < params.min_walk:
            return "wanders"
        return "drifts" if metrics["drift_abs_mean"] >= params.min_speed else "creeps"


def plant_layer(name: str, params: Params, seed: int) -> Layer:
    """Tokens and weights of one seed, without the seed dimension; on BF16's grid for every dtype."""

    def noise(stream: str, *shape: int) -> Float64Array:
        return normal(key_of(name, seed, stream), shape)

    u = signs(key_of(name, seed, "direction"), (FEATURES,))
    tokens = u + TOKEN_NOISE * noise("tokens", params.steps, TOKENS, FEATURES)
    w_q = 0.5 / math.sqrt(FEATURES) * noise("w_q", FEATURES, HEAD_DIM)
    w_q[:, :8] = 0
    w_q[:, 1] = u * (params.gap / (SCALE * SINK * FEATURES))  # X·W_Q ≈ gap/(α·4): the sinks' score
    x, w = (to_storage(values, torch.bfloat16).double() for values in (tokens, w_q))
    return Layer(x, w, torch.from_numpy(u))


def queries(tokens: Tensor, w_q: Tensor, dtype: torch.dtype) -> Tensor:
    """X·W_Q rounded once. tokens [B, T, F], w_q [F, D] or [B, F, D], float64 → [B, 1, T, D].

    At the start both factors are on BF16's grid, so the sum is exact and its bits are the same on
    every machine; later W_Q is FP64 and its last bits are the machine's own.
    """
    return to_storage((tokens @ w_q).numpy(), dtype)[:, None]


def _reseeded(kernel: Kernel, name: str, step: int) -> Kernel:
    """The kernel with fresh random bits for each step after the first, where it draws any."""
    if step == 0 or not kernel.draws:
        return kernel
    return kernel.reseeded(key_of(name, "rounding", kernel.options.model_dump()["seed"], step))


def descend(layer: Layer, inputs: Inputs, gradient: Gradient, params: Params, dtype: torch.dtype) -> Path:
    """Train W_Q by AdamW for `params.steps` steps; `gradient` gives O and dQ of a step's problem.

    inputs hold the problems of all seeds, [seeds·problems, 1, T, D]; every seed trains its own W_Q.
    """
    w_q, seeds = layer.w_q.clone(), len(layer.w_q)
    k, v, do = (x.unflatten(0, (seeds, -1)) for x in (inputs.k, inputs.v, inputs.do))
    optimizer = torch.optim.AdamW([w_q], lr=params.lr, betas=BETAS, eps=params.eps, weight_decay=0.0)
    every = math.ceil(params.steps / CURVE_POINTS)
    leak, weights, row_max, logged = [], [], [], []
    error_ulp = math.nan
    for step in range(params.steps):
        x, at = layer.tokens[:, step], step % k.shape[1]  # `fixed` has one problem
        problem = replace(
            inputs, q=queries(x, w_q, dtype), k=k[:, at], v=v[:, at], do=do[:, at]
        )  # [seeds, 1, T, D]
        o, dq = gradient(step, problem)
        relative = dq[:, 0].double() / (SCALE * PROBE_KEY * DELTA)  # [seeds, T, D]
        leak.append(relative[..., 0])
        w_q.grad = x.mT @ relative / TOKENS  # [seeds, F, D]
        optimizer.step()
        if (step + 1) % every == 0 or step + 1 == params.steps:
            ref = attention_reference(problem)
            logged.append(step + 1)
            weights.append(w_q.clone())
            row_max.append(float(ref.row_max.mean()))
            error_ulp = float(((o.double() - ref.o) / ulp(ref.o, FORMATS[dtype])).abs().mean())
    return Path(torch.stack(leak), logged, torch.stack(weights), row_max, error_ulp)


def plain_attention(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """O and dQ as flash attention computes them, nothing rounded below FP32 (host, untiled).

    P from the stored LSE, δ = rowsum(dO∘O), dS = P∘(dP − δ), dQ = α dS K; all [B, 1, T, D] FP32.
    """
    q, k, v, do = (x.float() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    scores = SCALE * (q @ k.mT)  # [B, 1, T, S]
    row_max = scores.amax(-1, keepdim=True)
    unnormalized = torch.exp(scores - row_max)
    total = unnormalized.sum(-1, keepdim=True)
    o = unnormalized @ v / total
    p = torch.exp(scores - (row_max + total.log()))
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
    return o, SCALE * (ds @ k)


def drift_metrics(path: Path, drift: Tensor, fp32_drift: Tensor) -> Metrics:
    """What a run says; drift and fp32_drift [seeds], in learning rates a step."""
    leak = path.leak.mean(-1)  # of a step, [steps, seeds]
    walk = leak.sum(0).square() / leak.square().sum(0)  # 1 for a random walk, `steps` for a directed one
    return {
        **over_seeds("drift", drift),
        **over_seeds("drift_abs", drift.abs()),
        "drift_over_fp32": ratio(_rms(drift), _rms(fp32_drift)),
        "fp32_drift_abs_mean": float(fp32_drift.abs().mean()),
        "walk_ratio": float(walk.nan_to_num(nan=0.0).mean().sqrt()),  # no leak at all: 0/0
        **over_seeds("leak_over_delta", leak.mean(0)),
        "leak_over_delta_rms": _rms(path.leak),
        "row_max": path.row_max[-1],
        "row_max_growth": path.row_max[-1] - path.row_max[0],
        "abs_ulp_mean": path.error_ulp,
    }


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def planted_layer(problem: Problem[Params]) -> Layer:
    """The layers of all seeds as one, with the seed dimension."""
    layers = [plant_layer(problem.case.name, problem.params, seed) for seed in range(problem.seeds)]
    names = ("tokens", "w_q", "direction")
    return Layer(*(torch.stack([getattr(layer, name) for layer in layers]) for name in names))


def plain_path(problem: Problem[Params]) -> Path:
    """The FP32 run on the same inputs; shared between kernels."""
    layer = problem.source.once(planted_layer)
    return descend(
        layer, problem.inputs, lambda step, inputs: plain_attention(inputs), problem.params, problem.dtype
    )
