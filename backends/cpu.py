"""The CPU backend: the eager kernels and PyTorch's own CPU attention."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from backends.base import Kernel, MachineFacts
from backends.host import cpu_facts
from backends.kernels.eager_kernels import eager_kernels
from backends.kernels.sdpa import cpu_sdpa_kernels
from backends.knobs import Knob, deterministic, recorded
from backends.timers import host_ms

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
                **recorded(self.knobs()),
                **{name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            },
        }
        return MachineFacts(identity)

    def knobs(self) -> Mapping[str, Knob]:
        precision = Knob(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest")
        return {"float32_matmul_precision": precision}

    def deterministic(self) -> AbstractContextManager[None]:
        return deterministic(self.knobs(), warn_only=False)

    def synchronize(self) -> None:
        """Nothing runs behind our back on the host."""

    def time_ms(self, run: Callable[[], object], rounds: int) -> list[float]:
        return host_ms(run, rounds)

    def memory_of(self, run: Callable[[], object]) -> None:
        """The host's allocator keeps no such count."""

    def peak_memory(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
