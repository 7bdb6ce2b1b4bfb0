"""The training loop of `crash/ladder` and `crash/gpt2`: every loss logged, stopped once exploded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cases.crash.training.log import TrainingLog
from cases.crash.training.trainer import Trainer

MAX_LOGS = 499  # points of a curve in a result file


@dataclass(frozen=True)
class Watch:
    """Which steps are looked at, how often losses are read, and when to stop."""

    look_every: int = 10  # steps, at least; so many that a curve has MAX_LOGS points
    read_every: int = 1  # steps; 0: at the steps that are looked at alone, for reading waits for a device
    stop_after_explosion: bool = True
    look_at_explosion: bool = False  # wherever it comes


def train(
    trainer: Trainer,
    watch: Watch,
    begin: int = 0,
    after_update: Callable[[int], None] = lambda step: None,
) -> TrainingLog:
    """Train from step `begin` to the last one, or to the explosion, from where on nothing is logged.

    However late losses are read, the detector sees the same numbers. `after_update` is called with each
    step that is done and may end the run by raising.
    """
    log, steps = trainer.log, trainer.recipe.steps
    every = max(watch.look_every, math.ceil(steps / MAX_LOGS))
    with trainer.around():
        for step in range(begin, steps):
            due = step % every == 0
            trainer.gradients(step, look=due)
            if due or step == steps - 1 or (watch.read_every and step % watch.read_every == 0):
                lost = log.add(trainer.read(), watch.stop_after_explosion)
                looks = due or (lost and watch.look_at_explosion)
                if looks and len(log.loss) == step + 1:  # else the run was lost before this step
                    log.add_point(trainer.look(step))
                if lost:
                    break
            trainer.update(step)
            after_update(step)
    return log
