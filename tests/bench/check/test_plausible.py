"""No measurement leaves its range, and no kernel is faster than its chip."""

from __future__ import annotations

import pytest

from bench.check.plausible import implausible, peak_tflops
from bench.files.records import Row
from cases.speed.attention import Params, operations

H200 = {"accelerator": "NVIDIA H200"}
PARAMS = Params().model_dump()


def speed(tflops: float = 500.0, **changed: float) -> Row:
    """A consistent speed row at `tflops`."""
    metrics = {}
    for name in ("forward", "backward", "both"):
        ms = operations(Params(), 1, name) / (tflops * 1e12) * 1e3
        metrics |= {
            f"{name}_ms": ms,
            f"{name}_p10_ms": ms * 0.9,
            f"{name}_p90_ms": ms * 1.1,
            f"{name}_tflops": operations(Params(), 1, name) / (ms * 1e-3) / 1e12,
        }
    return Row(
        case="speed/attention",
        case_version=1,
        kernel="triton/stock",
        backend="cuda",
        dtype="bfloat16",
        params=PARAMS,
        options={},
        seeds=1,
        status="ok",
        verdict="measured",
        metrics=metrics | changed,
    )


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA H20", 148),
        ("Ascend 910B2", 400),
        ("Some chip", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_a_chip_is_found_by_its_name(name: str, peak: float | None) -> None:
    assert peak_tflops({"accelerator": name}) == peak


def test_a_plausible_speed_passes_and_one_above_the_peak_does_not() -> None:
    assert list(implausible(speed(900), H200)) == []
    assert list(implausible(speed(5000), {"accelerator": "Some chip"})) == []
    problems = list(implausible(speed(1200), H200))
    assert len(problems) == 3
    assert "1200 TFLOP/s, above the chip's peak of 989.4" in problems[0]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"forward_ms": 1e-9}, "are no quantiles of a time"),
        ({"forward_tflops": 1.0}, "forward_tflops: 1.0, but its time gives 500"),
        ({"forward_ms": float("nan")}, "are no quantiles"),
        ({"backward_p90_ms": float("inf")}, "are no quantiles"),
        ({"wrong_fraction": 1.5}, "wrong_fraction: 1.5 is not between 0 and 1"),
        ({"leak_coherence": -2.0}, "not between -1 and 1"),
        ({"aligned_ulp_sem": -1.0}, "not between 0 and"),
        ({"x": 1e300}, "beyond any measurement"),
    ],
)
def test_what_no_measurement_gives_is_named(changed: dict[str, float], expected: str) -> None:
    assert any(expected in problem for problem in implausible(speed(**changed), H200))


def test_a_missing_time_is_named() -> None:
    row = speed()
    del row.metrics["both_p10_ms"]
    assert list(implausible(row, H200)) == ["metrics: 'both_p10_ms' is missing"]
