"""The CUDA backend: NVIDIA GPUs of capability 8.0 (A100) and newer.

Kernels: ours in Triton, the eager ones on the device, PyTorch's flash, cuDNN, memory-efficient and math
attention, FlexAttention, and the `flash_attn` packages where they are installed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from backends.base import Kernel, MachineFacts
from backends.host import installed_version
from backends.kernels.eager_kernels import eager_kernels
from backends.kernels.sdpa import cuda_sdpa_kernels
from backends.knobs import Knob, attribute, deterministic, recorded
from backends.timers import DeviceTimer, device_memory

MIN_CAPABILITY = (8, 0)
FLUSH_BYTES = 256 * 2**20  # several times the largest L2 cache (60 MB on an H200)
HOLD_CYCLES = 4_000_000  # about 2 ms: longer than the host needs to queue a forward and backward pass


def unavailable_reason() -> str | None:
    """Why no kernel can run on a CUDA device here; None if one can."""
    if torch.version.hip:
        return "this torch is built for ROCm"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (driver, or CUDA_VISIBLE_DEVICES)"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(), capability
        return f"{name} has capability {major}.{minor}; 8.0 (sm80) or newer is needed"
    return None


def create() -> CudaBackend:
    """The backend of the current CUDA device."""
    # cuBLAS reads this when its handle is made; without it its reductions may differ run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return CudaBackend()


class CudaBackend:
    """Kernels on the current CUDA device."""

    name = "cuda"

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._kernels = _all_kernels()

    def kernels(self) -> Mapping[str, Kernel]:
        return self._kernels

    def facts(self) -> MachineFacts:
        properties = torch.cuda.get_device_properties(self.device)
        smi = _nvidia_smi(f"GPU-{properties.uuid}")
        identity: dict[str, Any] = {
            "accelerator": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_mib": properties.total_memory // 2**20,
            "driver": smi.get("driver_version"),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "triton": installed_version("triton"),
            "knobs": {
                **recorded(self.knobs()),
                "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "unset"),
            },
        }
        volatile = {
            f"cuda_{name}": smi[name]
            for name in ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
            if name in smi
        }
        return MachineFacts(identity, volatile)

    def knobs(self) -> Mapping[str, Knob]:
        matmul = torch.backends.cuda.matmul
        return {
            "matmul_tf32": attribute(matmul, "allow_tf32", False),
            "cudnn_tf32": attribute(torch.backends.cudnn, "allow_tf32", False),
            **{
                f"{dtype}_reduced_precision_reduction": attribute(
                    matmul, f"allow_{dtype}_reduced_precision_reduction", False
                )
                for dtype in ("bf16", "fp16")
            },
        }

    def deterministic(self) -> AbstractContextManager[None]:
        return deterministic(self.knobs(), warn_only=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def time_ms(self, run: Callable[[], object], rounds: int) -> list[float]:
        return self.timer()(run, rounds)

    def timer(self) -> DeviceTimer:
        """Holds the device until the host has queued a call."""
        return DeviceTimer(torch.cuda, self.device, FLUSH_BYTES, lambda: torch.cuda._sleep(HOLD_CYCLES))

    def memory_of(self, run: Callable[[], object]) -> int:
        return device_memory(torch.cuda, self.device, run)


def _all_kernels() -> dict[str, Kernel]:
    from backends.kernels.flash_attn import flash_attn_kernels
    from backends.kernels.flex import flex_kernels
    from backends.kernels.triton_kernels import triton_kernels

    return {
        **triton_kernels(),
        **cuda_sdpa_kernels(),
        **flex_kernels(),
        **flash_attn_kernels(),
        **eager_kernels(),
    }


def _nvidia_smi(uuid: str) -> dict[str, str]:
    """Driver and present clocks; empty where nvidia-smi is not there."""
    names = ["driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw"]
    command = [
        "nvidia-smi",
        f"--id={uuid}",
        f"--query-gpu={','.join(names)}",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(names, values, strict=False))
