"""Tables of the speed cases: times of one run beside each other, and what a fix costs.

Times are compared within one file and one parameter point alone: never between machines or runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.files.labels import kernel_label, point_label, varying
from bench.files.load import Found
from bench.files.records import Row
from bench.report.tables import Cell, Table

PEERS = ("sdpa-flash/stock", "sdpa-cudnn/stock")  # every time is also given as a ratio to theirs
PASSES = ("forward", "backward", "both")
ATOMIC = ("sdpa-flash/stock", "sdpa-efficient/stock")  # where `warn_only` is on


def speed_tables(found: Sequence[Found], machine: str) -> list[Table]:
    """One table for each parameter point of one file's speed rows."""
    rows = [f.row for f in found]
    names = varying(rows)
    points: dict[str, list[Found]] = {}
    for f in found:
        points.setdefault(point_label(f.row, names), []).append(f)
    case = rows[0].case
    return [
        _table(f"{case} · {machine} · {label}".removesuffix(" · "), of_point)
        for label, of_point in points.items()
    ]


def _table(title: str, found: list[Found]) -> Table:
    everything = [f.row for f in found]
    timed = [row for row in everything if row.status == "ok" and as_asked(row)]
    rows = {kernel_label(row, everything): row for row in timed}
    peers = {rows[name].implementation: rows[name] for name in PEERS if name in rows}
    table = Table(
        title,
        "Median device time of one call, ms; ratios of speed are forward / backward, in the same run. "
        "Over stock: time and memory of forward and backward over the same implementation without a fix.",
        [*PASSES, "TFLOP/s", *(f"× {peer}" for peer in peers), "over stock", "MiB", "over stock, MiB"],
    )
    for f in found:
        label = kernel_label(f.row, everything)
        if not any(f.row is row for row in timed):
            status = f.row.status if f.row.status != "ok" else "not deterministic, left out"
            first = Cell(status, f.row.verdict, f)
            table.rows.append((label, [first, *[None] * (len(table.columns) - 1)]))
            continue
        texts = [_milliseconds(f.row, name) for name in PASSES]
        texts += [" / ".join(f"{f.row.metrics[f'{name}_tflops']:.0f}" for name in PASSES[:2])]
        texts += [_faster(f.row, peer) for peer in peers.values()]
        stock = label.replace(f.row.kernel, f"{f.row.implementation}/stock", 1)
        texts += _over_stock(f.row, rows.get(stock))
        table.rows.append((label, [Cell(text, f.row.verdict, f) if text else None for text in texts]))
    return table


def as_asked(row: Row) -> bool:
    """False for a time of PyTorch's backward pass that adds by atomics, where a deterministic one was asked
    for: the suite left `warn_only` on until it recorded that it is off (docs/findings.md)."""
    asked = row.params.get("deterministic") is True and row.kernel in ATOMIC
    return not asked or row.launch.get("warn_only") is False


def _milliseconds(row: Row, name: str) -> str:
    return f"{row.metrics[f'{name}_ms']:.3f}"


def _faster(row: Row, peer: Row) -> str:
    """How many times faster than `peer`, forward / backward."""
    ratios = [peer.metrics[f"{name}_ms"] / row.metrics[f"{name}_ms"] for name in PASSES[:2]]
    return " / ".join(f"{ratio:.2f}" for ratio in ratios)


def _over_stock(row: Row, stock: Row | None) -> list[str]:
    """Time over stock's, memory, memory over stock's; empty where there is nothing to say."""
    memory = row.metrics.get("both_peak_memory_mib")
    own = "" if memory is None else f"{memory:.0f}"
    if stock is None or stock is row:
        return ["", own, ""]
    time = row.metrics["both_ms"] / stock.metrics["both_ms"] - 1
    before = stock.metrics.get("both_peak_memory_mib")
    extra = "" if memory is None or before is None else f"{memory - before:+.0f}"
    return [f"{time:+.1%}", own, extra]
