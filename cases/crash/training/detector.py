"""When has training blown up? One rule, a pure function of the loss and the gradient norm.

A run has exploded
* when the moving average of the loss (EMA, factor 0.9) stays one nat or more above its best value
  for `PATIENCE` logs in a row: the crash is the first of them;
* when the loss or the gradient norm is not finite;
* when the gradient norm passes 1000 times the median of the `WINDOW` before it.

An excursion of the loss that comes back sooner is a spike, not an explosion; one that the run's end
cuts off counts as a spike too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

DECAY = 0.9
MARGIN = 1.0  # nats above the best moving average
PATIENCE = 20  # logs
GRADIENT_FACTOR = 1000.0
WINDOW = 100  # logs of gradient norm whose median is the usual size
MIN_WINDOW = 20  # fewer say nothing


@dataclass
class Detector:
    """Feed it one log after the other; `crash` is the index of the log at which the run was lost."""

    crash: int | None = None
    rule: str = ""  # which of the three: loss, nonfinite, gradient
    spikes: int = 0  # excursions that came back, or were cut off
    best: float = math.inf  # of the moving average
    average: float = math.nan
    logs: int = 0
    _since: int | None = None  # first log of the present excursion
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def exploded(self) -> bool:
        return self.crash is not None

    def update(self, loss: float, gradient_norm: float) -> bool:
        """Take one log; True once the run has exploded."""
        now, self.logs = self.logs, self.logs + 1
        if self.exploded:
            return True
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            return self._explode(now, "nonfinite")
        if len(self._norms) >= MIN_WINDOW and gradient_norm > GRADIENT_FACTOR * median(self._norms):
            return self._explode(now, "gradient")
        self._norms.append(gradient_norm)
        first = math.isnan(self.average)
        self.average = loss if first else DECAY * self.average + (1 - DECAY) * loss
        self.best = min(self.best, self.average)
        if self.average < self.best + MARGIN:
            self._since = None
        elif self._since is None:
            self._since, self.spikes = now, self.spikes + 1
        elif now - self._since + 1 >= PATIENCE:
            return self._explode(self._since, "loss")
        return False

    def _explode(self, crash: int, rule: str) -> bool:
        if self._since is not None:  # this excursion was the explosion, not a spike
            self.spikes -= 1
            crash = self._since
        self.crash, self.rule = crash, rule
        return True


def detect(losses: Iterable[float], gradient_norms: Iterable[float]) -> Detector:
    """The rule over whole series, one value a log."""
    detector = Detector()
    for loss, norm in zip(losses, gradient_norms, strict=True):
        if detector.update(loss, norm):
            break
    return detector
