"""Facts about the host: its CPU, its operating system, versions of packages.

Nothing personal: no user, host name, path, address or process.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from functools import cache
from typing import Any

import cpuinfo

# Instruction sets that change which matrix or exp code a library picks.
ISA_FLAGS = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni",
    "avx512vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimdhp", "asimddp", "fphp", "bf16", "i8mm", "sve", "sve2", "sme",
)  # fmt: skip
PACKAGES = ("torch", "numpy")  # a backend adds what its own kernels depend on


@cache
def cpu_facts() -> dict[str, Any]:
    """CPU model, the instruction sets that matter, cores this process may use."""
    info = cpuinfo.get_cpu_info()
    model = info.get("brand_raw") or platform.processor() or platform.machine()
    if "family" in info and "model" in info:
        model += f" (family {info['family']}, model {info['model']})"
    flags = set(info.get("flags", []))
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "model": model,
        "arch": platform.machine(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
    }


def os_facts() -> dict[str, Any]:
    """Operating system, without the build name of a kernel (which may hold a host name)."""
    release = re.match(r"\d+(\.\d+)*", platform.release())
    facts = {"system": platform.system(), "kernel": release.group() if release else "unknown"}
    if platform.system() == "Linux":
        try:
            facts["distribution"] = platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
        except OSError:
            facts["distribution"] = "unknown"
    return facts


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide the bits; None where not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    return found | {package: installed_version(package) for package in PACKAGES}


def installed_version(package: str) -> str | None:
    """Version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
