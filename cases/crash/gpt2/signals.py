"""What is looked at on the way: leak, row maxima, weight norms. Nothing here touches the training.

The leak is read as in `crash/ladder`: a channel with q 0, k `PROBE_KEY`, v 0 changes neither scores nor
output, and dq of that channel is rowsum(dS). GPT-2's heads fill their 64 channels, and fused kernels
take few widths, so the channel needs a wider head: an extra pass of one sequence through the same
weights, q, k and v padded with zeros to the next width (96 for 64), its gradients thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.bias.leak import PROBE_KEY
from cases.crash.model import GPT
from cases.crash.signals import REPEAT_TOL, probe_channels

# (layer, q, k, v [B, H, T, D], scale) → o: the kernel under test, outside autocast
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
SQUARINGS = 12  # the next direction is left with (σ₂/σ₁)^8192 of its share
TINY = 1e-30  # keeps a matrix of zeros from dividing by zero


class Probe:
    """Attention of one extra pass: the kernel with a probe channel, each layer's q kept for its dq."""

    def __init__(self, attend: Attend):
        self.attend = attend
        self.padded: list[Tensor] = []  # q [B, H, T, width] of each layer
        self.row_max_abs: list[float] = []  # a layer each; NaN where a row has one
        self.repeats: list[float] = []  # share of rows whose maximum repeats, a layer each
        self.scale = math.nan

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        head_dim = q.shape[-1]
        self.scale = head_dim**-0.5
        self._look(q.detach(), k.detach())
        extra = probe_channels(head_dim)
        channel = torch.zeros(extra, dtype=k.dtype, device=k.device)
        channel[0] = PROBE_KEY
        padded = F.pad(q, (0, extra))  # [B, H, T, width]
        self.padded.append(padded)
        k = torch.cat([k, channel.expand(*k.shape[:-1], extra)], dim=-1)
        return self.attend(layer, padded, k, F.pad(v, (0, extra)), self.scale)[..., :head_dim]

    def _look(self, q: Tensor, k: Tensor) -> None:
        with torch.autocast(q.device.type, enabled=False):
            row_max, repeated = row_maxima(q, k, self.scale)
        self.row_max_abs.append(float(row_max.abs().max()))
        self.repeats.append(float(repeated.double().mean()))

    def leaks(self, loss: Tensor, head_dim: int) -> Tensor:
        """rowsum(dS) of every layer, float64 [layers, B, H, T], for the gradient of `loss`."""
        gradients = torch.autograd.grad(loss, self.padded)
        channel = torch.stack([dq[..., head_dim] for dq in gradients])
        return channel.double() / (self.scale * PROBE_KEY)


def row_maxima(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal row maxima of the scaled scores, FP32 [B, H, T], and whether they repeat (bool)."""
    s = scale * (q.float() @ k.float().mT)  # [B, H, T, T]
    future = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    s = s.masked_fill(future, -math.inf)
    row_max = s.amax(-1)
    return row_max, (s >= row_max[..., None] - REPEAT_TOL).sum(-1) > 1


def probe(
    model: GPT, ids: Tensor, attend: Attend, autocast: AbstractContextManager[object]
) -> dict[str, float]:
    """Leak and row maxima of one extra pass over ids int64 [B, T + 1].

    Of each layer: mean leak, and mean |leak|, of the mean loss over these B·T tokens.
    """
    seen = Probe(attend)
    with autocast:
        logits = model(ids[:, :-1], seen)
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    leak = seen.leaks(loss, model.size.head_dim)
    point = {
        "leak_mean": float(leak.mean()),
        "leak_abs": float(leak.abs().mean()),
        "row_max_abs": float(torch.tensor(seen.row_max_abs).max()),  # NaN if one is
        "repeated_max_share": sum(seen.repeats) / len(seen.repeats),
    }
    for layer, values in enumerate(leak):
        point[f"leak_mean_{layer}"] = float(values.mean())
        point[f"leak_abs_{layer}"] = float(values.abs().mean())
    return point


def spectral_norms(weights: Tensor) -> Tensor:
    """‖W‖₂ of each matrix [N, R, C], FP32 [N], by matrix products alone, which an accelerator is made
    for and an SVD is not (bench/tools/benchmarks/gpt2_tokens.py times both).

    WᵀW to the power 2^SQUARINGS leaves the leading direction; its Rayleigh quotient is ‖W‖₂².
    """
    gram = weights.mT @ weights
    power = gram
    for _ in range(SQUARINGS):
        power = power / torch.linalg.matrix_norm(power, keepdim=True).clamp_min(TINY)
        power = power @ power
    best = torch.linalg.vector_norm(power, dim=1).argmax(-1)  # [N], the column least orthogonal to it
    v = power.gather(-1, best[:, None, None].expand(-1, power.shape[1], 1))  # [N, C, 1]
    quotient = (v * (gram @ v)).sum((1, 2)) / v.square().sum((1, 2)).clamp_min(TINY)
    return quotient.sqrt()


def weight_norms(blocks: Sequence[nn.Module] | nn.ModuleList) -> dict[str, float]:
    """‖W_Q‖₂ and ‖W_K‖₂ of each layer; NaN where a weight is not finite."""
    found = {}
    for name in ("w_q", "w_k"):
        weights = torch.stack([getattr(block, name).detach() for block in blocks])
        finite = weights.isfinite().all(-1).all(-1)
        norms = spectral_norms(torch.where(finite[:, None, None], weights, 0.0))
        for layer, norm in enumerate(torch.where(finite, norms, math.nan).tolist()):
            found[f"{name}_norm_{layer}"] = norm
    return found
