"""The training loop: AdamW on the synthetic language, every number logged, stopped once exploded.

Attention gets one probe channel more (q 0, k `PROBE_KEY`, v 0, as in `bias/leak`): scores and output do
not change, and dq of that channel is rowsum(dS) of the very backward pass that trains the model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backends.base import Kernel
from bench.inputs import key_of, raw_words
from cases.crash.detector import Detector
from cases.crash.model import GPT, Size

PROBE_KEY = 4.0
REPEAT_TOL = 1e-3  # the paper's: entries this close to the row maximum repeat it
LOG_EVERY, MAX_LOGS = 10, 499
LEAK_WINDOW = (100, 400)  # steps over which the leak is pooled: before any run is lost


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


@dataclass
class Log:
    """What happened. Lists of a step each, and curves of a logged step each (`steps`)."""

    detector: Detector
    loss: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    leak: list[Tensor] = field(default_factory=list)  # [layers, B·T] of each logged step


class Probed:
    """Attention of one step: the kernel with the probe channel; looks closer in logged steps."""

    def __init__(self, kernel: Kernel, name: str, seed: int, step: int, look: bool):
        self.kernel, self.key, self.look = kernel, (name, seed, "rounding", step), look
        self.leaks: dict[int, Tensor] = {}  # by layer, [B, 1, T]
        self.row_max: dict[int, Tensor] = {}
        self.repeats: dict[int, Tensor] = {}  # bool: the row maximum repeats

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        kernel = self.kernel
        if "seed" in kernel.option_names:  # fresh random bits for every step and layer
            kernel = kernel.configure(seed=key_of(*self.key, layer) >> 65)
        padded = F.pad(q, (0, 1))  # [B, 1, T, D + 1]
        if self.look:
            self._look(layer, q.detach(), k.detach(), scale)
            padded.register_hook(lambda dq: self._leak(layer, dq[..., -1] / (scale * PROBE_KEY)))
        k, v = F.pad(k, (0, 1), value=PROBE_KEY), F.pad(v, (0, 1))
        o = kernel(padded, k, v, causal=True, scale=scale)
        return o[..., :-1]

    def _leak(self, layer: int, leak: Tensor) -> None:
        self.leaks[layer] = leak.detach()

    def _look(self, layer: int, q: Tensor, k: Tensor, scale: float) -> None:
        s = scale * (q @ k.mT)  # [B, 1, T, T]
        future = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(future, -math.inf)
        row_max = s.amax(-1, keepdim=True)
        self.row_max[layer] = row_max
        self.repeats[layer] = (s >= row_max - REPEAT_TOL).sum(-1) > 1


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
    model: GPT, text: Tensor, offsets: Tensor, kernel: Kernel, recipe: Recipe, size: Size,
    name: str, seed: int,
) -> Log:  # fmt: skip
    """Train `model` in place on `text` [length] from `offsets` [steps, B]; stops after an explosion."""
    log = Log(Detector())
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, weight_decay=0.0,
        fused=text.device.type in ("cpu", "cuda"),
    )  # fmt: skip
    span = torch.arange(size.context + 1, device=text.device)
    every = max(LOG_EVERY, math.ceil(recipe.steps / MAX_LOGS))
    for step in range(recipe.steps):
        rows = text[offsets[step][:, None] + span]  # [B, T + 1]
        look = step % every == 0
        attention = Probed(kernel, name, seed, step, look)
        logits = model(rows[:, :-1], attention)
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(1.0, (step + 1) / recipe.warmup)
        log.loss.append(loss.item())
        log.gradient_norm.append(norm.item())
        lost = log.detector.update(log.loss[-1], log.gradient_norm[-1])
        if look:
            _record(log, step, model, attention)
        if lost:
            break
        optimizer.step()
    return log


def _record(log: Log, step: int, model: GPT, attention: Probed) -> None:
    """One point of every curve; weights are those that gave this step's loss."""
    log.steps.append(step)
    leak = torch.stack([attention.leaks[i].flatten() for i in sorted(attention.leaks)])
    log.leak.append(leak.double().cpu())
    row_max = torch.stack([attention.row_max[i] for i in sorted(attention.row_max)])
    repeats = torch.stack([attention.repeats[i] for i in sorted(attention.repeats)])
    point = {
        "step": float(step),
        "loss": log.loss[-1],
        "gradient_norm": log.gradient_norm[-1],
        "leak_mean": float(log.leak[-1].mean()),
        "row_max_abs": float(row_max.abs().max()),
        "repeated_max_share": float(repeats.double().mean()),
    }
    for layer, norms in enumerate(spectral_norms(model)):
        for weight, norm in norms.items():
            point[f"{weight}_norm_{layer}"] = norm
    for curve, value in point.items():
        log.curves.setdefault(curve, []).append(value)


def spectral_norms(model: GPT) -> list[dict[str, float]]:
    """‖W_Q‖₂ and ‖W_K‖₂ of each layer; NaN where a weight is not finite."""
    return [
        {name: _spectral_norm(getattr(block, name)) for name in ("w_q", "w_k")}
        for block in model.blocks
    ]


def _spectral_norm(weight: Tensor) -> float:
    if not weight.isfinite().all():
        return math.nan
    return float(torch.linalg.matrix_norm(weight.detach(), ord=2))
