"""Optimisers and learning rate of the recipe: AdamW, or Muon for the hidden matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


@dataclass(frozen=True)
class Recipe:
    """How to train (arXiv 2510.04212, set-up of the failing run; the defaults are its values)."""

    lr: float = 1e-3
    min_lr: float = 1e-5
    warmup: int = 2000  # steps of linear warm-up
    decay_steps: int = 600_000  # where the cosine reaches min_lr
    optimizer: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95  # of Muon
    clip: float = 1.0  # of the global gradient norm

    def lr_at(self, step: int) -> float:
        """Linear from lr/warmup to lr, then half a cosine to min_lr, then constant."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.decay_steps - self.warmup)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return self.min_lr + share * (self.lr - self.min_lr)


def optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters; or Muon for the matrices inside the blocks and AdamW for the rest
    (embedding, which is the head too, positions, gains). No weight decay.

    Muon's update is scaled to the size of AdamW's (`match_rms_adamw`), so one learning rate serves both.
    """
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_hidden = parameter.dim() == 2 and ".blocks." in f".{name}"
        (hidden if recipe.optimizer == "muon" and is_hidden else rest).append(parameter)
    fused = rest[0].device.type in ("cpu", "cuda")
    chosen: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            rest, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, weight_decay=0.0, fused=fused
        )
    ]
    if hidden:
        chosen.append(
            torch.optim.Muon(
                hidden,
                lr=recipe.lr,
                weight_decay=0.0,
                momentum=recipe.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return chosen
