"""Facts about the machine: what identifies it (compared) and what changes (not compared).

Nothing personal: no user, host name, path, address or process.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import cpuinfo

from backends.base import Backend
from bench.files.records import Machine
from bench.run.distributed import facts as distributed_facts

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
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def describe_machine(backends: Sequence[Backend]) -> Machine:
    """The identity of this machine with the backends used."""
    several = distributed_facts()  # more processes are another machine: sums in another order
    facts = {backend.name: dict(backend.facts().identity) | several for backend in backends}
    return Machine(
        slug=slug_of(facts), cpu=cpu_facts(), os=os_facts(), versions=versions(), backends=facts
    )


def slug_of(backends: dict[str, Any]) -> str:
    """Folder name of a machine: the accelerator's name, that of the CPU only where it is alone."""
    names = [name for name in sorted(backends) if name != "cpu"] or sorted(backends)
    accelerator = str(backends[names[0]].get("accelerator", "")) if names else ""
    return re.sub(r"[^a-z0-9]+", "-", accelerator.lower()).strip("-")[:80] or "unknown"


def volatile_facts(backends: Sequence[Backend], peaks: bool = True) -> dict[str, Any]:
    """Time and load at the moment of writing; never compared.

    `peaks`: memory peaks too, which are this process's own: not those of units that ran in others.
    """
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    facts: dict[str, Any] = {"written": now.isoformat()}
    if hasattr(os, "getloadavg"):
        facts["load_1min"] = round(os.getloadavg()[0], 2)
    for backend in backends:
        if peaks and (peak := backend.peak_memory()) is not None:
            facts[f"{backend.name}_peak_mib"] = peak // 2**20
        facts |= backend.facts().volatile
    return facts
