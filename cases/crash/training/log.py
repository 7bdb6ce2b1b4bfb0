"""What happened in a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measure.inputs import digest
from cases.crash.training.detector import Detector

NO_BATCHES = "0" * 64  # what the chain of batch digests begins with


@dataclass
class TrainingLog:
    """Losses in nats and gradient norms, a value a step; curves of a point each step looked at."""

    loss: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    batches: str = NO_BATCHES  # chain of sha256 over the offsets of every step, where one is kept
    detector: Detector = field(default_factory=Detector)
    leak: list[Tensor] = field(default_factory=list)  # [layers, B, H, T] of steps to pool over, if any
    no_leak: str = ""  # why the kernel's leak could not be read
    tokens_per_s: float = math.nan  # of this process's part of the run, without compilation

    def add(self, steps: Iterable[tuple[float, float]], stop_after_explosion: bool) -> bool:
        """Log (loss, gradient norm) of the next steps; True where training ends, the steps past that
        dropped."""
        for loss, norm in steps:
            self.loss.append(loss)
            self.gradient_norm.append(norm)
            if self.detector.update(loss, norm) and stop_after_explosion:
                return True
        return False

    def add_point(self, point: Mapping[str, float]) -> None:
        """One point of every curve named."""
        for name, value in point.items():
            self.curves.setdefault(name, []).append(value)

    def loss_digest(self) -> str:
        """sha256 of the losses of all steps as float32."""
        return digest(torch.from_numpy(np.array(self.loss, dtype=np.float32)))

    def as_state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain values and tensors."""
        return {
            "loss": torch.tensor(self.loss, dtype=torch.float64),
            "gradient_norm": torch.tensor(self.gradient_norm, dtype=torch.float64),
            "curves": {n: torch.tensor(c, dtype=torch.float64) for n, c in self.curves.items()},
            "batches": self.batches,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> TrainingLog:
        """The log of a checkpoint; its detector is made again from the losses."""
        log = cls(curves={n: c.tolist() for n, c in state["curves"].items()}, batches=state["batches"])
        pairs = zip(state["loss"].tolist(), state["gradient_norm"].tolist(), strict=True)
        log.add(pairs, stop_after_explosion=False)
        return log
