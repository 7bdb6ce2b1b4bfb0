"""Does the leak drive W_Q and W_K as its eigenvalues say? Splits every update of a CPU ladder run.

    python -m bench.tools.studies.leak_plane --seeds 0 1 --out docs/data/leak-plane-cpu.json

δ's error adds λ_i·P_ij to dS, λ = rowsum(dS). Its part of the weight gradients is therefore known
exactly, with x the block's normalised input and α the scale of the scores:

    E_Q = α Σ_i λ_i (PK)_i x_iᵀ        E_K = α Σ_i λ_i q_i (PX)_iᵀ

AdamW's update is linear in the moving average of the gradient once its denominator is given, so the
update splits exactly too: the leak's part is AdamW's step with the moving average of E in place of the
gradient's, over the run's own denominator. Both parts are applied to the mean input x̄ and projected
on the mean query q̄ = W_Q x̄ and mean key k̄ = W_K x̄:

    leak's part of Δq̄ along k̄ = rate_q·|k̄|        leak's part of Δk̄ along q̄ = rate_k·|q̄|

The linear map of the plane that the leak makes is [[0, rate_q], [rate_k, 0]], eigenvalues
±√(rate_q·rate_k): equal signs grow exponentially, opposite signs turn. What all scores share is
common = α q̄·k̄; its change is the leak's part, the rest of the gradient's, and that of x̄.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.base import Backend, Kernel
from bench.run.registry import load_backend
from cases.algorithms import algorithms, one_thread
from cases.crash.ladder import Params, make_text
from cases.crash.training.attention import Seen, leak_of
from cases.crash.training.model import GPT, Block, fresh_model
from cases.crash.training.recipe import Recipe
from cases.crash.training.text_trainer import TextTrainer, batch_offsets

CASE = "crash/ladder"  # its weights, its batches
FIXES = ("stock", "delta_error_flipped", "delta_fp32", "delta_dp")
WINDOW = 50  # steps that a point of the output sums over
DIGITS = 5


@dataclass
class BlockInputs:
    """The input [B, T, C] of each block's projections, caught as it comes by."""

    model: GPT
    x: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for block in self.model.blocks:
            block.register_forward_pre_hook(self._catch)

    def _catch(self, block: Block, arguments: tuple[Any, ...]) -> None:
        h = arguments[0].detach()
        self.x[block.layer] = F.layer_norm(h, h.shape[-1:], block.norm_attention.detach())


@torch.no_grad()
def leak_gradients(seen: Seen, x: Tensor) -> tuple[Tensor, Tensor]:
    """E_Q and E_K [C, C] of a layer with one head, from its backward pass and its input x [B, T, C]."""
    leak = leak_of(seen).float()[:, 0, :, None]  # [B, T, 1]
    q, k = seen.q[:, 0], seen.k[:, 0]  # [B, T, D]
    future = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    p = (seen.scale * (q @ k.mT)).masked_fill(future, -torch.inf).softmax(-1)  # [B, T, T]
    e_q = seen.scale * (leak * (p @ k)).flatten(0, 1).T @ x.flatten(0, 1)
    e_k = seen.scale * (leak * q).flatten(0, 1).T @ (p @ x).flatten(0, 1)
    return e_q, e_k


@dataclass
class Split:
    """The leak's part of AdamW's moving average of one weight's gradient."""

    average: Tensor
    steps: int = 0

    def add(self, e: Tensor, recipe: Recipe) -> None:
        self.average.lerp_(e, 1 - recipe.betas[0])
        self.steps += 1

    def updates(self, trainer: TextTrainer, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """What the last update of `weight` owes to the leak, and the rest of it."""
        state, recipe = trainer.optimizers[0].state[weight], trainer.recipe
        first, second = (1 - beta**self.steps for beta in recipe.betas)
        factor = -lr / first / ((state["exp_avg_sq"] / second).sqrt() + recipe.eps)
        return factor * self.average, factor * (state["exp_avg"] - self.average)


@dataclass
class Layer:
    """One block's splits and what they sum to in the present window."""

    block: Block
    q: Split
    k: Split
    sums: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, block: Block) -> Layer:
        q, k = (Split(torch.zeros_like(w.detach())) for w in (block.w_q, block.w_k))
        return cls(block, q, k)

    @torch.no_grad()
    def observe(
        self, before: tuple[Tensor, Tensor], trainer: TextTrainer, lr: float, x: Tensor, seen: Seen
    ) -> None:
        """Add the last update; `before` are W_Q and W_K that gave it."""
        mean = x.mean((0, 1))  # x̄ [C]
        q, k = (w @ mean for w in before)
        (leak_q, rest_q), (leak_k, rest_k) = (
            tuple(part @ mean for part in split.updates(trainer, weight, lr))
            for split, weight in ((self.q, self.block.w_q), (self.k, self.block.w_k))
        )
        leak = leak_of(seen).float()
        point = {
            "leak": leak.mean(),
            "leak_abs": leak.abs().mean(),
            "rate_q": leak_q @ k / (k @ k),
            "rate_k": leak_k @ q / (q @ q),
            "common_leak": seen.scale * (leak_q @ k + leak_k @ q),
            "common_rest": seen.scale * (rest_q @ k + rest_k @ q),
            "common": seen.scale * (q @ k),
            "cosine": q @ k / (q.norm() * k.norm()),
            "query": q.norm(),
            "key": k.norm(),
        }
        for name, value in point.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def take(self, steps: int) -> dict[str, float]:
        """Means over the window, and start the next."""
        taken = {name: float(f"{total / steps:.{DIGITS}g}") for name, total in self.sums.items()}
        self.sums.clear()
        return taken


def run(kernel: Kernel, params: Params) -> tuple[dict[str, Any], list[float]]:
    """Train as `crash/ladder` does; means over each window of steps, by layer, and the loss of each step."""
    text = make_text(params.vocabulary)
    offsets = batch_offsets(CASE, params.seed, params.steps, params.batch, len(text) - params.context)
    model = fresh_model(CASE, params.size, params.seed)
    stream = (CASE, params.seed)
    trainer = TextTrainer(model, kernel, params.recipe, stream, torch.float32, text, offsets)
    inputs, layers = BlockInputs(model), [Layer.of(cast(Block, block)) for block in model.blocks]
    points: list[dict[str, Any]] = []
    for now, lost in _steps(trainer, inputs, layers):
        if (now + 1) % WINDOW == 0 or lost or now == params.steps - 1:
            size = now % WINDOW + 1
            points.append({"step": now, "steps": size, "layers": [x.take(size) for x in layers]})
    detector = trainer.log.detector
    end = f"exploded@{detector.crash}" if detector.exploded else f"stable@{params.steps}"
    return {"seed": params.seed, "verdict": end, "windows": points}, trainer.log.loss


def _steps(trainer: TextTrainer, inputs: BlockInputs, layers: list[Layer]) -> Iterator[tuple[int, bool]]:
    """Step, and whether the run is lost."""
    recipe = trainer.recipe
    for now in range(recipe.steps):
        trainer.gradients(now, look=True)
        ((loss, norm),) = trainer.read()
        lost = trainer.log.add([(loss, norm)], stop_after_explosion=True)
        clip = min(1.0, recipe.clip / (norm + 1e-6))  # as clip_grad_norm_ does
        before = [(b.block.w_q.detach().clone(), b.block.w_k.detach().clone()) for b in layers]
        seen = trainer.present.seen
        for number, layer in enumerate(layers):
            e_q, e_k = leak_gradients(seen[number], inputs.x[number])
            layer.q.add(clip * e_q, recipe)
            layer.k.add(clip * e_k, recipe)
        trainer.update(now)
        for number, layer in enumerate(layers):
            layer.observe(before[number], trainer, recipe.lr_at(now), inputs.x[number], seen[number])
        yield now, lost
        if lost:
            return


def measure(backend: Backend, fix: str, seed: int, steps: int, bits: int) -> dict[str, Any]:
    kernel = backend.kernels()[f"eager-ladder/{fix}"].configure(mantissa_bits=bits)
    with one_thread(), algorithms(deterministic=True):
        found, _ = run(kernel, Params(seed=seed, steps=steps))
    return {"kernel": kernel.name, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", nargs="+", default=list(FIXES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--bits", type=int, default=1, help="mantissa bits of O and P̄")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    backend, runs = load_backend("cpu"), []
    for fix in args.fix:
        for seed in args.seeds:
            began = time.perf_counter()
            runs.append(measure(backend, fix, seed, args.steps, args.bits))
            seconds = time.perf_counter() - began
            print(f"{fix} seed {seed}: {runs[-1]['verdict']}, {seconds:.0f} s", flush=True)
            document = {"torch": torch.__version__, "mantissa_bits": args.bits, "runs": runs}
            args.out.write_text(json.dumps(document, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
