"""One step of training: gradients, then the update, on a CUDA device as graphs that are replayed.

What changes from step to step (where the sequences begin, the learning rate) is copied into tensors
that stay, so that a graph captured once does every step. The graphs launch the very kernels of a plain
step: losses are the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.crash.model import GPT
from cases.crash.signals import Attention


@dataclass(frozen=True)
class Recipe:
    """How to train; the optimiser is AdamW without weight decay."""

    steps: int
    lr: float
    batch: int
    warmup: int = 100  # steps of linear warm-up, then constant
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0  # of the global gradient norm

    def lr_at(self, step: int) -> float:
        return self.lr * min(1.0, (step + 1) / self.warmup)


class Step:
    """AdamW on FP32 weights; with `dtype` bfloat16 the forward pass is autocast."""

    def __init__(self, model: GPT, text: Tensor, recipe: Recipe, context: int, dtype: torch.dtype):
        device = text.device
        self.model, self.text, self.recipe, self.dtype = model, text, recipe, dtype
        self.parameters = list(model.parameters())
        self.span = torch.arange(context + 1, device=device)
        self.starts = torch.zeros(recipe.batch, dtype=torch.int64, device=device)
        on_cuda = device.type == "cuda"
        # A tensor, so that a graph sees it change; the CUDA kernel takes FP32, the CPU's a double.
        self.lr = torch.zeros((), dtype=torch.float32 if on_cuda else torch.float64, device=device)
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.lr,
            betas=recipe.betas,
            eps=recipe.eps,
            weight_decay=0.0,
            fused=device.type in ("cpu", "cuda"),
            capturable=on_cuda,
        )

    def load(self, starts: Tensor, lr: float) -> None:
        """Set what this step reads: where its sequences begin, int64 [B], and the learning rate."""
        self.starts.copy_(starts)
        self.lr.fill_(lr)

    def gradients(self, attention: Attention) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm before clipping (scalars on the device); gradients are clipped."""
        rows = self.text[self.starts[:, None] + self.span].long()  # [B, T + 1]
        with torch.autocast(self.text.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            logits = self.model(rows[:, :-1], attention)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach(), nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip)

    def apply(self) -> None:
        """Update the weights."""
        self.optimizer.step()


class CapturedStep:
    """A step's two halves as CUDA graphs, for an attention that is the same each step.

    Capture after a few plain steps on the same stream: they compile, allocate and choose.
    """

    def __init__(self, step: Step, attention: Attention):
        stream = torch.cuda.current_stream()
        self._gradients, self._apply = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._gradients, stream=stream):
            self._results = step.gradients(attention)
        with torch.cuda.graph(self._apply, pool=self._gradients.pool(), stream=stream):
            step.apply()

    def gradients(self, attention: Attention) -> tuple[Tensor, Tensor]:
        """As `Step.gradients`, with the attention captured; the next call overwrites the result."""
        self._gradients.replay()
        return self._results

    def apply(self) -> None:
        self._apply.replay()


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """On a CUDA device everything on one stream that is not the default one, as capture demands."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
