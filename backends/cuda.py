"""The CUDA backend: NVIDIA GPUs of capability 8.0 (A100) and newer.

Kernels: ours in Triton, the eager ones on the device, PyTorch's flash, cuDNN, memory-efficient and math
attention, FlexAttention, and the `flash_attn` packages where they are installed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from backends.base import Kernel, MachineFacts
from backends.kernels.eager_kernels import eager_kernels
from backends.kernels.sdpa import cuda_sdpa_kernels

MIN_CAPABILITY = (8, 0)
FLUSH_BYTES = 256 * 2**20  # several times the largest L2 cache (60 MB on an H200)
HOLD_CYCLES = 4_000_000  # about 2 ms: longer than the host needs to queue a forward and backward pass
WARM_UP = 3


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
            "triton": _version("triton"),
            "knobs": {
                "deterministic_algorithms": True,
                "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "unset"),
                "matmul_tf32": False,
                "cudnn_tf32": False,
                "bf16_reduced_precision_reduction": False,
                "fp16_reduced_precision_reduction": False,
            },
        }
        volatile = {
            f"cuda_{name}": smi[name]
            for name in ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
            if name in smi
        }
        return MachineFacts(identity, volatile)

    @contextlib.contextmanager
    def deterministic(self) -> Iterator[None]:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        enabled = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        before = (
            matmul.allow_tf32,
            cudnn.allow_tf32,
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
        )
        torch.use_deterministic_algorithms(True, warn_only=True)
        _set_precision(False, False, False, False)
        try:
            with warnings.catch_warnings():
                # What has no deterministic version runs as users run it; the case measures it.
                warnings.filterwarnings("ignore", message=".*determinis.*")
                yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            _set_precision(*before)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def time_ms(self, run: Callable[[], object], rounds: int) -> list[float]:
        """By device events. Before every call L2 is overwritten and the device kept busy until the host
        has queued the call, so that neither a warm cache nor the host's launch time counts."""
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        for _ in range(WARM_UP):
            run()
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(rounds)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(rounds)]
        for start, end in zip(starts, ends, strict=True):
            flush.zero_()
            torch.cuda._sleep(HOLD_CYCLES)
            start.record()
            run()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]

    def memory_of(self, run: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


def _set_precision(tf32: bool, cudnn_tf32: bool, bf16: bool, fp16: bool) -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32, cudnn_tf32
    matmul.allow_bf16_reduced_precision_reduction = bf16
    matmul.allow_fp16_reduced_precision_reduction = fp16


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
