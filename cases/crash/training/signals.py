"""What is seen of attention in the steps that are looked at. Nothing here touches the training."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from bench.measure.metrics import signed_coherence
from cases.crash.training.attention import Seen

REPEAT_TOL = 1e-3  # the paper's: entries this close to the row maximum repeat it


def causal_scores(seen: Seen) -> Tensor:
    """Scaled scores in FP32, [B, H, T, T]; −Inf above the diagonal."""
    future = torch.ones(seen.q.shape[-2], seen.k.shape[-2], dtype=torch.bool, device=seen.q.device).triu(1)
    return (seen.scale * (seen.q.float() @ seen.k.float().mT)).masked_fill_(future, -math.inf)


def row_maxima(scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Row maxima of scores [B, H, T, T], FP32 [B, H, T, 1], and what is said of them: `row_max_abs`, max
    |row-max score| (NaN if one is), `repeated_max_share`, share of rows whose maximum repeats."""
    row_max = scores.amax(-1, keepdim=True)
    repeats = (scores >= row_max - REPEAT_TOL).sum(-1) > 1
    return row_max, {"row_max_abs": row_max.abs().max(), "repeated_max_share": repeats.double().mean()}


@torch.no_grad()
def signals(seen: Seen, leak: Tensor) -> dict[str, Tensor]:
    """What may warn of a crash, of one layer and its `leak`: scalars, FP32, the worst head's.

    Those of `row_maxima` (over all heads). `key_mean_ratio`: |mean key| / mean |key|. `max_p_mean`: mean over
    rows of the largest P. `leak_share`: Σ|rowsum dS| / Σ|dS|, with dS from FP32 scores and the δ that fits.
    """
    assert seen.do is not None
    k, v, do = (x.float() for x in (seen.k, seen.v, seen.do))
    s = causal_scores(seen)
    row_max, of_rows = row_maxima(s)
    p = torch.exp(s - row_max)
    total = p.sum(-1, keepdim=True)
    p /= total
    dp = do @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    size = ds.abs().sum((0, 2, 3))  # [H]
    return of_rows | {
        "key_mean_ratio": (k.mean((0, 2)).norm(dim=-1) / k.norm(dim=-1).mean((0, 2))).max(),
        "max_p_mean": (1 / total).mean((0, 2, 3)).max(),
        "leak_share": (leak.float().abs().sum((0, 2)) / size).max(),
    }


def over_layers(layers: Iterable[dict[str, Tensor]]) -> dict[str, float]:
    """The worst layer's value of each signal (NaN if one is), the mean of `repeated_max_share`."""
    found = list(layers)
    by_signal = {name: torch.stack([layer[name] for layer in found]) for name in found[0]}
    share = float(by_signal.pop("repeated_max_share").mean())
    return {name: float(x.max()) for name, x in by_signal.items()} | {"repeated_max_share": share}


def coherence_by_head(leak: Tensor) -> Tensor:
    """Coherence of each layer and head, [layers, H], of leaks [logs, layers, B, H, T] taken together.

    Heads leak to either side, so that a mean over all of them can hide what each one does.
    """
    return signed_coherence(leak, (0, 2, 4))


def largest(values: Tensor) -> float:
    """The value of the largest size, with its sign; NaN where there is one."""
    return float(values.flatten()[values.abs().argmax()])
