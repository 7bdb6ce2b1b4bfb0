"""The CPU backend: the eager kernels and PyTorch's own CPU attention."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from backends.base import Kernel, MachineFacts
from backends.kernels.eager_kernels import eager_kernels
from backends.kernels.sdpa import cpu_sdpa_kernels

# Variables that make the libraries below choose other code, hence other bits.
ENVIRONMENT = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "KMP_DETERMINISTIC_REDUCTION",
    "ATEN_CPU_CAPABILITY",
)


def unavailable_reason() -> str | None:
    """A CPU is always there."""
    return None


def create() -> CpuBackend:
    """The backend of this machine's CPU."""
    return CpuBackend()


def _library(pattern: str) -> str | None:
    """A library's name or version out of torch's build description; None where it is not built in."""
    found = re.search(pattern, torch.__config__.show())
    return found.group(1) if found else None


class CpuBackend:
    """Kernels on the host."""

    name = "cpu"
    device = torch.device("cpu")

    def kernels(self) -> Mapping[str, Kernel]:
        return {**eager_kernels(), **cpu_sdpa_kernels()}

    def facts(self) -> MachineFacts:
        from backends.host import cpu_facts

        cpu = cpu_facts()
        accelerator = f"{cpu['model']}, {cpu['cores']} cores"
        identity: dict[str, Any] = {
            "accelerator": accelerator,
            "threads": torch.get_num_threads(),
            "vector_capability": torch.backends.cpu.get_cpu_capability(),
            "blas": _library(r"BLAS_INFO=(\w+)"),
            "mkl": _library(r"Math Kernel Library Version ([\d.]+)"),
            "onednn": _library(r"MKL-DNN v([\d.]+)"),
            "knobs": {
                "deterministic_algorithms": True,
                "float32_matmul_precision": "highest",
                **{name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            },
        }
        return MachineFacts(identity)

    @contextlib.contextmanager
    def deterministic(self) -> Iterator[None]:
        enabled = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        precision = torch.get_float32_matmul_precision()
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            torch.set_float32_matmul_precision(precision)

    def synchronize(self) -> None:
        """Nothing runs behind our back on the host."""

    def time_ms(self, run: Callable[[], object], rounds: int) -> list[float]:
        run()
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def memory_of(self, run: Callable[[], object]) -> None:
        """The host's allocator keeps no such count."""

    def peak_memory(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
