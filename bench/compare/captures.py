"""Two captures of one attention call, say of a GPU and an NPU: what differs, and to which side.

A capture is a safetensors file. Tensors: `q`, `do`, `o`, `dq` [B, Hq, T, D], `k`, `v`, `dk`, `dv`
[B, Hkv, S, D], `lse` [B, Hq, T]; any of them may be missing. Metadata (strings): `causal` ("true" or
"false", default false, aligned top-left) and `scale` (default D^-0.5).

Beside what msprobe prints (cosine, largest errors, shares of relative errors below 1 and 5 per mille,
A being the benchmark) stand what it does not know: the signed bias in ulps, the leak, digests. Where
q, k, v are there and the same, both are also held against FP64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bench.errors import UsageError
from bench.measure.inputs import Inputs, digest
from bench.measure.metrics import coherence
from bench.measure.numerics import FORMATS, Format, ulp
from bench.measure.reference import Reference, attention_reference

SUFFIX = ".safetensors"
INPUTS = ("q", "k", "v", "do")
OUTPUTS = ("o", "lse", "dq", "dk", "dv")  # in the order of computation
RANKS = {name: 3 if name == "lse" else 4 for name in (*INPUTS, *OUTPUTS)}
PER_MILLE = 1e-3
SCALE_TOL = 2.0**-22  # relative: two units in the last place of FP32


@dataclass(frozen=True)
class Capture:
    """The tensors of one call, on the host, and how it was called."""

    tensors: dict[str, Tensor]
    causal: bool
    scale: float | None  # None: D^-0.5


def read_capture(path: Path) -> Capture:
    """Read a capture. UsageError names the tensor or metadata that is wrong, and what is allowed."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: not readable as safetensors: {error}") from error
    if unknown := sorted(tensors.keys() - RANKS.keys()):
        raise UsageError(f"{path}: unknown tensor '{unknown[0]}'; allowed: {', '.join(RANKS)}")
    if not tensors.keys() & set(OUTPUTS):
        raise UsageError(f"{path}: none of {', '.join(OUTPUTS)} is there: nothing to compare")
    for name, tensor in tensors.items():
        if tensor.dtype not in FORMATS:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FORMATS)
            raise UsageError(f"{path}: {name} is {tensor.dtype}; allowed: {allowed}")
        if tensor.dim() != RANKS[name] or not tensor.numel():
            shape = list(tensor.shape)
            raise UsageError(f"{path}: {name} is {shape}; expected {RANKS[name]} dimensions, none 0")
    if problem := _shape_problem({name: list(tensor.shape) for name, tensor in tensors.items()}):
        raise UsageError(f"{path}: {problem}")
    return Capture(tensors, _causal(metadata, path), _scale(metadata, path))


def _shape_problem(shapes: dict[str, list[int]]) -> str | None:
    """What keeps these shapes from being those of one attention call; None if nothing does."""
    rows = [name for name in ("o", "q", "do", "dq", "lse") if name in shapes]
    cols = [name for name in ("k", "v", "dk", "dv") if name in shapes]
    for name, first in [(name, group[0]) for group in (rows, cols) for name in group]:
        if shapes[name] != shapes[first][: RANKS[name]]:
            return f"{name} is {shapes[name]}; {first} is {shapes[first]}"
    if rows and cols and len(shapes[rows[0]]) == 4:
        q, k = shapes[rows[0]], shapes[cols[0]]
        if q[0] != k[0] or q[3] != k[3] or q[1] % k[1]:
            fits = "the same batch and head_dim, and heads that divide"
            return f"{cols[0]} is {k}; {rows[0]} is {q}: expected {fits}"
    return None


def _causal(metadata: dict[str, str], path: Path) -> bool:
    text = metadata.get("causal", "false")
    if text not in ("true", "false"):
        raise UsageError(f"{path}: metadata causal: '{text}'; allowed: true, false")
    return text == "true"


def _scale(metadata: dict[str, str], path: Path) -> float | None:
    if "scale" not in metadata:
        return None
    try:
        scale = float(metadata["scale"])
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        raise UsageError(f"{path}: metadata scale: '{metadata['scale']}'; allowed: a number > 0")
    return scale


# ------------------------------------------------------------------------------------- metrics


def pair_metrics(a: Tensor, b: Tensor) -> dict[str, float | bool]:
    """How B differs from A (same shape). Elements that are not finite in A or in B are left out, and
    counted: `nonfinite` of them, `nonfinite_a` and `nonfinite_b` of each side.

    `bias` is Σ (B − A)·sign(A) over Σ |A|, `bias_ulp` the mean of the former in ulps of A's format (which
    elements near 0 dominate, where there are any): + means that B lies further from 0.
    """
    fmt = FORMATS[a.dtype]
    x, y = a.double().flatten(), b.double().flatten()
    finite = x.isfinite() & y.isfinite()
    found: dict[str, float | bool] = {
        "equal": digest(a) == digest(b),
        "nonfinite": int((~finite).sum()),
        "nonfinite_a": int((~x.isfinite()).sum()),
        "nonfinite_b": int((~y.isfinite()).sum()),
    }
    x, y = x[finite], y[finite]
    difference = (y - x).abs()
    relative = torch.where(difference == 0, 0.0, difference / x.abs())  # A = 0 ≠ B: infinite
    if x.numel() == 0:
        return found
    return found | {
        "cosine": _cosine(x, y),
        "max_abs": float(difference.max()),
        "max_rel": float(relative.max()),
        "below_1_per_mille": float((relative < PER_MILLE).double().mean()),
        "below_5_per_mille": float((relative < 5 * PER_MILLE).double().mean()),
        **_bias(y - x, x, fmt),
    }


def _bias(error: Tensor, exact: Tensor, fmt: Format) -> dict[str, float]:
    """Signed error, + away from 0: over the mean magnitude, and in ulps."""
    aligned = error * exact.sign()
    size = float(exact.abs().sum())
    return {
        "bias": float(aligned.sum()) / size if size else math.nan,
        "bias_ulp": float((aligned / ulp(exact, fmt)).mean()),
    }


def _cosine(x: Tensor, y: Tensor) -> float:
    """NaN where one of them is all zeros."""
    lengths = float(x.norm() * y.norm())
    return min(1.0, float(x @ y) / lengths) if lengths else math.nan


def against_fp64(capture: Capture) -> dict[str, dict[str, float]]:
    """Each output against FP64 attention on the capture's own inputs: signed error (see `pair_metrics`)
    and largest error over the largest value; and the leak, the mean of δ − rowsum(dO∘O) over the mean
    |δ|, which is rowsum(dS) of a stock backward pass and 0 in exact arithmetic."""
    pairs: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    leaks, deltas = [], []
    for part, ref in _references(capture):
        for name in OUTPUTS:
            if name in part and (name in ("o", "lse") or "do" in part):
                got, exact = pairs.setdefault(name, ([], []))
                got.append(part[name].double().flatten())
                exact.append(getattr(ref, name).flatten())
        if "do" in part and "o" in part:
            leaks.append(ref.delta - (ref.do * part["o"].double()).sum(-1))
            deltas.append(ref.delta)
    found = {}
    for name, lists in pairs.items():
        x, y = (torch.cat(parts) for parts in lists)
        found[name] = {
            **_bias(x - y, y, FORMATS[capture.tensors[name].dtype]),
            "max_error": float((x - y).abs().max() / y.abs().max()),
        }
    if leaks:
        leak, size = torch.cat(leaks, 1), torch.cat(deltas, 1).abs().mean()
        found["leak"] = {
            "leak_over_delta": float(leak.mean() / size),
            "leak_coherence": coherence(leak, 1),
        }
    return found


def _references(capture: Capture) -> Iterator[tuple[dict[str, Tensor], Reference]]:
    """One sequence and key head at a time: FP64 scores of a whole capture would not fit."""
    x = capture.tensors
    do = x.get("do", torch.zeros_like(x["q"]))
    kv_heads = x["k"].shape[1]
    groups = x["q"].shape[1] // kv_heads
    for batch in range(x["q"].shape[0]):
        for head in range(kv_heads):
            rows = {name: slice(head * groups, (head + 1) * groups) for name in x}
            rows |= {name: slice(head, head + 1) for name in ("k", "v", "dk", "dv")}
            part = {name: tensor[batch : batch + 1, rows[name]] for name, tensor in x.items()}
            do_part = do[batch : batch + 1, rows["q"]]
            inputs = Inputs(part["q"], part["k"], part["v"], do_part, capture.causal, capture.scale)
            yield part, attention_reference(inputs)


# ---------------------------------------------------------------------------------- comparison


@dataclass
class CaptureComparison:
    """What differs between captures A and B."""

    notes: list[str] = field(default_factory=list)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)  # pair_metrics, by tensor
    fp64: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # "a", "b": against_fp64
    digests: dict[str, dict[str, str]] = field(default_factory=dict)  # by tensor: "a", "b"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_captures(a: Capture, b: Capture) -> CaptureComparison:
    """Compare two captures; UsageError where they are not of one call."""
    scales = _scales(a, b)
    if a.causal != b.causal or not _close(*scales):
        raise UsageError(
            f"causal and scale are {a.causal}, {scales[0]} in A but {b.causal}, {scales[1]} in B: "
            "not the same call"
        )
    common = [name for name in RANKS if name in a.tensors and name in b.tensors]
    if not set(common) & set(OUTPUTS):
        raise UsageError(f"A and B share none of {', '.join(OUTPUTS)}: nothing to compare")
    for name in common:
        if (shape := a.tensors[name].shape) != (other := b.tensors[name].shape):
            raise UsageError(f"{name}: {list(shape)} in A, {list(other)} in B: not the same call")
    result = CaptureComparison()
    for name in common:
        x, y = a.tensors[name], b.tensors[name]
        result.digests[name] = {"a": digest(x), "b": digest(y)}
        result.tensors[name] = pair_metrics(x, y)
    result.notes = _notes(a, b, result)
    if all(name in common for name in ("q", "k", "v")) and not _different(result):
        # Inputs that only one of them holds serve both: they are the same call's.
        inputs = {name: x[name] for x in (a.tensors, b.tensors) for name in INPUTS if name in x}
        for side, capture in (("a", a), ("b", b)):
            tensors = capture.tensors | inputs
            result.fp64[side] = against_fp64(Capture(tensors, capture.causal, capture.scale))
    return result


def _scales(a: Capture, b: Capture) -> tuple[float | str, float | str]:
    """Scale of each, the default as a number where some tensor says what D is."""
    tensors = (*a.tensors.values(), *b.tensors.values())
    head_dim = next((tensor.shape[-1] for tensor in tensors if tensor.dim() == 4), None)
    default = "D^-0.5" if head_dim is None else head_dim**-0.5
    return (
        default if a.scale is None else a.scale,
        default if b.scale is None else b.scale,
    )


def _close(a: float | str, b: float | str) -> bool:
    """The same scale to a kernel, which takes it in FP32."""
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return math.isclose(a, b, rel_tol=SCALE_TOL)


def _different(result: CaptureComparison) -> list[str]:
    """Inputs whose bits differ."""
    return [n for n in INPUTS if n in result.tensors and not result.tensors[n]["equal"]]


def _notes(a: Capture, b: Capture, result: CaptureComparison) -> list[str]:
    notes = []
    if different := _different(result):
        notes.append(f"inputs differ: {', '.join(different)}: outputs differ whatever the kernels do")
    elif missing := [name for name in ("q", "k", "v") if name not in result.tensors]:
        notes.append(f"not in both: {', '.join(missing)}: nothing is held against FP64")
    if only := sorted(a.tensors.keys() ^ b.tensors.keys()):
        notes.append(f"in one of them alone: {', '.join(only)}")
    for name, metrics in result.tensors.items():
        if metrics["nonfinite"]:
            notes.append(
                f"{name}: elements not finite: {metrics['nonfinite_a']} in A, "
                f"{metrics['nonfinite_b']} in B; {metrics['nonfinite']} left out"
            )
        if a.tensors[name].dtype != b.tensors[name].dtype:
            notes.append(f"{name}: {a.tensors[name].dtype} in A, {b.tensors[name].dtype} in B")
    return notes
