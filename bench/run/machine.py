"""Facts about the machine: what identifies it (compared) and what changes (not compared).

Nothing personal: no user, host name, path, address or process.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any

from backends.base import Backend
from backends.host import cpu_facts, os_facts, versions
from bench.files.records import Machine, slug_of
from bench.run.distributed import facts as distributed_facts


def describe_machine(backends: Sequence[Backend]) -> Machine:
    """The identity of this machine with the backends used."""
    several = distributed_facts()  # more processes are another machine: sums in another order
    facts = {backend.name: dict(backend.facts().identity) | several for backend in backends}
    return Machine(slug=slug_of(facts), cpu=cpu_facts(), os=os_facts(), versions=versions(), backends=facts)


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
