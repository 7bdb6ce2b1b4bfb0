"""A run of hours: cut anywhere and gone on bit for bit, stopped in order, with its progress told."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from cases.crash.gpt2 import checkpoint
from cases.crash.gpt2.data import Say
from cases.crash.gpt2.progress import Progress
from cases.crash.gpt2.trainer import TokenTrainer
from cases.crash.training.log import TrainingLog
from cases.crash.training.loop import Watch, train
from cases.processes import together, world


@dataclass
class Keeper:
    """Checkpoints of a run, in a folder of its own; written by rank 0 alone."""

    trainer: TokenTrainer
    folder: Path
    fingerprint: checkpoint.Fingerprint  # what a checkpoint must have been made with
    every: int  # steps
    say: Say
    saved: int = 0  # step of the last checkpoint that is on the disk

    def resume(self) -> int:
        """Load the last checkpoint, if there is one; the step to begin with."""
        found = together(lambda: checkpoint.load(self.folder, self.fingerprint, self.say))
        if found is not None:
            self.trainer.load(found.state)
            self.saved = found.step
            self.say(f"resumed at step {found.step} of {self.trainer.recipe.steps}")
        return self.saved

    def save(self, step: int) -> None:
        """Write a checkpoint; `step` is the next one to do."""
        if world().is_main:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                checkpoint.save(self.folder, step, self.fingerprint, self.trainer.state())
            except OSError as error:  # a full disk must not end a run of hours
                last = f"the last is of step {self.saved}"
                self.say(f"WARNING: no checkpoint at step {step}: {error.strerror}; {last}")
                return
        self.saved = step


def train_long(keeper: Keeper, watch: Watch) -> TrainingLog:
    """Train to the last step or to the explosion, from the last checkpoint on.

    SIGTERM or Ctrl-C: the step is finished, a checkpoint written, KeyboardInterrupt raised.
    """
    trainer, say = keeper.trainer, keeper.say
    recipe, begin = trainer.recipe, keeper.resume()
    log = trainer.log
    progress = Progress(recipe.steps, recipe.batch * trainer.model.size.context, say)

    def after_update(step: int) -> None:
        if trainer.stops or (step + 1) % keeper.every == 0:
            keeper.save(step + 1)
        progress.step(step, log.loss[-1], log.gradient_norm[-1], keeper.saved)
        if trainer.stops:
            say(f"stopped after step {step}; checkpoint at step {keeper.saved}")
            raise KeyboardInterrupt

    with _signals_into(trainer.asked_to_stop):
        train(trainer, watch, begin, after_update)
    log.tokens_per_s = progress.tokens_per_s
    return log


@contextlib.contextmanager
def _signals_into(asked: list[int]) -> Iterator[None]:
    """SIGTERM and SIGINT fill the list; a second signal ends the run at once, as before."""

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
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
