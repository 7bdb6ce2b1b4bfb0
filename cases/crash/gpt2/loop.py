"""The training loop of `crash/gpt2`: one process or many, cut anywhere and gone on bit for bit.

Nothing here draws from a global random generator, so a checkpoint is weights, optimizers, the losses so
far (from which the detector is made again) and curves; batches and random rounding are functions of the
step.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from backends.base import Kernel, Unsupported
from cases.crash.detector import Detector
from cases.crash.gpt2 import checkpoint
from cases.crash.gpt2.batches import Batches, Offsets, chained, share
from cases.crash.gpt2.data import Tokens
from cases.crash.gpt2.optimizer import Recipe, optimizers
from cases.crash.gpt2.progress import Progress
from cases.crash.gpt2.signals import probe, weight_norms
from cases.crash.model import GPT
from cases.crash.signals import reseeded
from cases.processes import gather_numbers, together, world

NO_BATCHES = "0" * 64  # what the chain of batch digests begins with


@dataclass(frozen=True)
class Run:
    """One training run: what is trained, on what, how, and how often it is looked at."""

    name: str  # of the case: part of every random stream
    seed: int
    steps: int
    batch: int  # sequences a step, over all processes
    micro_batch: int  # sequences a forward pass
    recipe: Recipe
    dtype: torch.dtype  # of attention; bfloat16: the model under autocast
    log_every: int
    checkpoint_every: int
    stop_when_exploded: bool
    fingerprint: checkpoint.Fingerprint  # what a checkpoint must have been made with


@dataclass
class Log:
    """What happened: a value a step, and curves of a point each logged step."""

    loss: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    batches: str = NO_BATCHES  # chain of sha256 over the offsets of every step
    detector: Detector = field(default_factory=Detector)
    tokens_per_s: float = math.nan  # of this process's part of the run, without compilation
    no_leak: str = ""  # why the kernel's leak could not be read

    def as_state(self) -> dict[str, Any]:
        return {
            "loss": torch.tensor(self.loss, dtype=torch.float64),
            "gradient_norm": torch.tensor(self.gradient_norm, dtype=torch.float64),
            "curves": {n: torch.tensor(c, dtype=torch.float64) for n, c in self.curves.items()},
            "batches": self.batches,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Log:
        log = cls(
            state["loss"].tolist(),
            state["gradient_norm"].tolist(),
            {n: c.tolist() for n, c in state["curves"].items()},
            state["batches"],
        )
        for loss, norm in zip(log.loss, log.gradient_norm, strict=True):
            log.detector.update(loss, norm)
        return log


class StepAttention:
    """Attention of one micro-batch: the kernel outside autocast, with fresh random bits if it takes any."""

    def __init__(self, kernel: Kernel, run: Run, step: int, micro: int, device: torch.device):
        self.kernel, self.key = kernel, (run.name, run.seed, "rounding", step, micro)
        self.device = device.type

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(layer, q, k, v, q.shape[-1] ** -0.5)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        kernel = reseeded(self.kernel, *self.key, layer)
        with torch.autocast(self.device, enabled=False):  # the kernel decides what it rounds
            return kernel(q, k, v, causal=True, scale=scale)


class Trainer:
    """A model with its optimizers, and what one step does."""

    def __init__(self, model: GPT, kernel: Kernel, tokens: Tokens, batches: Batches, run: Run):
        self.model, self.kernel, self.run = model, kernel, run
        self.tokens, self.batches = tokens, batches
        self.device: torch.device = model.embedding.device
        self.optimizers = optimizers(model, run.recipe)
        self.accumulation = run.batch // (run.micro_batch * world().size)
        self.parallel: DistributedDataParallel | None = None
        if dist.is_initialized():
            self.parallel = DistributedDataParallel(model)
            self._settle_buckets()

    def autocast(self) -> torch.autocast:
        on = self.run.dtype == torch.bfloat16
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on)

    def _settle_buckets(self) -> None:
        """One backward pass for nothing. DDP orders its buckets anew after its first, and the order
        decides how a ring adds; so a resumed run would add its first step differently."""
        self._backward(self.batches.offsets(0)[: self.run.micro_batch], 0, 0)
        self.model.zero_grad(set_to_none=True)

    def gradients(self, step: int) -> tuple[list[Tensor], Offsets]:
        """Gradients of the mean loss of the global batch, into `.grad`. Returns this process's losses
        of each micro-batch, on the device, with the offsets of the global batch."""
        here = world()
        offsets = self.batches.offsets(step)
        mine = share(offsets, here.rank, here.size, self.run.micro_batch)
        losses = []
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for number, rows in enumerate(mine):
            last = number == self.accumulation - 1
            with contextlib.nullcontext() if last or not self.parallel else self.parallel.no_sync():
                losses.append(self._backward(rows, step, here.rank * self.accumulation + number))
        return losses, offsets

    def _backward(self, offsets: Offsets, step: int, micro: int) -> Tensor:
        """Add the gradients of one micro-batch, over the number of them; its mean loss."""
        ids = self._rows(offsets)
        attention = StepAttention(self.kernel, self.run, step, micro, self.device)
        with self.autocast():
            logits = (self.parallel or self.model)(ids[:, :-1], attention)  # [B, T, V]
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        (loss / self.accumulation).backward()
        return loss.detach()

    def _rows(self, offsets: Offsets) -> Tensor:
        """Token ids int64 [len(offsets), T + 1] on the device."""
        rows = torch.from_numpy(self.tokens.rows(offsets, self.model.size.context + 1))
        if self.device.type == "cpu":
            return rows
        return rows.pin_memory().to(self.device, non_blocking=True)

    def update(self, step: int) -> None:
        """One step of every optimizer at the step's learning rate."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.run.recipe.lr_at(step)
            optimizer.step()

    def look(self, log: Log, step: int) -> None:
        """A point of every curve; weights are those that gave this step's loss."""
        point = {
            "step": float(step),
            "loss": log.loss[-1],
            "gradient_norm": log.gradient_norm[-1],
            "lr": self.run.recipe.lr_at(step),
            **weight_norms(self.model.blocks),
        }
        if not log.no_leak:
            try:
                point |= self._probe(step)
            except Unsupported as reason:
                log.no_leak = str(reason)
        for name, value in point.items():
            log.curves.setdefault(name, []).append(value)

    def _probe(self, step: int) -> dict[str, float]:
        """The extra pass, on the first sequence of the global batch: the same on every rank."""
        ids = self._rows(self.batches.offsets(step)[:1])
        attention = StepAttention(self.kernel, self.run, step, 0, self.device)
        return probe(self.model, ids, attention.attend, self.autocast())

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def train(trainer: Trainer, folder: Path, say: Callable[[str], None]) -> Log:
    """Train to the last step or to the explosion, from the last checkpoint in `folder` on.

    SIGTERM or Ctrl-C: the step is finished, a checkpoint written, KeyboardInterrupt raised.
    """
    run = trainer.run
    found = together(lambda: checkpoint.load(folder, run.fingerprint, say))
    log, begin = Log(), 0
    if found is not None:
        trainer.load(found.state)
        log, begin = Log.from_state(found.state["log"]), found.step
        say(f"resumed at step {begin} of {run.steps}")
    progress = Progress(run.steps, run.batch * trainer.model.size.context, say)
    saved = begin
    with _asked_to_stop() as asked:
        for step in range(begin, run.steps):
            stop = _step(trainer, log, step, asked)
            if log.detector.exploded and run.stop_when_exploded:
                break
            trainer.update(step)
            if stop or (step + 1) % run.checkpoint_every == 0:
                saved = _save(trainer, log, step + 1, folder, saved, say)
            progress.step(step, log.loss[-1], log.gradient_norm[-1], saved)
            if stop:
                say(f"stopped after step {step}; checkpoint at step {saved}")
                raise KeyboardInterrupt
    log.tokens_per_s = progress.tokens_per_s
    return log


def _step(trainer: Trainer, log: Log, step: int, asked: list[int]) -> bool:
    """Gradients, loss and norm of one step, into the log; True where some process was asked to stop."""
    losses, offsets = trainer.gradients(step)
    norm = nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.run.recipe.clip)
    flag = torch.tensor(float(bool(asked)), device=trainer.device)
    everyone = gather_numbers(torch.stack([*losses, flag]).float()).double()  # [ranks, micro + 1]
    # Micro-batches in the order of the global batch, added in FP64: the same for every world size.
    log.loss.append(float(everyone[:, :-1].flatten().cpu().mean()))
    log.gradient_norm.append(float(norm))
    log.batches = chained(log.batches, offsets)
    log.detector.update(log.loss[-1], log.gradient_norm[-1])
    exploded_now = log.detector.exploded and trainer.run.stop_when_exploded
    if step % trainer.run.log_every == 0 or exploded_now:
        trainer.look(log, step)
    return bool(everyone[:, -1].any())


def _save(trainer: Trainer, log: Log, step: int, folder: Path, saved: int, say: Callable[[str], None]) -> int:
    """Write a checkpoint of `step` (rank 0 alone); the step of the last one that is on the disk."""
    if not world().is_main:
        return step
    state = trainer.state() | {"log": log.as_state()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.save(folder, step, trainer.run.fingerprint, state)
    except OSError as error:  # a full disk must not end a run of hours
        say(f"WARNING: no checkpoint at step {step}: {error.strerror}; the last is of step {saved}")
        return saved
    return step


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that SIGTERM and SIGINT fill; a second signal ends the run at once, as before."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(number, before[number])

    before: dict[int, Any] = {}
    try:
        for each in (signal.SIGTERM, signal.SIGINT):
            before[each] = signal.signal(each, ask)
    except ValueError:  # not the main thread: whoever runs it there handles signals
        pass
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
