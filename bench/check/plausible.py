"""Could a chip have measured this? Ranges that numbers cannot leave, and the peak that no kernel passes.

A reviewer has no such machine. What can be said without it: shares lie between 0 and 1, quantiles are in
order, and the matrix units of a chip do so many operations a second and no more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from bench.files.records import Facts, Row
from cases import known_case

# Dense matrix throughput in BF16 and FP16 with FP32 accumulation, TFLOP/s, at boost clock, as the makers
# state it. The first pattern found in the accelerator's name counts, so variants come first.
PEAKS: tuple[tuple[str, float, str], ...] = (
    (r"\bgb200\b", 2500, "NVIDIA GB200 data sheet, one GPU: 5000 with sparsity"),
    (r"\bb200\b", 2250, "NVIDIA DGX B200 data sheet, one GPU: 4500 with sparsity"),
    (r"\b(h200|gh200)\b", 989.4, "NVIDIA H200 data sheet: 1979 with sparsity"),
    (r"\bh100.*\bpcie\b", 756, "NVIDIA H100 data sheet: 1513 with sparsity"),
    (r"\bh100.*\bnvl\b", 835, "NVIDIA H100 data sheet: 1671 with sparsity"),
    (r"\b(h100|h800)\b", 989.4, "NVIDIA H100 data sheet: 1979 with sparsity"),
    (r"\bh20\b", 148, "NVIDIA H20 data sheet"),
    (r"\b(a100|a800)\b", 312, "NVIDIA A100 data sheet"),
    (r"\bl40s\b", 362, "NVIDIA L40S data sheet: 733 with sparsity"),
    (r"\b5090\b", 209.5, "NVIDIA RTX Blackwell architecture paper"),
    (r"\b4090\b", 165.2, "NVIDIA Ada architecture paper"),
    (r"\b3090\b", 71, "NVIDIA GA102 architecture paper"),
    (r"910b", 400, "Huawei Ascend 910B, the fastest bin; bins range from 280 to 400"),
)
LARGEST = 1e30


def peak_tflops(backend: Facts) -> float | None:
    """Peak of the backend's accelerator, TFLOP/s; None for a chip that PEAKS lacks."""
    name = str(backend.get("accelerator", "")).lower()
    return next((peak for pattern, peak, _ in PEAKS if re.search(pattern, name)), None)


def implausible(row: Row, backend: Facts) -> Iterator[str]:
    """What no measurement can have given; `backend` holds the facts of the row's device."""
    for name, value in row.metrics.items():
        low, high = _range(name)
        if math.isfinite(value) and abs(value) > LARGEST:
            yield f"metrics.{name}: {value} is beyond any measurement"
        elif math.isfinite(value) and not low <= value <= high:
            yield f"metrics.{name}: {value} is not between {low:g} and {high:g}"
    if case := known_case(row.case):
        yield from case.implausible(row, peak_tflops(backend))


def _range(name: str) -> tuple[float, float]:
    if name.endswith(("_fraction", "_share")):
        return 0.0, 1.0
    if "coherence" in name:
        return -1.0 - 1e-9, 1.0 + 1e-9
    if name.endswith("_sem") or name.startswith("abs_"):
        return 0.0, LARGEST
    return -LARGEST, LARGEST
