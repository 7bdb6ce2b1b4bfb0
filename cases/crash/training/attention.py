"""Attention of one pass of training: the kernel under test, and what is kept of a pass that is looked at."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.base import Kernel
from bench.measure.inputs import key_of
from cases.crash.training.probe import leak_from, probe_channels, with_probe


@dataclass
class Seen:
    """What one layer's attention was given, [B, H, T, D]; detached."""

    kernel: Kernel
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    do: Tensor | None = None
    leak: Tensor | None = None  # rowsum(dS), float64 [B, H, T], where the pass had a probe


@dataclass
class StepAttention:
    """The attention of one pass: (layer, q, k, v) → o. `look` keeps what `signals` needs."""

    kernel: Kernel
    stream: tuple[str | int, ...] = ()  # names the pass's random bits, for kernels that draw some
    probe: int = 0  # channels of the leak probe that the head is widened by; 0: no probe
    look: bool = False
    seen: dict[int, Seen] = field(default_factory=dict)  # by layer

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        head_dim, scale = q.shape[-1], q.shape[-1] ** -0.5
        kernel = reseeded(self.kernel, *self.stream, layer)
        if self.look:
            seen = self.seen[layer] = Seen(kernel, q.detach(), k.detach(), v.detach(), scale)
        if self.probe:
            q, k, v = with_probe(q, k, v, self.probe)
        if self.probe and self.look:
            q.register_hook(lambda dq: setattr(seen, "leak", leak_from(dq, head_dim, scale)))
        with torch.autocast(q.device.type, enabled=False):  # the kernel decides what it rounds
            o = kernel(q, k, v, causal=True, scale=scale)
        o = o[..., :head_dim] if self.probe else o
        if self.look:
            o.register_hook(lambda do: setattr(seen, "do", do.detach()))
        return o


def leak_of(seen: Seen) -> Tensor:
    """rowsum(dS), float64 [B, H, T], of the backward pass: read by its probe, or by a second call with the
    same q, k, v and dO, which leaves training as it is."""
    if seen.leak is not None:
        return seen.leak
    assert seen.do is not None
    head_dim = seen.q.shape[-1]
    channels = probe_channels(head_dim)
    q, k, v = with_probe(seen.q, seen.k, seen.v, channels)
    with torch.enable_grad():
        o = seen.kernel(q.requires_grad_(), k, v, causal=True, scale=seen.scale)
        (dq,) = torch.autograd.grad(o, q, F.pad(seen.do, (0, channels)))
    return leak_from(dq, head_dim, seen.scale)


def reseeded(kernel: Kernel, *stream: str | int) -> Kernel:
    """The kernel with random bits of their own for `stream` (which names step and layer), where it draws
    any; its own seed, where that is not 0, is part of the name."""
    if not kernel.draws:
        return kernel
    own = kernel.options.model_dump()["seed"]
    return kernel.reseeded(key_of(*stream, own) if own else key_of(*stream))
