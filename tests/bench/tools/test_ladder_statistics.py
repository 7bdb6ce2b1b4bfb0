"""What the ladder's statistics say of rows with known answers."""

from __future__ import annotations

import math

import pytest

from bench.files.load import Found
from bench.files.records import Row
from bench.tools.studies.ladder_statistics import block, coherence_lines, drawn_on, growth_lines
from cases.crash.runs import Group, groups

STEPS = [float(step) for step in range(0, 1000, 100)]


def row(bits: int, seed: int, crash: float = math.inf, kernel: str = "eager-ladder/stock") -> Row:
    exploded = math.isfinite(crash)
    row_max = [10.0 if exploded and step >= 500 else 1.0 for step in STEPS]
    return Row(
        case="crash/ladder",
        case_version=1,
        kernel=kernel,
        backend="cpu",
        dtype="float32",
        seeds=1,
        status="ok",
        params={"layers": 2, "warmup": 50, "seed": seed},
        options={"mantissa_bits": bits},
        verdict=f"exploded@{crash:.0f}" if exploded else "stable@1000",
        metrics={
            "crash_step": crash,
            "steps_run": 1000.0,
            "best_loss": 1.0,
            "leak_rms": 2e-8,
            "leak_coherence_0": 0.1,
            "leak_coherence_1": 0.3,
            "leak_coherence_head_0": -0.5,
        },
        series={
            "step": STEPS,
            "loss": [1.0] * 9 + [5.0 if exploded else 1.0],
            "row_max_abs": row_max,
            "w_q_norm_0": [1.0] * 10,
            "w_q_norm_1": row_max,
        },
    )


def group(*rows: Row) -> Group:
    (only,) = groups([Found(r, None, i) for i, r in enumerate(rows)])
    return only


def test_a_ladder_that_doubles_is_drawn_on_to_the_next_power_of_two() -> None:
    runs = [row(bits, seed, 100.0 * 2**bits) for bits in (1, 2, 3) for seed in (0, 1)]
    lines = growth_lines(group(*runs, row(2, 0, kernel="eager-ladder/delta_dp")))
    assert lines[0].startswith("all: ×2.00 a bit")
    assert lines[0].endswith("drawn on to M = 4: 1600 (1600 to 1600 for one run)")
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "M <= 2",
        "M >= 2",
    ]  # three runs a seed


def test_scatter_widens_what_is_drawn_on() -> None:
    runs = group(*(row(bits, seed, 100.0 * 2**bits * (1 + seed)) for bits in (1, 2, 3) for seed in (0, 1)))
    # Residuals of ±1/2 in log2: scatter √(6/4/4), margin t₄·scatter·√(1 + 1/6 + 4/4).
    margin = 2.776445105 * math.sqrt(1.5 / 4) * math.sqrt(1 + 1 / 6 + 1)
    middle = 1600 * math.sqrt(2)
    low, high = middle / 2**margin, middle * 2**margin
    assert drawn_on(runs.runs) == f"drawn on to M = 4: {middle:.0f} ({low:.0f} to {high:.0f} for one run)"


def test_a_block_tells_who_warned_and_which_layer_went_first() -> None:
    text = block(group(row(1, 0, 900.0), row(1, 0, kernel="eager-ladder/delta_dp")))
    (lost,) = [line.split() for line in text.splitlines() if line.startswith("eager-ladder/stock M=1")]
    # Layer 2 and the row maxima alarm at 500, the loss goes at 900: four ninths of the run.
    assert lost[4:] == ["exploded@900", "10", "44%", "2", "at", "500", "-0.500", "2.0e-08"]


def test_coherence_is_pooled_over_seeds_and_layers() -> None:
    runs = group(*(row(bits, seed, 900.0) for bits in (1, 2) for seed in (0, 1)))
    lines = coherence_lines(runs, layers=2)
    assert [line[1:4] for line in lines] == [
        ["1", "4", "+0.2000"],
        ["2", "4", "+0.2000"],
        ["all", "8", "+0.2000"],
    ]
    # Four values 0.1, 0.3, 0.1, 0.3: standard deviation 0.11547.
    assert float(lines[0][4]) == pytest.approx(0.2 / (0.11547 / 2), abs=0.05)
