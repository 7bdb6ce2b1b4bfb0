"""The leak probe: a channel that changes neither scores nor output, and whose dq is rowsum(dS).

rowsum(dS) is 0 in exact arithmetic. With q 0, k `PROBE_KEY` and v 0 in the channel, as in `bias/leak`, dq
there is PROBE_KEY·scale·rowsum(dS). One more channel is enough for kernels that take any width; fused kernels
take few, so that the head is padded with zeros to the next of those (96 for 64).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from cases.bias.leak import PROBE_KEY

WIDTHS = (16, 32, 64, 96, 128, 256)  # head_dims that every fused kernel takes


def probe_channels(head_dim: int) -> int:
    """Channels to add, the probe among them, so that fused kernels take the head; 0: there is none."""
    return next((width - head_dim for width in WIDTHS if width > head_dim), 0)


def with_probe(q: Tensor, k: Tensor, v: Tensor, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, H, T, D] → [B, H, T, D + channels]; channel D is the probe, those after it are 0."""
    k = F.pad(k, (0, 1), value=PROBE_KEY)
    if channels > 1:
        k = F.pad(k, (0, channels - 1))
    return F.pad(q, (0, channels)), k, F.pad(v, (0, channels))


def leak_from(dq: Tensor, head_dim: int, scale: float) -> Tensor:
    """rowsum(dS), float64 [B, H, T], from the dq [B, H, T, D + channels] of a padded q."""
    return dq[..., head_dim].double() / (scale * PROBE_KEY)
