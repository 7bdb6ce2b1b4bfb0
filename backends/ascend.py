"""The Ascend backend: Huawei NPUs through torch_npu.

Kernels: the vendor's fused attention, ours of plain operators (and in Triton, where triton-ascend is
installed), the eager ones. torch_npu is imported when somebody asks whether there is an NPU, and not
before. Nothing here has run on a device yet; docs/ascend.md says what was checked, and how.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from backends.base import Kernel, MachineFacts
from backends.host import installed_version
from backends.kernels.composite import register_npu
from backends.kernels.composite_kernels import composite_kernels
from backends.kernels.eager_kernels import eager_kernels
from backends.kernels.npu_fusion import npu_fusion_kernels, torch_npu_version
from backends.kernels.triton_kernels import triton_kernels
from backends.knobs import Knob, attribute, deterministic, recorded
from backends.timers import DeviceTimer, device_memory

FLUSH_BYTES = 512 * 2**20  # more than twice the L2 cache (192 MB)
# Set, unless the user has set them, before torch_npu is loaded.
DETERMINISTIC_ENVIRONMENT = {
    "HCCL_DETERMINISTIC": "true",
    "LCCL_DETERMINISTIC": "1",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
    "ATB_LLM_LCOC_ENABLE": "0",
    "CLOSE_MATMUL_K_SHIFT": "1",
}
# Recorded besides: they decide how operators are queued, and what becomes of overflows.
ENVIRONMENT = (
    "ASCEND_LAUNCH_BLOCKING",
    "TASK_QUEUE_ENABLE",
    "INF_NAN_MODE_ENABLE",
    "INF_NAN_MODE_FORCE_DISABLE",
)
DRIVER_VERSION = Path("/usr/local/Ascend/driver/version.info")


@cache
def unavailable_reason() -> str | None:
    """Why no kernel can run on an NPU here; None if one can."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed (docs/ascend.md)"
    name = f"torch_npu {torch_npu_version()}"
    if torch.version.cuda is not None:  # loading it would abort the process: nothing to catch
        return f"{name} cannot be loaded beside a CUDA build of torch ({torch.__version__}): docs/ascend.md"
    try:
        load()
    except Exception as error:  # a missing library, another torch, a broken CANN: anything
        why = " ".join(str(error).split())[:200]
        return f"{name} is installed but does not load: {why} (CANN's set_env.sh, docs/ascend.md)"
    try:
        if not npu().is_available():
            return f"{name} sees no NPU (driver, or ASCEND_RT_VISIBLE_DEVICES)"
        if not computes():
            return "the NPU computes small sums wrongly: a stand-in for CANN, or a broken device"
    except RuntimeError as error:
        return f"{name} cannot use the NPU: {' '.join(str(error).split())[:200]}"
    return None


def load() -> None:
    """Import torch_npu, which gives torch its `npu`. It may print; stdout is for results."""
    for name, value in DETERMINISTIC_ENVIRONMENT.items():  # before anything of CANN reads it
        os.environ.setdefault(name, value)
    with contextlib.redirect_stdout(sys.stderr):
        importlib.import_module("torch_npu")


def npu() -> Any:
    """`torch.npu`, which torch_npu adds to torch."""
    return torch.get_device_module("npu")


def computes() -> bool:
    """Whether small integer products are right on the device. Libraries that stand in for CANN return
    what memory held before: nothing measured on them may be shown or stored."""
    x = torch.arange(1, 65, dtype=torch.float32).reshape(8, 8)
    return torch.equal((x.to("npu") @ x.to("npu") + 1).cpu(), x @ x + 1)


def create() -> AscendBackend:
    """The backend of the current NPU."""
    load()
    return AscendBackend()


class AscendBackend:
    """Kernels on the current NPU. torch_npu must be loaded."""

    name = "ascend"

    def __init__(self) -> None:
        register_npu()
        self.device = torch.device("npu", npu().current_device())
        self._kernels = _all_kernels()

    def kernels(self) -> Mapping[str, Kernel]:
        return self._kernels

    def facts(self) -> MachineFacts:
        properties = npu().get_device_properties(self.device)
        with self.deterministic():
            level = _deterministic_level()
        environment = (*DETERMINISTIC_ENVIRONMENT, *ENVIRONMENT)
        identity: dict[str, Any] = {
            "accelerator": properties.name,
            "soc_version": npu().get_soc_version(),
            "memory_mib": properties.total_memory // 2**20,
            "torch_npu": torch_npu_version(),
            "cann": _cann_version("CANN"),
            "driver": _cann_version("DRIVER") or _driver_version(),
            "triton_ascend": _triton_ascend_version(),
            "knobs": {
                **recorded(self.knobs()),
                "deterministic_level": level,
                **{name: os.environ[name] for name in environment if name in os.environ},
            },
        }
        return MachineFacts(identity)

    def knobs(self) -> Mapping[str, Knob]:
        return {
            "matmul_hf32": attribute(npu().matmul, "allow_hf32", False),
            "conv_hf32": attribute(npu().conv, "allow_hf32", False),
        }

    def deterministic(self) -> AbstractContextManager[None]:
        """torch's switch alone: torch_npu follows it (level 1) and warns where the two are mixed."""
        return deterministic(self.knobs(), warn_only=True)

    def synchronize(self) -> None:
        npu().synchronize(self.device)

    def peak_memory(self) -> int:
        return int(npu().max_memory_allocated(self.device))

    def time_ms(self, run: Callable[[], object], rounds: int) -> list[float]:
        """Overwriting L2 before every call also keeps the device busy while the host queues the call."""
        return DeviceTimer(npu(), self.device, FLUSH_BYTES)(run, rounds)

    def memory_of(self, run: Callable[[], object]) -> int:
        return device_memory(npu(), self.device, run)


def _all_kernels() -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {**npu_fusion_kernels(), **composite_kernels()}
    if _triton_ascend_version() is not None:  # another Triton cannot compile for an NPU
        kernels.update(triton_kernels())
    return {**kernels, **eager_kernels()}


def _deterministic_level() -> int | None:
    """As torch_npu has it now; None in versions that do not say."""
    read = getattr(npu(), "_get_deterministic_level", None)
    return None if read is None else int(read())


def _cann_version(module: str) -> str | None:
    """Version of a part of CANN, as torch_npu reads it from its files; None where they are not found."""
    from torch_npu.npu.utils import get_cann_version

    return get_cann_version(module) or None


def _driver_version() -> str | None:
    try:
        found = re.search(r"^Version=([\w.-]+)", DRIVER_VERSION.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1) if found else None


def _triton_ascend_version() -> str | None:
    return installed_version("triton-ascend")
