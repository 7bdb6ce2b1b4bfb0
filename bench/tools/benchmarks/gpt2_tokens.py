"""Tokens a second of GPT-2's training with one attention kernel and another: same model, same loop.

    python -m bench.tools.benchmarks.gpt2_tokens                # GPT-2 small, triton/stock beside sdpa-flash
    python -m bench.tools.benchmarks.gpt2_tokens --kernel triton/delta_fp32 --size medium --out tokens.json

Whole steps of `crash/gpt2` (accumulation, clipping, optimizer) on random tokens; kernels take turns in
rounds, so that drift of the clock hits all of them. Twice: with deterministic algorithms, as the case
trains, and without, where PyTorch's flash backward adds by atomics. Reported: median over the rounds,
its span, and the ratio to the first kernel's in the same rounds. Also what one look at the signals costs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backends.base import Backend
from bench.measure.inputs import raw_words
from bench.run.registry import load_backend
from cases.algorithms import strict
from cases.crash.gpt2.batches import CounterBatches, counter_header
from cases.crash.gpt2.data import Tokens
from cases.crash.gpt2.trainer import TokenTrainer
from cases.crash.training.log import TrainingLog
from cases.crash.training.model import GPT, Size
from cases.crash.training.norms import weight_norms
from cases.crash.training.recipe import Recipe

SIZES = {
    "small": Size(12, 768, 1024, mlp_ratio=4, vocabulary=50304, heads=12),
    "medium": Size(24, 1024, 1024, mlp_ratio=4, vocabulary=50304, heads=16),
    "tiny": Size(2, 64, 64, mlp_ratio=4, vocabulary=64, heads=2),  # to try the script on a CPU
}
REFERENCE = "sdpa-flash/stock"
TOKENS = 2**22


def trainers(arguments: argparse.Namespace, backend: Backend) -> dict[str, TokenTrainer]:
    """A trainer for each kernel, all on one model."""
    size = SIZES[arguments.size]
    ids = (raw_words(1, TOKENS) % min(size.vocabulary, 50257)).astype("<u2")
    sha256 = "0" * 64  # nobody asks for it
    header = counter_header("speed", 0, TOKENS, sha256, size.context, arguments.batch)
    model = GPT(size)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02) if parameter.dim() == 2 else parameter.fill_(1.0)
    model.to(backend.device)
    recipe = Recipe(10**6, arguments.batch, lr=1e-3, warmup=2000)
    names = [REFERENCE, *(name for name in arguments.kernel if name != REFERENCE)]
    return {
        name: TokenTrainer(
            model,
            backend.kernels()[name],
            recipe,
            ("speed", 0),
            torch.bfloat16,
            Tokens(ids, sha256),
            CounterBatches(header),
            arguments.micro_batch,
        )
        for name in names
    }


def one_step(trainer: TokenTrainer, step: int) -> None:
    """What a step of the loop does on the device, with the loss brought to the host."""
    trainer.gradients(step, look=False)
    trainer.read()
    trainer.update(step)


def seconds(backend: Backend, work: Callable[[], object]) -> float:
    backend.synchronize()
    start = time.perf_counter()
    work()
    backend.synchronize()
    return time.perf_counter() - start


def measure(
    found: dict[str, TokenTrainer], backend: Backend, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Tokens a second of each kernel, one value a round."""
    rates: dict[str, list[float]] = {name: [] for name in found}
    names = list(found)
    for name in names:  # compile, allocate
        with strict(found[name].kernel):
            one_step(found[name], 0)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            trainer = found[name]

            def work(trainer: TokenTrainer = trainer) -> None:
                with strict(trainer.kernel):
                    for step in range(steps):
                        one_step(trainer, step)

            tokens = steps * trainer.recipe.batch * trainer.model.size.context
            rates[name].append(tokens / seconds(backend, work))
    return rates


def cost_of_looking(trainer: TokenTrainer, backend: Backend) -> dict[str, float]:
    """Seconds of one look at the signals, of its weight norms, and of an SVD of the same weights."""
    trainer.log, blocks = TrainingLog([1.0], [1.0]), trainer.model.blocks
    weights = torch.stack([getattr(b, n).detach() for n in ("w_q", "w_k") for b in blocks])
    work: dict[str, Callable[[], object]] = {
        "look": lambda: trainer.look(0),
        "weight_norms": lambda: weight_norms(trainer.model),
        "svd": lambda: torch.linalg.matrix_norm(weights, ord=2),
    }
    for run in work.values():
        run()
    return {name: round(seconds(backend, run), 4) for name, run in work.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", nargs="+", default=["triton/stock"])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="a round")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    arguments = parser.parse_args()
    backend = load_backend(arguments.backend)
    print(backend.facts().identity["accelerator"], "torch", torch.__version__, vars(arguments))
    found = trainers(arguments, backend)
    modes: dict[str, AbstractContextManager[Any]] = {
        "deterministic": backend.deterministic(),
        "free": contextlib.nullcontext(),
    }
    rows = []
    for mode, context in modes.items():
        with context:
            rates = measure(found, backend, arguments.rounds, arguments.steps)
        for name, values in rates.items():
            ratios = [a / b for a, b in zip(values, rates[REFERENCE], strict=True)]
            rows.append(
                {
                    "mode": mode,
                    "kernel": name,
                    "tokens_per_s": statistics.median(values),
                    "span": [min(values), max(values)],
                    "vs_sdpa_flash": statistics.median(ratios),
                }
            )
            print(
                f"{mode:14s} {name:22s} {statistics.median(values) / 1e3:8.1f}k tokens/s "
                f"({min(values) / 1e3:.1f}k to {max(values) / 1e3:.1f}k)  x sdpa-flash "
                f"{statistics.median(ratios):.3f}"
            )
    with backend.deterministic():
        looking = cost_of_looking(found[REFERENCE], backend)
    print("seconds of one look at the signals:", looking)
    if arguments.out:
        facts = backend.facts().identity
        content = {
            "facts": facts,
            "arguments": {k: str(v) for k, v in vars(arguments).items()},
            "rows": rows,
            "looking_s": looking,
            "torch": torch.__version__,
        }
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
