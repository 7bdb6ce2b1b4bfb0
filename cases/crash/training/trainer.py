"""A model in training, and the parts of a step that are the same for any data."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backends.base import Kernel
from cases.crash.training.attention import StepAttention
from cases.crash.training.log import TrainingLog
from cases.crash.training.model import GPT
from cases.crash.training.norms import weight_norms
from cases.crash.training.optimizer import optimizers, set_lr
from cases.crash.training.recipe import Recipe


class Trainer(ABC):
    """FP32 weights, their optimisers and the log; with `dtype` bfloat16 the forward pass is autocast.

    `stream` names the run (case, seed): the random bits of each step are a function of it and the step.
    """

    def __init__(
        self,
        model: GPT,
        kernel: Kernel,
        recipe: Recipe,
        stream: tuple[str, int],
        dtype: torch.dtype,
        lr: Tensor | None = None,  # a place on the device for the learning rate, for graphs to read
    ):
        self.model, self.kernel, self.recipe = model, kernel, recipe
        self.stream, self.dtype = stream, dtype
        self.device: torch.device = model.embedding.device
        self.optimizers = optimizers(model, recipe, recipe.lr if lr is None else lr)
        self.log = TrainingLog()

    @abstractmethod
    def gradients(self, step: int, look: bool) -> None:
        """Clipped gradients of the step's batch, into `.grad`; with `look` keep what `look` needs."""

    @abstractmethod
    def read(self) -> list[tuple[float, float]]:
        """(loss, gradient norm before clipping) of every step since the last call; waits for the device."""

    @abstractmethod
    def signals(self, step: int) -> dict[str, float]:
        """What is seen of attention, and whatever else belongs into the curves, in this step."""

    def look(self, step: int) -> dict[str, float]:
        """A point of every curve; weights are those that gave this step's loss."""
        return {
            "step": float(step),
            "loss": self.log.loss[-1],
            "gradient_norm": self.log.gradient_norm[-1],
            **weight_norms(self.model),
            **self.signals(step),
        }

    def update(self, step: int) -> None:
        """Move the weights, at the step's learning rate."""
        set_lr(self.optimizers, self.recipe.lr_at(step))
        self.apply()

    def apply(self) -> None:
        """One step of every optimiser."""
        for optimizer in self.optimizers:
            optimizer.step()

    def around(self) -> AbstractContextManager[object]:
        """What training runs in."""
        return contextlib.nullcontext()

    def attention(self, *stream: int, probe: int = 0, look: bool = False) -> StepAttention:
        """The attention of one pass; `stream` is its step, and what tells it from others of that step."""
        return StepAttention(self.kernel, (*self.stream, "rounding", *stream), probe, look)

    def loss(self, model: nn.Module, ids: Tensor, attention: StepAttention) -> Tensor:
        """Mean loss of `model`, the own one or what is wrapped around it, over token ids int64 [B, T + 1]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            logits = model(ids[:, :-1], attention)  # [B, T, V]
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def zero_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def clip(self) -> Tensor:
        """Clip the gradients; their norm before that."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
