"""`bias/low_rank`: do δ errors of many steps add up, or average out?"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from backends.base import Backend, Kernel
from bench.measure.inputs import Inputs, key_of, normal, tensor_bytes, to_storage
from bench.measure.metrics import over_seeds
from bench.measure.reference import Reference
from cases.base import Case, CaseParams, Measurement, Metrics, Problem
from cases.bias.leak import PROBE_KEY
from cases.headline import Headline
from cases.passes import forward_backward
from cases.sinks import SCALE, sink_inputs

STEPS, TOKENS, KEYS, FEATURES = 64, 64, 32, 32


class Params(CaseParams):
    repeats: Annotated[int, Field(ge=1, le=16)] = 2
    gap: Annotated[float, Field(ge=0, le=80)] = 12.0
    row_jitter: Annotated[float, Field(ge=0, le=8)] = 0.5
    other_values: Literal["same_sign", "quiet"] = "same_sign"
    max_exponent: Annotated[float, Field(ge=0, le=1)] = 0.75  # between √n (0.5) and n (1)
    floor: Annotated[float, Field(ge=0, le=1)] = 1e-4  # of the drift over the true δ's


class LowRank(Case[Params]):
    """Claim (arXiv 2510.04212, section 3.1): the error of dW_Q is α Σ_T δ_err[T]·(PK)[T]ᵀX[T]; the
    pieces (PK)[T]ᵀX[T] are alike across tokens and steps, so a δ error of one sign grows like n in
    one direction instead of like √n.

    Inputs: 64 steps a seed, each a fresh problem as in `bias/leak` (64 tokens, 32 keys, two sinks),
    and tokens X = u + 0.5·N(0,1) around one direction u a seed. δ_err is read from the probe channel
    of the kernel's own backward pass, (PK) is the reference's.

    Metrics: `growth_exponent` = log(‖Σ_i G_i‖₂ / mean ‖G_i‖₂) / log n over n = 64 steps, 1 for a
    coherent sum and 0.5 for a random one; `rank1_share` = σ₁²/Σσ² of the sum (near 1 by construction:
    these inputs have one direction); `drift_over_delta`, its norm over the same sum made with δ itself;
    the curve `norm` over n.

    Verdict: `biased` if the exponent passes `max_exponent` and the drift passes `floor`.
    """

    name = "bias/low_rank"
    outputs = ("o", "dq", "dk", "dv")
    headline = Headline(
        "growth_exponent_mean",
        "growth of the summed dW_Q error, n^x",
        "{:.3f}",
        "growth_exponent_sem",
    )

    def inputs(self, params: Params, dtype: torch.dtype, seed: int) -> Inputs:
        return sink_inputs(
            self.name,
            seed,
            dtype,
            sinks=list(range(params.repeats)),
            gap=params.gap,
            row_jitter=params.row_jitter,
            value_sign="mixed",
            keys=KEYS,
            probe=PROBE_KEY,
            quiet_values=params.other_values == "quiet",
            batch=STEPS,
            queries=TOKENS,
        )

    def run(self, kernel: Kernel, backend: Backend, problem: Problem[Params]) -> Measurement:
        inputs, ref = problem.inputs, problem.reference
        grads = forward_backward(kernel, backend, inputs)
        delta_error = -grads.dq[..., 0].double() / (SCALE * PROBE_KEY)  # [seeds·STEPS, 1, T]
        x = problem.once(stacked_tokens)
        digests = grads.digests()
        if not delta_error.isfinite().all():
            names = (
                "growth_exponent_mean",
                "growth_exponent_sem",
                "growth_exponent_z",
                "rank1_share",
                "drift_over_delta",
                "drift_per_step",
            )
            return Measurement(dict.fromkeys(names, math.nan), digests)
        steps = step_gradients(delta_error, ref, x)  # [seeds, STEPS, D, FEATURES]
        singular = torch.linalg.svdvals(steps.cumsum(1))  # of the sum after n steps
        norm, total = singular[..., 0], singular[:, -1]
        single = torch.linalg.matrix_norm(steps, ord=2).mean(1)
        truth = torch.linalg.matrix_norm(step_gradients(ref.delta, ref, x).sum(1), ord=2)
        metrics = {
            **over_seeds("growth_exponent", (norm[:, -1] / single).log() / math.log(STEPS)),
            "rank1_share": float((total[:, 0] ** 2 / (total**2).sum(1)).mean()),
            "drift_over_delta": float((norm[:, -1] / truth).mean()),
            "drift_per_step": float(norm[:, -1].mean()) / STEPS,
        }
        return Measurement(metrics, digests, {"norm": norm.mean(0).tolist()})

    def hash_inputs(self, problem: Problem[Params]) -> str:
        """Covers the tokens X too."""
        h = hashlib.sha256(super().hash_inputs(problem).encode())
        for tokens in problem.once(stacked_tokens):
            h.update(tensor_bytes(tokens))
        return h.hexdigest()

    def verdict(self, params: Params, metrics: Metrics) -> str:
        exponent = metrics["growth_exponent_mean"]
        if not math.isfinite(metrics["drift_over_delta"]):
            return "out_of_range"
        grows = exponent > params.max_exponent and metrics["drift_over_delta"] > params.floor
        return "biased" if grows else "pass"


def stacked_tokens(problem: Problem[Params]) -> Tensor:
    """X of all seeds [seeds, STEPS, TOKENS, FEATURES], float64 from the storage dtype."""
    name = problem.case.name

    def of_seed(seed: int) -> Tensor:
        direction = normal(key_of(name, seed, "direction"), (FEATURES,))
        noise = normal(key_of(name, seed, "tokens"), (STEPS, TOKENS, FEATURES))
        return to_storage(direction + 0.5 * noise, problem.dtype).double()

    return torch.stack([of_seed(seed) for seed in range(problem.seeds)])


def step_gradients(delta: Tensor, ref: Reference, x: Tensor) -> Tensor:
    """α Σ_T δ[T]·(PK)[T]ᵀX[T] of every step.

    delta [seeds·STEPS, 1, T], x [seeds, STEPS, T, FEATURES] → [seeds, STEPS, D, FEATURES]
    """
    pk = (ref.p @ ref.k)[:, 0].unflatten(0, x.shape[:2])  # [seeds, STEPS, T, D]
    weighted = ref.scale * delta[:, 0].unflatten(0, x.shape[:2])[..., None] * pk
    return weighted.mT @ x
