"""Training steps a second of `crash/ladder`, plain, captured as CUDA graphs and compiled; and their losses.

    python -m bench.tools.benchmarks.ladder_steps            # the GPU size, about two minutes on an H200
    python -m bench.tools.benchmarks.ladder_steps --kernel "eager-ladder/stock" --steps 200
    python -m bench.tools.benchmarks.ladder_steps --tiny               # any machine, to see that it runs

Each variant trains a fresh model from the same weights on the same batches. The rate is taken between
two looks, the first after everything has been compiled and captured, and includes looks (one step
in `--log-every`). Graphs must give the losses of the plain loop bit for bit; what torch.compile
changes is printed as the number of steps whose loss differs and by how much.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch

from backends.base import Backend, Kernel
from bench.measure.inputs import digest
from bench.run.registry import load_backend
from cases.algorithms import algorithms, one_thread
from cases.crash.ladder import Params, make_text
from cases.crash.training.log import TrainingLog
from cases.crash.training.loop import Watch, train
from cases.crash.training.model import fresh_model
from cases.crash.training.text_trainer import TextTrainer, batch_offsets

GPU_SIZE: dict[str, Any] = {
    "layers": 6,
    "width": 384,
    "heads": 6,
    "context": 512,
    "batch": 32,
    "mlp_ratio": 4,
    "vocabulary": 8192,
    "lr": 3e-3,
    "warmup": 300,
}
TINY: dict[str, Any] = {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "context": 32,
    "batch": 2,
    "vocabulary": 1024,
}
KERNELS: tuple[tuple[str, dict[str, int]], ...] = (
    ("eager-ladder/stock", {"mantissa_bits": 3}),
    ("eager-ladder/delta_dp", {"mantissa_bits": 3}),
    ("eager-ladder/stochastic", {"mantissa_bits": 3}),
    ("triton/stock", {}),
    ("triton/delta_fp32", {}),
)


@dataclass(frozen=True)
class Variant:
    """One way to run the same training."""

    kernel: Kernel
    graph: bool
    again: bool = False  # a second run of the same

    @property
    def label(self) -> str:
        compiled = getattr(self.kernel.options, "compiled", False)
        ways = [("compiled", compiled), ("graph", self.graph), ("again", self.again)]
        return " ".join(name for name, used in ways if used) or "plain"


def variants(kernel: Kernel, graphs: bool) -> list[Variant]:
    """Plain first: the others are compared with it."""
    kernels = [kernel]
    if "compiled" in kernel.option_names:
        kernels.append(kernel.configure(compiled=True))
    graphs = graphs and not kernel.draws
    ways = [Variant(k, graph) for k in kernels for graph in ((False, True) if graphs else (False,))]
    return [*ways, Variant(ways[-1].kernel, ways[-1].graph, again=True)]


class TimedTrainer(TextTrainer):
    """Notes when all before a look has been computed."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.looks: list[tuple[int, float]] = []  # step, seconds

    def look(self, step: int) -> dict[str, float]:
        self.looks.append((step, time.perf_counter()))
        return super().look(step)


def measure(
    variant: Variant, backend: Backend, params: Params, dtype: torch.dtype
) -> tuple[TrainingLog, float, float]:
    """The log, steps a second between the second look and the last, and seconds up to the second."""
    text = make_text(params.vocabulary)
    offsets = batch_offsets("speed", params.seed, params.steps, params.batch, len(text) - params.context)
    trainer = TimedTrainer(
        fresh_model("speed", params.size, params.seed).to(backend.device),
        variant.kernel,
        params.recipe,
        ("speed", params.seed),
        dtype,
        text.to(backend.device),
        offsets.to(backend.device),
        variant.graph,
    )
    start = time.perf_counter()
    with backend.deterministic(), one_thread(), algorithms(deterministic=True):
        log = train(trainer, Watch(params.log_every, read_every=0))
    (first, began), (last, ended) = trainer.looks[1], trainer.looks[-1]
    return log, (last - first) / (ended - began), began - start


def compare(log: TrainingLog, plain: TrainingLog) -> str:
    """How the losses of a variant differ from the plain loop's."""
    a, b = np.array(log.loss), np.array(plain.loss)
    different = int((a != b).sum())
    if not different:
        return "same losses"
    first = int(np.argmax(a != b))
    return f"{different} of {len(a)} losses differ, from step {first}, by up to {abs(a - b).max():.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernel", default="*", help="glob")
    parser.add_argument("--steps", type=int, default=126, help="one more than a multiple of looks")
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    backend = load_backend(args.backend)
    size = TINY if args.tiny else GPU_SIZE
    params = Params(**size, steps=args.steps, log_every=args.log_every)
    on_cuda = backend.device.type == "cuda"
    name = torch.cuda.get_device_name() if on_cuda else "CPU"
    print(f"device: {name}, torch {torch.__version__}; {params.recorded()}", flush=True)
    for kernel_name, options in KERNELS:
        if not fnmatch(kernel_name, args.kernel) or kernel_name not in backend.kernels():
            continue
        kernel = backend.kernels()[kernel_name].configure(**options)
        plain: TrainingLog | None = None
        for variant in variants(kernel, on_cuda):
            try:
                log, rate, seconds = measure(variant, backend, params, torch.bfloat16)
            except Exception as error:  # the other variants are worth knowing
                print(f"{kernel_name:26s} {variant.label:22s} failed: {error!r:.300}", flush=True)
                continue
            plain = plain or log
            losses = torch.tensor(log.loss)
            print(
                f"{kernel_name:26s} {variant.label:22s} {rate:7.1f} steps/s, {seconds:5.1f} s before; "
                f"loss {log.loss[-1]:.4f}, sha256 {digest(losses)[:12]}, {compare(log, plain)}",
                flush=True,
            )
    if on_cuda:
        print(f"peak memory: {(backend.peak_memory() or 0) / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
