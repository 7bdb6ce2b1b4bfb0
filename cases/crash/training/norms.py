"""Spectral norms of weights: by decomposition on a CPU, by matrix products on an accelerator."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cases.crash.training.model import GPT

SQUARINGS = 12  # the next direction is left with (σ₂/σ₁)^8192 of its share
TINY = 1e-30  # keeps a matrix of zeros from dividing by zero


def spectral_norms(weights: Tensor) -> Tensor:
    """‖W‖₂ of each matrix, [..., R, C] → [...], in the weights' dtype; NaN where a weight is not finite."""
    finite = weights.isfinite()
    usable = torch.where(finite, weights, 0.0)
    on_cpu = weights.device.type == "cpu"
    norms = torch.linalg.matrix_norm(usable, ord=2) if on_cpu else norms_by_squaring(usable)
    return torch.where(finite.flatten(-2).all(-1), norms, math.nan)


def norms_by_squaring(weights: Tensor) -> Tensor:
    """‖W‖₂ of each matrix, [..., R, C] → [...], by matrix products alone, which an accelerator is made
    for and an SVD is not (bench/tools/benchmarks/gpt2_tokens.py times both).

    WᵀW to the power 2^SQUARINGS leaves the leading direction; its Rayleigh quotient is ‖W‖₂².
    """
    gram = weights.mT @ weights
    power = gram
    for _ in range(SQUARINGS):
        power = power / torch.linalg.matrix_norm(power, keepdim=True).clamp_min(TINY)
        power = power @ power
    best = torch.linalg.vector_norm(power, dim=-2).argmax(-1)  # the column least orthogonal to it
    v = power.gather(-1, best[..., None, None].expand(*power.shape[:-1], 1))  # [..., C, 1]
    quotient = (v * (gram @ v)).sum((-2, -1)) / v.square().sum((-2, -1)).clamp_min(TINY)
    return quotient.sqrt()


def weight_norms(model: GPT) -> dict[str, float]:
    """‖W_Q‖₂ and ‖W_K‖₂ of each layer, as `w_q_norm_0`; NaN where a weight is not finite."""
    names = [(name, layer) for name in ("w_q", "w_k") for layer in range(model.size.layers)]
    weights = torch.stack([getattr(model.blocks[layer], name).detach() for name, layer in names])
    norms = spectral_norms(weights).tolist()
    return {f"{name}_norm_{layer}": norm for (name, layer), norm in zip(names, norms, strict=True)}
