"""How a model is trained: sizes of a step, learning rate, optimiser."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Recipe:
    """Everything but the data and the attention; no weight decay. Betas, eps, momentum and clip are the
    values of arXiv 2510.04212."""

    steps: int
    batch: int  # sequences a step, over all processes
    lr: float
    warmup: int  # steps of linear warm-up
    schedule: Literal["constant", "cosine"] = "constant"  # after the warm-up
    min_lr: float = 0.0  # of the cosine
    decay_steps: int = 0  # where the cosine reaches min_lr
    optimizer: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95  # of Muon
    clip: float = 1.0  # of the global gradient norm

    def lr_at(self, step: int) -> float:
        """Linear from lr/warmup to lr, then constant; or half a cosine to min_lr, then constant."""
        if self.schedule == "constant":
            return self.lr * min(1.0, (step + 1) / self.warmup)
        if step < self.warmup:  # not the quotient of above: the last bit of a step's rate decides losses
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.decay_steps - self.warmup)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return self.min_lr + share * (self.lr - self.min_lr)
