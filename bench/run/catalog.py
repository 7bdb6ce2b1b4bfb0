"""What there is: backends, kernels, cases, configs. For `list`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tabulate import tabulate

from backends import BACKENDS
from bench.errors import UsageError
from bench.files.source import ROOT
from bench.run.config import own_configs, read_config
from bench.run.engine import offered_kernels
from bench.run.registry import load_backend, unavailable_reason
from cases import CASES, load_case


def catalog() -> dict[str, Any]:
    """Everything that can be named in a config, as plain data."""
    found: dict[str, Any] = {"backends": [], "kernels": [], "cases": [], "configs": []}
    for name in BACKENDS:
        reason = unavailable_reason(name)
        found["backends"].append({"name": name, "available": reason is None, "reason": reason or ""})
        if reason is None:
            kernels = offered_kernels([load_backend(name)])
            found["kernels"] += [kernel.model_dump() for kernel in kernels]
    for name in CASES:
        case = load_case(name)
        params = {field: info.default for field, info in case.Params.model_fields.items()}
        found["cases"].append({"name": name, "question": case.question, "params": params})
    for path in own_configs():
        try:
            _, text = read_config(path)
            about = text.splitlines()[0].lstrip("# ")
        except UsageError as error:
            about = f"not readable: {error}"
        shown = path.relative_to(ROOT) if Path.cwd() == ROOT else path
        found["configs"].append({"path": str(shown), "about": about})
    return found


def catalog_text(found: dict[str, Any]) -> str:
    """The catalogue for a terminal."""
    backends = [(b["name"], "yes" if b["available"] else f"no: {b['reason']}") for b in found["backends"]]
    kernels = [
        (k["backend"], k["kernel"], ", ".join(k["dtypes"]), _pairs(k["options"])) for k in found["kernels"]
    ]
    cases = [(c["name"], c["question"], _pairs(c["params"])) for c in found["cases"]]
    configs = [(c["path"], c["about"]) for c in found["configs"]]
    parts = [
        tabulate(backends, ["backend", "available"]),
        tabulate(kernels, ["backend", "kernel", "dtypes", "options and defaults"]),
        tabulate(cases, ["case", "question", "parameters and defaults"], maxcolwidths=[None, 60, 60]),
        tabulate(configs, ["config", "about"]),
    ]
    return "\n\n".join(parts)


def _pairs(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
