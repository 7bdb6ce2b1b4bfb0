"""The comparison of two captures, for a terminal."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from bench.compare.captures import OUTPUTS, CaptureComparison

PAIR = {
    "cosine": ("cosine", "{:.9f}"),
    "max_abs": ("max abs", "{:.3e}"),
    "max_rel": ("max rel", "{:.3e}"),
    "below_1_per_mille": ("< 1‰", "{:.2%}"),
    "below_5_per_mille": ("< 5‰", "{:.2%}"),
    "bias": ("bias", "{:+.2e}"),
}
FP64 = {
    "bias": ("bias", "{:+.2e}"),
    "max_error": ("largest error", "{:.2e}"),
}
LEAK = {"leak_over_delta": ("leak over |δ|", "{:+.2e}"), "leak_coherence": ("coherence", "{:.3f}")}


def captures_text(result: CaptureComparison, a: str, b: str) -> str:
    """Notes, B against A, both against FP64, digests."""
    parts = [f"A = {a}\nB = {b}"]
    if result.notes:
        parts.append("\n".join(f"note: {note}" for note in result.notes))
    pairs = [
        [name, "equal" if metrics["equal"] else "differ", *_row(metrics, PAIR)]
        for name, metrics in result.tensors.items()
    ]
    title = "B against A (errors relative to A; bias = Σ (B − A)·sign(A) / Σ |A|, + = B further from 0)"
    parts.append(_table(title, ["tensor", "bits", *_labels(PAIR)], pairs))
    if result.fp64:
        title = "A and B against FP64 attention on these inputs (errors relative to it, + = further from 0)"
        parts.append(_table(title, ["", "A", "B"], _fp64_rows(result)))
    digests = [[name, pair["a"][:16], pair["b"][:16]] for name, pair in result.digests.items()]
    parts.append(_table("Digests (sha256, first 16 digits)", ["tensor", "A", "B"], digests))
    return "\n\n".join(parts)


def _fp64_rows(result: CaptureComparison) -> list[list[str]]:
    rows = []
    for name in OUTPUTS:
        forms = {**FP64, "bias_ulp": ("bias, ulp", "{:+.3f}")} if name == "o" else FP64
        rows += _both_sides(result, name, forms)
    return rows + _both_sides(result, "leak", LEAK)


def _both_sides(result: CaptureComparison, name: str, forms: dict[str, tuple[str, str]]) -> list[list[str]]:
    sides = [result.fp64[side].get(name, {}) for side in ("a", "b")]
    if not any(sides):
        return []
    columns = zip(_labels(forms), *(_row(side, forms) for side in sides), strict=True)
    return [[f"{name}: {label}", *values] for label, *values in columns]


def _labels(forms: dict[str, tuple[str, str]]) -> list[str]:
    return [label for label, _ in forms.values()]


def _row(metrics: dict[str, Any], forms: dict[str, tuple[str, str]]) -> list[str]:
    return [form.format(metrics[key]) if key in metrics else "–" for key, (_, form) in forms.items()]


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    return f"{title}\n" + tabulate(rows, head, disable_numparse=True)
