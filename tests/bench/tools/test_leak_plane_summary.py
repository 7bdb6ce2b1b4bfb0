"""The summary of `leak_plane` on made-up windows with known answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.tools.studies.leak_plane_summary import interval, main, spearman, summarize, tables

RATE = 0.004  # a step


def growing(seed: int = 0, verdict: str = "stable@1000", leak: float = -1e-6) -> dict[str, Any]:
    """|q̄| and |k̄| grow as exp(rate·step) by the leak alone; both rates have the sign of −leak."""
    sign = -math.copysign(1, leak)
    windows = []
    for last in range(49, 1000, 50):
        middle = last + 1 - 25
        size = math.exp(RATE * middle)
        point = {
            "leak": leak * (1 + middle / 1000),
            "leak_abs": 1e-5,
            "rate_q": sign * (RATE + middle * 1e-7),
            "rate_k": sign * RATE,
            "common": sign * size**2,
            "common_leak": sign * 2 * RATE * size**2,
            "common_rest": 0.0,
            "cosine": sign,
            "query": size,
            "key": size,
        }
        windows.append({"step": last, "steps": 50, "layers": [point]})
    return {"kernel": "eager-ladder/stock", "seed": seed, "verdict": verdict, "windows": windows}


def test_growth_by_the_leak_alone_is_found_to_be_just_that() -> None:
    found = summarize(growing(), 0)
    assert found.layer == 1
    assert found.agree == 1
    assert found.rank == pytest.approx(1)
    assert found.eigenvalue == pytest.approx(RATE, rel=0.01)
    assert found.growth == pytest.approx(RATE, rel=1e-3)
    assert found.by_rest == 0
    assert found.by_leak == pytest.approx(found.change, rel=0.05)


def test_the_other_sign_lowers_the_common_score() -> None:
    found = summarize(growing(leak=1e-6), 0)
    assert found.agree == 1
    assert found.eigenvalue == pytest.approx(-RATE, rel=0.01)
    assert found.change < 0


def test_rates_of_unlike_sign_have_no_growing_mode() -> None:
    run = growing()
    for window in run["windows"]:
        window["layers"][0]["rate_k"] *= -1
    found = summarize(run, 0)
    assert found.eigenvalue == 0
    assert found.agree == 0


def test_windows_around_an_explosion_do_not_count() -> None:
    until = summarize(growing(verdict="exploded@800"), 0)
    assert abs(until.change) < abs(summarize(growing(), 0).change)


@pytest.mark.parametrize(("windows", "count"), [(0, 0), (8, 0), (12, 3)])
def test_a_run_with_too_few_windows_is_one_line(
    windows: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = growing(seed=3)
    run["windows"] = run["windows"][:windows]
    file = tmp_path / "plane.json"
    file.write_text(json.dumps({"runs": [run]}))
    monkeypatch.setattr("sys.argv", ["leak_plane_summary", str(file)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"{file}: eager-ladder/stock seed 3, stable@1000: {count} windows after")
    assert line.count("\n") == 1


def test_the_fewest_windows_are_enough() -> None:
    run = growing()
    run["windows"] = run["windows"][:13]  # four of them after step 400
    assert abs(summarize(run, 0).follows) <= 1


@pytest.mark.parametrize(
    ("a", "b", "rho"),
    [([1, 2, 3], [10, 20, 90], 1), ([1, 2, 3], [3, 2, 1], -1), ([1, 2, 3, 4], [2, 1, 4, 3], 0.6)],
)
def test_spearman(a: list[float], b: list[float], rho: float) -> None:
    assert spearman(a, b) == pytest.approx(rho)


def test_interval_is_student_s() -> None:
    assert interval([1.0, 2.0, 3.0]) == "+2 (-0.48 to +4.5)"  # 2 ± 4.303 / √3


def test_tables_have_a_line_a_run_and_layer_and_one_a_kernel() -> None:
    text = tables({"runs": [growing(0), growing(1)]})
    assert text.count("stable@1000") == 2
    assert text.splitlines()[-1].startswith("| stock")
