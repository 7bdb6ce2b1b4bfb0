"""What a finished run's log says: its metrics and its verdict. Losses in nats, steps from 0."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from bench.measure.metrics import signed_coherence
from cases.crash.training.log import TrainingLog
from cases.crash.training.signals import coherence_by_head, largest

LAST = ("row_max_abs", "repeated_max_share")  # curves whose last point is a metric; norms of weights too


def run_metrics(log: TrainingLog) -> dict[str, float]:
    """Crash, losses, the last of the curves; and the leak, pooled from tensors where the log has some."""
    detector = log.detector
    metrics = {
        "crash_step": math.inf if detector.crash is None else float(detector.crash),
        "spikes": float(detector.spikes),
        "steps_run": float(len(log.loss)),
        "best_loss": detector.best,
        "last_loss": log.loss[-1],
        "gradient_norm_last": log.gradient_norm[-1],
    }
    return metrics | {name: x[-1] for name, x in log.curves.items() if name in LAST or "_norm_" in name}


def leak_of_tensors(leaks: list[Tensor]) -> dict[str, float]:
    """Leaks [layers, B, H, T] of the steps pooled over; nothing where the run was too short for any."""
    if not leaks:
        return {}
    leak = torch.stack(leaks)  # [logs, layers, B, H, T]
    metrics = {
        "leak_mean": float(leak.mean()),
        "leak_rms": float(leak.square().mean().sqrt()),
        "leak_coherence": float(signed_coherence(leak)),
    }
    for layer, heads in enumerate(coherence_by_head(leak)):
        metrics[f"leak_coherence_{layer}"] = float(signed_coherence(leak[:, layer]))
        metrics[f"leak_coherence_head_{layer}"] = largest(heads)
    return metrics


def leak_of_curves(curves: Mapping[str, list[float]]) -> dict[str, float]:
    """The leak of all steps looked at, from the curves of its mean and its mean size, in all and by layer."""
    if "leak_mean" not in curves:
        return {}
    metrics = {"leak_mean": float(np.mean(curves["leak_mean"]))}
    for name in (name for name in curves if name.startswith("leak_mean")):
        part = name.removeprefix("leak_mean")  # "", or "_0" for the first layer
        total = sum(curves[f"leak_abs{part}"])
        metrics[f"leak_coherence{part}"] = sum(curves[name]) / total if total else 0.0
    return metrics


def training_verdict(metrics: Mapping[str, float]) -> str:
    """`exploded@STEP`, `stable@STEPS`, or `spike`, from the metrics of a run."""
    crash = metrics["crash_step"]
    if math.isfinite(crash):
        return f"exploded@{crash:.0f}"
    return "spike" if metrics["spikes"] > 0 else f"stable@{metrics['steps_run']:.0f}"
