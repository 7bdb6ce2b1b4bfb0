"""Attention as the ladder trains with it, and what is seen of it in the steps that are looked at.

The leak is rowsum(dS), 0 in exact arithmetic, read from a probe channel (q 0, k `PROBE_KEY`, v 0, as in
`bias/leak`) that changes neither scores nor output: dq of that channel is PROBE_KEY·scale·rowsum(dS).
In FP32 runs the probe is part of the attention that trains, so that the leak is that of the very
backward pass; in BF16 runs a second call with the same q, k, v and dO has it, and training stays as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.base import Kernel
from bench.measure.inputs import key_of
from cases.bias.leak import PROBE_KEY

WIDTHS = (16, 32, 64, 96, 128, 256)  # head_dims that every fused kernel takes
REPEAT_TOL = 1e-3  # the paper's: entries this close to the row maximum repeat it


@dataclass
class Seen:
    """What one layer's attention was given, [B, H, T, D]; detached."""

    kernel: Kernel
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    do: Tensor | None = None
    leak: Tensor | None = None  # [B, H, T], from the probe of an FP32 run


@dataclass
class Attention:
    """The attention of one step: (layer, q, k, v) → o. `look` keeps what `signals` needs."""

    kernel: Kernel
    stream: tuple[str | int, ...] = ()  # names the step's random bits, for kernels that draw some
    probe: bool = True
    look: bool = False
    seen: dict[int, Seen] = field(default_factory=dict)  # by layer

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        kernel = reseeded(self.kernel, *self.stream, layer)
        if self.look:
            self.seen[layer] = Seen(kernel, q.detach(), k.detach(), v.detach(), scale)
        if self.probe:
            o = self._probed(layer, kernel, q, k, v, scale)
        else:
            o = kernel(q, k, v, causal=True, scale=scale)
        if self.look:
            o.register_hook(lambda do: setattr(self.seen[layer], "do", do.detach()))
        return o

    def _probed(self, layer: int, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        padded = F.pad(q, (0, 1))  # [B, H, T, D + 1]
        if self.look:
            padded.register_hook(
                lambda dq: setattr(self.seen[layer], "leak", dq[..., -1] / (scale * PROBE_KEY))
            )
        k, v = F.pad(k, (0, 1), value=PROBE_KEY), F.pad(v, (0, 1))
        return kernel(padded, k, v, causal=True, scale=scale)[..., :-1]


def reseeded(kernel: Kernel, *stream: str | int) -> Kernel:
    """The kernel with random bits of their own for `stream` (which names step and layer), where it draws
    any; its own seed, where that is not 0, is part of the name."""
    own = kernel.options.model_dump().get("seed")
    return kernel.reseeded(key_of(*stream, own) if own else key_of(*stream))


def probe_channels(head_dim: int) -> int:
    """Channels to add, the probe among them, so that fused kernels take the head; 0: there is none."""
    return next((width - head_dim for width in WIDTHS if width > head_dim), 0)


def leak_of(seen: Seen) -> Tensor:
    """rowsum(dS) [B, H, T] of the backward pass, FP32."""
    if seen.leak is not None:
        return seen.leak.detach()
    assert seen.do is not None
    dim = seen.q.shape[-1]
    pad = (0, probe_channels(dim))
    k, v, do = (F.pad(x, pad) for x in (seen.k, seen.v, seen.do))
    k[..., dim] = PROBE_KEY
    with torch.enable_grad():
        q = F.pad(seen.q, pad).requires_grad_()
        o = seen.kernel(q, k, v, causal=True, scale=seen.scale)
        (dq,) = torch.autograd.grad(o, q, do)
    return dq[..., dim].float() / (seen.scale * PROBE_KEY)


@torch.no_grad()
def signals(seen: Seen, leak: Tensor) -> dict[str, Tensor]:
    """What may warn of a crash, of one layer and its `leak`: scalars, FP32, the worst head's.

    `row_max_abs`: max |row-max score|. `repeated_max_share`: share of rows whose maximum repeats (mean
    over heads). `key_mean_ratio`: |mean key| / mean |key|. `max_p_mean`: mean over rows of the largest P.
    `leak_share`: Σ|rowsum dS| / Σ|dS|, with dS from FP32 scores and the δ that fits them.
    """
    assert seen.do is not None
    q, k, v, do = (x.float() for x in (seen.q, seen.k, seen.v, seen.do))
    future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    s = (seen.scale * (q @ k.mT)).masked_fill_(future, -math.inf)  # [B, H, T, T]
    row_max = s.amax(-1, keepdim=True)
    p = torch.exp(s - row_max)
    total = p.sum(-1, keepdim=True)
    repeats = (s >= row_max - REPEAT_TOL).sum(-1) > 1
    p /= total
    dp = do @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    size = ds.abs().sum((0, 2, 3))  # [H]
    return {
        "row_max_abs": row_max.abs().max(),
        "repeated_max_share": repeats.double().mean(),
        "key_mean_ratio": (k.mean((0, 2)).norm(dim=-1) / k.norm(dim=-1).mean((0, 2))).max(),
        "max_p_mean": (1 / total).mean((0, 2, 3)).max(),
        "leak_share": (leak.abs().sum((0, 2)) / size).max(),
    }
