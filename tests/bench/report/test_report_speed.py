"""Speed tables: ratios within one file and one parameter point, costs over the kernel without a fix."""

from __future__ import annotations

from bench.files.load import Found
from bench.files.records import Row
from bench.report.tables import Table
from bench.report.timings import speed_tables


def row(kernel: str, forward: float, backward: float, mib: float | None = 100, **fields: object) -> Row:
    metrics = {
        "forward_ms": forward,
        "backward_ms": backward,
        "both_ms": forward + backward,
        "forward_tflops": 100 / forward,
        "backward_tflops": 250 / backward,
    }
    if mib is not None:
        metrics["both_peak_memory_mib"] = mib
    base: dict[str, object] = {
        "case": "speed/attention",
        "case_version": 1,
        "kernel": kernel,
        "backend": "cuda",
        "dtype": "bfloat16",
        "options": {},
        "seeds": 1,
        "status": "ok",
        "verdict": "measured",
        "params": {"tokens": 4096},
        "metrics": metrics,
    }
    return Row(**(base | fields))  # type: ignore[arg-type]


def tables(*rows: Row) -> list[Table]:
    return speed_tables([Found(r, None, i) for i, r in enumerate(rows)], "chip")


def cells(table: Table, kernel: str) -> dict[str, str]:
    line = dict(table.rows)[kernel]
    return {c: cell.text for c, cell in zip(table.columns, line, strict=True) if cell}


def test_ratios_to_the_peers_and_costs_over_stock() -> None:
    (table,) = tables(
        row("triton/stock", 1.0, 2.0, 100),
        row("triton/delta_fp32", 1.1, 2.2, 164),
        row("sdpa-flash/stock", 1.5, 5.0, 300),
        row("sdpa-cudnn/stock", 0.5, 2.0, 200),
    )
    stock, fixed = cells(table, "triton/stock"), cells(table, "triton/delta_fp32")
    assert stock["× sdpa-flash"] == "1.50 / 2.50"
    assert stock["× sdpa-cudnn"] == "0.50 / 1.00"
    assert stock["both"] == "3.000"
    assert stock["TFLOP/s"] == "100 / 125"
    assert "over stock" not in stock
    assert fixed["over stock"] == "+10.0%"
    assert fixed["over stock, MiB"] == "+64"
    assert "over stock" not in cells(table, "sdpa-flash/stock")


def test_a_deterministic_time_is_that_of_deterministic_algorithms() -> None:
    """Until `warn_only` was turned off PyTorch timed its backward pass that adds by atomics."""
    asked = {"tokens": 4096, "deterministic": True}
    before = row("sdpa-flash/stock", 1.0, 3.0, params=asked)
    now = row("sdpa-flash/stock", 1.0, 4.0, params=asked, launch={"warn_only": False})
    ours = row("triton/stock", 1.0, 2.0, params=asked)
    (old,) = tables(before, ours)
    assert cells(old, "sdpa-flash/stock") == {"forward": "not deterministic, left out"}
    assert "× sdpa-flash" not in cells(old, "triton/stock")
    (new,) = tables(now, ours)
    assert cells(new, "triton/stock")["× sdpa-flash"] == "1.00 / 2.00"


def test_points_are_never_mixed() -> None:
    long, short = {"tokens": 4096}, {"tokens": 128}
    first, second = tables(
        row("triton/stock", 1.0, 2.0, params=long),
        row("sdpa-flash/stock", 2.0, 2.0, params=long),
        row("triton/stock", 0.1, 0.1, params=short),
    )
    assert first.title == "speed/attention · chip · tokens=4096"
    assert cells(first, "triton/stock")["× sdpa-flash"] == "2.00 / 1.00"
    assert second.columns == [
        "forward",
        "backward",
        "both",
        "TFLOP/s",
        "over stock",
        "MiB",
        "over stock, MiB",
    ]


def test_options_of_a_kernel_are_compared_with_stock_under_the_same_options() -> None:
    (table,) = tables(
        row("triton/stock", 1.0, 1.0, options={"autotune": False}),
        row("triton/stock", 0.5, 0.5, options={"autotune": True}),
        row("triton/stabilized", 1.2, 1.0, options={"autotune": False}),
        row("triton/stabilized", 0.6, 0.6, options={"autotune": True}),
    )
    assert cells(table, "triton/stabilized autotune=False")["over stock"] == "+10.0%"
    assert cells(table, "triton/stabilized autotune=True")["over stock"] == "+20.0%"


def test_what_was_not_measured_says_so_and_memory_may_be_unknown() -> None:
    (table,) = tables(
        row("flash-attn-2/stock", 1, 1, status="unsupported", reason="no", verdict="", metrics={}),
        row("triton/stock", 1.0, 1.0, None),
        row("triton/delta_dp", 1.0, 2.0, None),
    )
    assert cells(table, "flash-attn-2/stock") == {"forward": "unsupported"}
    assert cells(table, "triton/delta_dp")["over stock"] == "+50.0%"
    assert "MiB" not in cells(table, "triton/delta_dp")
