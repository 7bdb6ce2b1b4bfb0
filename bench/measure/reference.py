"""The measuring stick: FP64 attention with analytic gradients, on the host, never tiled.

Takes the quantised inputs, upcasts them and evaluates the textbook formulas. It never calls a kernel
under test. Notation: S = αQKᵀ, P = softmax(S), O = PV, dP = dO Vᵀ, δ = rowsum(dO∘O),
dS = P∘(dP − δ), dQ = α dS K, dK = α dSᵀ Q, dV = Pᵀ dO.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bench.measure.inputs import Inputs


@dataclass(frozen=True)
class Reference:
    """Everything in float64 on the host. T queries, S keys, D head dim; k and v expanded to Hq heads."""

    q: Tensor  # [B, Hq, T, D]
    k: Tensor  # [B, Hq, S, D]
    v: Tensor  # [B, Hq, S, D]
    do: Tensor  # [B, Hq, T, D]
    scale: float
    groups: int  # Hq / Hkv
    scores: Tensor  # [B, Hq, T, S]; masked entries -inf
    row_max: Tensor  # [B, Hq, T, 1]
    p: Tensor  # [B, Hq, T, S]
    o: Tensor  # [B, Hq, T, D]
    lse: Tensor  # [B, Hq, T]

    @cached_property
    def unnormalized_o(self) -> Tensor:
        """Σ exp(S − row_max)·V: what a kernel that stores its accumulator rounds first. [B, Hq, T, D]"""
        return self.o * torch.exp(self.lse[..., None] - self.row_max)

    @cached_property
    def delta(self) -> Tensor:
        """rowsum(dO∘O), [B, Hq, T]."""
        return (self.do * self.o).sum(-1)

    @cached_property
    def ds(self) -> Tensor:
        """Gradient of the scores, [B, Hq, T, S]; every row sums to 0."""
        dp = self.do @ self.v.mT
        return self.p * (dp - self.delta[..., None])

    @cached_property
    def dq(self) -> Tensor:
        """[B, Hq, T, D]"""
        return self.scale * (self.ds @ self.k)

    @cached_property
    def dk(self) -> Tensor:
        """[B, Hkv, S, D]"""
        return self._fold(self.scale * (self.ds.mT @ self.q))

    @cached_property
    def dv(self) -> Tensor:
        """[B, Hkv, S, D]"""
        return self._fold(self.p.mT @ self.do)

    def _fold(self, grad: Tensor) -> Tensor:
        b, hq, s, d = grad.shape
        return grad.view(b, hq // self.groups, self.groups, s, d).sum(2)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """True where query i may see key j: j <= i (top-left aligned, as PyTorch's `is_causal`). [T, S]"""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


def attention_reference(inputs: Inputs) -> Reference:
    """Evaluate FP64 attention on `inputs`; gradients are computed when first asked for."""
    q, k, v, do = (x.cpu().double() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = 1 / math.sqrt(q.shape[-1]) if inputs.scale is None else inputs.scale
    scores = scale * (q @ k.mT)  # [B, Hq, T, S]
    if inputs.causal:
        allowed = causal_mask(q.shape[2], k.shape[2], scores.device)
        scores = scores.masked_fill(~allowed, -torch.inf)
    row_max = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - row_max)
    total = p.sum(-1, keepdim=True)
    p = p / total
    lse = (row_max + total.log()).squeeze(-1)
    return Reference(q, k, v, do, scale, groups, scores, row_max, p, p @ v, lse)
