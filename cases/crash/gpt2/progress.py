"""Progress of a run of hours: a line now and then, and the speed behind it."""

from __future__ import annotations

import math
import time

from cases.crash.gpt2.data import Say

EVERY_S = 30.0  # between two lines


class Progress:
    """Step, loss, tokens a second, time left, last checkpoint; told to whoever listens."""

    def __init__(self, steps: int, tokens_a_step: int, say: Say):
        self.steps, self.tokens_a_step, self.say = steps, tokens_a_step, say
        self.done = 0  # steps of this process, the first left out: it compiles and allocates
        self.started = self.said = -math.inf
        self.tokens_per_s = math.nan

    def step(self, step: int, loss: float, gradient_norm: float, saved: int) -> None:
        """After each step; `saved` is the step of the last checkpoint."""
        now = time.monotonic()
        if self.started == -math.inf:
            self.started = now
        else:
            self.done += 1
            self.tokens_per_s = self.done * self.tokens_a_step / max(now - self.started, 1e-9)
        if now - self.said < EVERY_S:
            return
        self.said = now
        left = (self.steps - step - 1) * self.tokens_a_step / self.tokens_per_s
        self.say(
            f"step {step}/{self.steps}  loss {loss:.4f}  gradient norm {gradient_norm:.3g}  "
            f"{thousands(self.tokens_per_s)} tokens/s  ETA {duration(left)}  "
            f"checkpoint at step {saved}"
        )


def thousands(rate: float) -> str:
    """`312.4k`, or a dash where nothing was measured yet."""
    return "–" if math.isnan(rate) else f"{rate / 1000:.1f}k"


def duration(seconds: float) -> str:
    """`6 h 05 min`, `12 min`, `40 s`, or a dash."""
    if math.isnan(seconds):
        return "–"
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min" if seconds >= 60 else f"{seconds:.0f} s"
