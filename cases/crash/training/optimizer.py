"""Optimisers of the recipe: AdamW, or Muon for the hidden matrices."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from cases.crash.training.recipe import Recipe


def optimizers(model: nn.Module, recipe: Recipe, lr: float | Tensor) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters; or Muon for the matrices inside the blocks and AdamW for the rest
    (embedding, which is the head too, positions, gains). No weight decay.

    `lr` is a tensor on the device where CUDA graphs must see it change, AdamW alone then. Muon's update is
    scaled to the size of AdamW's (`match_rms_adamw`), so one learning rate serves both.
    """
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_hidden = parameter.dim() == 2 and ".blocks." in f".{name}"
        (hidden if recipe.optimizer == "muon" and is_hidden else rest).append(parameter)
    chosen: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            rest,
            lr=lr,
            betas=recipe.betas,
            eps=recipe.eps,
            weight_decay=0.0,
            fused=rest[0].device.type in ("cpu", "cuda"),
            capturable=isinstance(lr, Tensor),
        )
    ]
    if hidden:
        chosen.append(
            torch.optim.Muon(
                hidden,
                lr=float(lr),
                weight_decay=0.0,
                momentum=recipe.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return chosen


def set_lr(chosen: Iterable[torch.optim.Optimizer], lr: float) -> None:
    """Set the learning rate of the next step; a tensor stays the same tensor."""
    for optimizer in chosen:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
