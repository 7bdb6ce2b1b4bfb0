"""Training from a token file in micro-batches, by one process or many."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from backends.base import Kernel, Unsupported
from cases.crash.gpt2.batches import Batches, Offsets, chained, share
from cases.crash.gpt2.data import Tokens
from cases.crash.training.attention import StepAttention, leak_of
from cases.crash.training.log import TrainingLog
from cases.crash.training.model import GPT
from cases.crash.training.probe import probe_channels
from cases.crash.training.recipe import Recipe
from cases.crash.training.signals import causal_scores, over_layers, row_maxima
from cases.crash.training.trainer import Trainer
from cases.processes import gather_numbers, world


def leak_point(attention: StepAttention) -> dict[str, float]:
    """Leak (its mean and mean size, in all and by layer) and row maxima of a pass that was looked at."""
    seen = [attention.seen[layer] for layer in sorted(attention.seen)]
    leak = torch.stack([leak_of(layer) for layer in seen])  # [layers, B, H, T]
    point = over_layers(row_maxima(causal_scores(layer))[1] for layer in seen)
    for part, values in [("", leak), *((f"_{layer}", values) for layer, values in enumerate(leak))]:
        point |= {f"leak_mean{part}": float(values.mean()), f"leak_abs{part}": float(values.abs().mean())}
    return point


class TokenTrainer(Trainer):
    """Nothing here draws from a global random generator: batches and random rounding are functions of the
    step. So weights, optimisers and the log are all that a resumed run needs.

    The leak is read in an extra pass over the first sequence of the step: GPT-2's heads fill their 64
    channels, and the attention that trains is not to be widened.
    """

    def __init__(
        self,
        model: GPT,
        kernel: Kernel,
        recipe: Recipe,
        stream: tuple[str, int],
        dtype: torch.dtype,
        tokens: Tokens,
        batches: Batches,
        micro_batch: int,
    ):
        super().__init__(model, kernel, recipe, stream, dtype)
        self.tokens, self.batches, self.micro_batch = tokens, batches, micro_batch
        self.accumulation = recipe.batch // (micro_batch * world().size)
        self.asked_to_stop: list[int] = []  # signals that came to this process
        self.stops = False  # whether some process was asked to, known to all once losses are read
        self.unread: tuple[list[Tensor], Tensor] | None = None  # losses of micro-batches, gradient norm
        self.parallel: DistributedDataParallel | None = None
        if dist.is_initialized():
            self.parallel = DistributedDataParallel(model)
            self._settle_buckets()

    def _settle_buckets(self) -> None:
        """One backward pass for nothing. DDP orders its buckets anew after its first, and the order
        decides how a ring adds; so a resumed run would add its first step differently."""
        self._backward(self.batches.offsets(0)[: self.micro_batch], 0, 0)
        self.model.zero_grad(set_to_none=True)

    def gradients(self, step: int, look: bool) -> None:
        here = world()
        offsets = self.batches.offsets(step)
        self.log.batches = chained(self.log.batches, offsets)
        self.zero_gradients()
        losses = []
        for number, rows in enumerate(share(offsets, here.rank, here.size, self.micro_batch)):
            last = number == self.accumulation - 1
            with contextlib.nullcontext() if last or not self.parallel else self.parallel.no_sync():
                losses.append(self._backward(rows, step, here.rank * self.accumulation + number))
        self.unread = losses, self.clip()

    def _backward(self, offsets: Offsets, step: int, micro: int) -> Tensor:
        """Add the gradients of one micro-batch, over the number of them; its mean loss."""
        loss = self.loss(self.parallel or self.model, self._rows(offsets), self.attention(step, micro))
        (loss / self.accumulation).backward()
        return loss.detach()

    def _rows(self, offsets: Offsets) -> Tensor:
        """Token ids int64 [len(offsets), T + 1] on the device."""
        rows = torch.from_numpy(self.tokens.rows(offsets, self.model.size.context + 1))
        if self.device.type == "cpu":
            return rows
        return rows.pin_memory().to(self.device, non_blocking=True)

    def read(self) -> list[tuple[float, float]]:
        assert self.unread is not None
        losses, norm = self.unread
        flag = torch.tensor(float(bool(self.asked_to_stop)), device=self.device)
        everyone = gather_numbers(torch.stack([*losses, flag]).float()).double()  # [ranks, micro + 1]
        self.stops = bool(everyone[:, -1].any())
        # Micro-batches in the order of the global batch, added in FP64: the same for every world size.
        return [(float(everyone[:, :-1].flatten().cpu().mean()), float(norm))]

    def signals(self, step: int) -> dict[str, float]:
        point = {"lr": self.recipe.lr_at(step)}
        if self.log.no_leak:
            return point
        try:
            return point | self._extra_pass(step)
        except Unsupported as reason:
            self.log.no_leak = str(reason)
            return point

    def _extra_pass(self, step: int) -> dict[str, float]:
        """Leak and row maxima of the mean loss over the first sequence of the global batch, the same on every
        rank; the gradients are thrown away."""
        ids = self._rows(self.batches.offsets(step)[:1])
        channels = probe_channels(self.model.size.head_dim)
        attention = self.attention(step, 0, probe=channels, look=True)
        # On its way to the positions the gradient passes the probe of every layer.
        torch.autograd.grad(self.loss(self.model, ids, attention), self.model.positions)
        return leak_point(attention)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "log": self.log.as_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.log = TrainingLog.from_state(state["log"])
