"""The training loop: AdamW on a synthetic language, every number logged, stopped once exploded.

On a CPU every loss is read at once. On a device reading waits for it, so losses stay there and are read
where the step is looked at; the detector sees the same numbers, and what was trained past the crash
is dropped from the log.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backends.base import Kernel
from bench.measure.inputs import key_of, raw_words
from cases.crash.detector import Detector
from cases.crash.model import GPT, Size
from cases.crash.signals import Attention, leak_of, signals
from cases.crash.steps import CapturedStep, Recipe, Step, own_stream

LOG_EVERY, MAX_LOGS = 10, 499
LEAK_WINDOW = (100, 400)  # steps over which the leak is pooled: before any run is lost
WARM_UP = 3  # plain steps before a graph is captured


@dataclass(frozen=True)
class Plan:
    """Which steps are looked at, how often losses are read, and when to stop."""

    log_every: int = LOG_EVERY
    read_every: int = 1  # 0: at the steps that are looked at alone
    stop_after_explosion: bool = True
    graph: bool = False  # replay steps as CUDA graphs


@dataclass
class Log:
    """What happened. Lists of a step each, and curves of a logged step each (`steps`)."""

    detector: Detector
    loss: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    leak: list[Tensor] = field(default_factory=list)  # [layers, B, H, T] of the steps in LEAK_WINDOW


class Unread:
    """Losses and gradient norms that are still on the device."""

    def __init__(self, size: int, device: torch.device):
        self.values = torch.zeros(size, 2, device=device)
        self.count = 0

    def put(self, loss: Tensor, norm: Tensor) -> None:
        self.values[self.count, 0].copy_(loss)
        self.values[self.count, 1].copy_(norm)
        self.count += 1

    def take(self) -> list[list[float]]:
        """[loss, gradient norm] of every step since the last call; waits for the device."""
        taken: list[list[float]] = self.values[: self.count].tolist()
        self.count = 0
        return taken


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread: the tensors are too small to share, and the bits must not depend on the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def batch_offsets(name: str, seed: int, steps: int, batch: int, length: int) -> Tensor:
    """Where each sequence of each step begins, int64 [steps, batch], in [0, length)."""
    words = raw_words(key_of(name, seed, "batches"), steps * batch) >> 32
    offsets = (words * length) >> 32  # 32-bit words times a length below 2^32: exact in 64 bits
    return torch.from_numpy(offsets.astype("int64")).reshape(steps, batch)


def train(
    model: GPT,
    text: Tensor,
    offsets: Tensor,
    kernel: Kernel,
    recipe: Recipe,
    size: Size,
    name: str,
    seed: int,
    dtype: torch.dtype = torch.float32,
    plan: Plan | None = None,
    at_look: Callable[[int], None] = lambda now: None,
) -> Log:
    """Train `model` in place on `text` [length] from `offsets` [steps, B]; stops after an explosion.

    `at_look` is called with the step once all before a look has been computed.
    """
    plan, log = plan or Plan(), Log(Detector())
    every = max(plan.log_every, math.ceil(recipe.steps / MAX_LOGS))
    probe = dtype == torch.float32
    step = Step(model, text, recipe, size.context, dtype)
    captured: CapturedStep | None = None
    unread = Unread(every, text.device)
    with own_stream(text.device):
        for now in range(recipe.steps):
            look = now % every == 0
            if plan.graph and captured is None and now >= WARM_UP and not look:
                captured = CapturedStep(step, Attention(kernel, probe=probe))
            run = step if look or captured is None else captured
            attention = Attention(kernel, (name, seed, "rounding", now), probe, look)
            step.load(offsets[now], recipe.lr_at(now))
            unread.put(*run.gradients(attention))
            if look or now == recipe.steps - 1 or (plan.read_every and now % plan.read_every == 0):
                lost = _read(log, unread, plan)
                if look:
                    at_look(now)
                if look and len(log.loss) == now + 1:  # else the run was lost before this step
                    _record(log, now, model, attention)
                if lost:
                    break
            run.apply()
    return log


def _read(log: Log, unread: Unread, plan: Plan) -> bool:
    """Log the steps since the last call; True where training ends, the steps past that dropped."""
    for loss, norm in unread.take():
        log.loss.append(loss)
        log.gradient_norm.append(norm)
        if log.detector.update(loss, norm) and plan.stop_after_explosion:
            return True
    return False


def _record(log: Log, now: int, model: GPT, attention: Attention) -> None:
    """One point of every curve; weights are those that gave this step's loss."""
    log.steps.append(now)
    seen = [attention.seen[layer] for layer in sorted(attention.seen)]
    leaks = [leak_of(layer) for layer in seen]  # [B, H, T] each
    leak = torch.stack(leaks).double().cpu()  # [layers, B, H, T]
    if LEAK_WINDOW[0] <= now <= LEAK_WINDOW[1]:
        log.leak.append(leak)
    layers = [signals(*pair) for pair in zip(seen, leaks, strict=True)]
    by_signal = {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    point = {
        "step": float(now),
        "loss": log.loss[-1],
        "gradient_norm": log.gradient_norm[-1],
        "leak_mean": float(leak.mean()),
        "leak_coherence": coherence(leak),
        "leak_coherence_head": largest(by_head(leak[None])),
        "repeated_max_share": float(by_signal.pop("repeated_max_share").mean()),
    }
    point |= {name: float(values.max()) for name, values in by_signal.items()}  # the worst layer's
    for number, norms in enumerate(spectral_norms(model)):
        for weight, norm in norms.items():
            point[f"{weight}_norm_{number}"] = norm
    for curve, value in point.items():
        log.curves.setdefault(curve, []).append(value)


def coherence(leak: Tensor) -> float:
    """Σ leak / Σ |leak|, with its sign; 0 where there is none."""
    total = float(leak.abs().sum())
    return float(leak.sum()) / total if total else 0.0


def by_head(leak: Tensor) -> Tensor:
    """Coherence of each layer and head, [layers, H], of leaks [logs, layers, B, H, T] taken together.

    Heads leak to either side, so that a mean over all of them can hide what each one does.
    """
    total = leak.abs().sum((0, 2, 4))
    return torch.where(total == 0, 0.0, leak.sum((0, 2, 4)) / total)


def largest(values: Tensor) -> float:
    """The value of the largest size, with its sign; NaN where there is one."""
    return float(values.flatten()[values.abs().argmax()])


def spectral_norms(model: GPT) -> list[dict[str, float]]:
    """‖W_Q‖₂ and ‖W_K‖₂ of each layer; NaN where a weight is not finite."""
    weights = [getattr(block, name).detach() for block in model.blocks for name in ("w_q", "w_k")]
    norms = iter(_largest_singular_values(weights))
    return [{name: next(norms) for name in ("w_q", "w_k")} for _ in model.blocks]


def _largest_singular_values(weights: list[Tensor]) -> list[float]:
    if weights[0].device.type == "cpu":
        return [
            float(torch.linalg.matrix_norm(w, ord=2)) if w.isfinite().all() else math.nan for w in weights
        ]
    # A decomposition takes a GPU longer than ten steps of training. With G = WᵀW and N = 2^12,
    # tr(G·G^N) / tr(G^N) is the mean of G's eigenvalues weighted by their N-th power: at most 0.2 %
    # below the largest, whatever the others are.
    gram = torch.stack([w.double().mT @ w.double() for w in weights])
    power = gram
    for _ in range(12):
        power = power / power.norm(dim=(-2, -1), keepdim=True)
        power = power @ power
    largest = (gram * power).sum((-2, -1)) / power.diagonal(dim1=-2, dim2=-1).sum(-1)
    values: list[float] = largest.sqrt().tolist()
    return [value if math.isfinite(value) else math.nan for value in values]
