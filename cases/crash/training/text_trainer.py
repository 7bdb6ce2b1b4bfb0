"""Training on a text that fits on the device, one batch a step, on CUDA as graphs that are replayed.

Reading a loss waits for the device, so losses stay there until they are asked for. What changes from step
to step (where the sequences begin, the learning rate) is copied into tensors that stay, so that a graph
captured once does every step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from backends.base import Kernel
from bench.measure.inputs import key_of, raw_words
from bench.measure.metrics import signed_coherence
from cases.crash.training.attention import StepAttention, leak_of
from cases.crash.training.graphs import CapturedStep, own_stream
from cases.crash.training.model import GPT
from cases.crash.training.optimizer import set_lr
from cases.crash.training.recipe import Recipe
from cases.crash.training.signals import coherence_by_head, largest, over_layers, signals
from cases.crash.training.trainer import Trainer

LEAK_WINDOW = (100, 400)  # steps over which the leak is pooled: before any run is lost
WARM_UP = 3  # plain steps before a graph is captured: they compile, allocate and choose


def batch_offsets(name: str, seed: int, steps: int, batch: int, length: int) -> Tensor:
    """Where each sequence of each step begins, int64 [steps, batch], in [0, length)."""
    words = raw_words(key_of(name, seed, "batches"), steps * batch) >> 32
    offsets = (words * length) >> 32  # 32-bit words times a length below 2^32: exact in 64 bits
    return torch.from_numpy(offsets.astype("int64")).reshape(steps, batch)


class TextTrainer(Trainer):
    """Trains on `text` [length] from `offsets` int64 [steps, B], both on the model's device.

    In FP32 the leak probe is part of the attention that trains, so that the leak is that of the very
    backward pass; in BF16 a second call reads it.
    """

    def __init__(
        self,
        model: GPT,
        kernel: Kernel,
        recipe: Recipe,
        stream: tuple[str, int],
        dtype: torch.dtype,
        text: Tensor,
        offsets: Tensor,
        graph: bool = False,
    ):
        on_cuda = text.device.type == "cuda"
        lr = torch.zeros((), device=text.device) if on_cuda else None  # FP32, as the fused kernel takes
        super().__init__(model, kernel, recipe, stream, dtype, lr)
        self.text, self.offsets, self.graph = text, offsets, graph
        self.span = torch.arange(model.size.context + 1, device=text.device)
        self.starts = torch.zeros_like(offsets[0])
        self.probe = 1 if dtype == torch.float32 else 0
        self.unread: list[Tensor] = []  # [loss, gradient norm] of each step, on the device
        self.captured: CapturedStep | None = None
        self.replayed: CapturedStep | None = None  # the captured step, where the present one is a replay
        self.present = StepAttention(kernel)  # the attention of the present step

    def gradients(self, step: int, look: bool) -> None:
        if self.graph and self.captured is None and step >= WARM_UP and not look:
            attention = self.attention(step, probe=self.probe)
            self.captured = CapturedStep(lambda: self.loss_and_norm(attention), self.apply)
        self.present = self.attention(step, probe=self.probe, look=look)
        self.replayed = None if look else self.captured
        self.starts.copy_(self.offsets[step])
        pair = self.replayed.gradients() if self.replayed else self.loss_and_norm(self.present)
        self.unread.append(torch.stack(pair))

    def loss_and_norm(self, attention: StepAttention) -> tuple[Tensor, Tensor]:
        """Clipped gradients of the batch at `starts`; its loss, and their norm before clipping."""
        rows = self.text[self.starts[:, None] + self.span].long()  # [B, T + 1]
        loss = self.loss(self.model, rows, attention)
        self.zero_gradients()
        loss.backward()
        return loss.detach(), self.clip()

    def read(self) -> list[tuple[float, float]]:
        unread, self.unread = torch.stack(self.unread).tolist(), []
        return [(loss, norm) for loss, norm in unread]

    def update(self, step: int) -> None:
        set_lr(self.optimizers, self.recipe.lr_at(step))
        self.replayed.apply() if self.replayed else self.apply()

    def signals(self, step: int) -> dict[str, float]:
        seen = [self.present.seen[layer] for layer in sorted(self.present.seen)]
        leaks = [leak_of(layer) for layer in seen]  # [B, H, T] each
        leak = torch.stack(leaks).cpu()  # [layers, B, H, T]
        if LEAK_WINDOW[0] <= step <= LEAK_WINDOW[1]:
            self.log.leak.append(leak)
        return {
            "leak_mean": float(leak.mean()),
            "leak_coherence": float(signed_coherence(leak)),
            "leak_coherence_head": largest(coherence_by_head(leak[None])),
            **over_layers(signals(*pair) for pair in zip(seen, leaks, strict=True)),
        }

    def around(self) -> AbstractContextManager[object]:
        return own_stream(self.device)
