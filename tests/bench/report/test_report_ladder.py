"""The ladder's tables on rows with known answers: medians, censoring, growth a bit, alarms, figures."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from bench.files.load import Found, all_rows, load_all
from bench.files.records import Row
from bench.report.answers import answer_table
from bench.report.cases import overview_tables, run_tables
from bench.report.early_warning import (
    alarm_step,
    healthy,
    lost_step,
    signal_name,
    threshold,
    warning_steps,
    warning_table,
)
from bench.report.explosions import growth, ladder_table, student_t
from bench.report.html.data import gather
from bench.report.render import markdown_table
from cases.crash.runs import Group, groups, median_step
from conftest import committed_results

ROOT = Path(__file__).resolve().parents[3]
SIZE = {"layers": 2, "width": 32, "batch": 4, "warmup": 20}


def row(
    kernel: str = "eager-ladder/stock",
    bits: int | None = 1,
    seed: int = 0,
    crash: float = math.inf,
    steps: int = 1500,
    series: dict[str, list[float]] | None = None,
    **fields: object,
) -> Row:
    exploded = math.isfinite(crash)
    base: dict[str, object] = {
        "case": "crash/ladder",
        "case_version": 1,
        "kernel": kernel,
        "backend": "cpu",
        "dtype": "float32",
        "seeds": 1,
        "status": "ok",
        "params": {**SIZE, "seed": seed, "steps": steps},
        "options": {} if bits is None else {"mantissa_bits": bits},
        "verdict": f"exploded@{crash:.0f}" if exploded else f"stable@{steps}",
        "metrics": {
            "crash_step": crash,
            "steps_run": crash + 20 if exploded else steps,
            "best_loss": 1.0,
            "spikes": 0.0,
        },
        "series": series or {},
    }
    return Row(**(base | fields))  # type: ignore[arg-type]


def group(*rows: Row) -> Group:
    (only,) = groups([Found(r, None, i) for i, r in enumerate(rows)])
    return only


def cells(*rows: Row) -> dict[str, list[str | None]]:
    table = ladder_table(group(*rows))
    return {label: [c.text if c else None for c in line] for label, line in table.rows}


def test_stock_comes_first_and_the_ladders_kernel_before_others() -> None:
    kernels = ["triton/delta_dp", "triton/stock", "eager-ladder/o_fp32", "eager-ladder/delta_dp"]
    assert list(cells(*(row(kernel) for kernel in [*kernels, "eager-ladder/stock"]))) == [
        "eager-ladder/stock",
        "triton/stock",
        "eager-ladder/o_fp32",
        "eager-ladder/delta_dp",
        "triton/delta_dp",
    ]


def test_cells_give_median_range_and_number_of_runs() -> None:
    shown = cells(*(row(seed=s, crash=c) for s, c in enumerate((700, 900, 650))), row(bits=2, crash=1400))
    assert shown == {"eager-ladder/stock": ["700 (650 to 900; 3 runs)", "1400"]}


def test_censored_runs_are_named_and_never_averaged() -> None:
    two = [row(seed=0, crash=600), row(seed=1, crash=900), row(seed=2)]
    assert cells(*two)["eager-ladder/stock"] == ["900 (600 to >1500; 3 runs, 1 censored)"]
    one = [row(seed=0, crash=600), row(seed=1), row(seed=2)]
    assert cells(*one)["eager-ladder/stock"] == ["no median (600 to >1500; 3 runs, 2 censored)"]
    late = [row(seed=0, crash=1570), row(seed=1, crash=3802), row(seed=2)]
    assert cells(*late)["eager-ladder/stock"] == ["no median (1570 to >3802; 3 runs, 1 censored)"]
    assert cells(row(), row(seed=1, steps=800))["eager-ladder/stock"] == ["none by 800 (2 runs)"]
    spike = row(seed=1, verdict="spike")
    assert "1 with a spike" in str(cells(row(crash=600), spike)["eager-ladder/stock"][0])


def test_a_run_censored_before_the_middle_leaves_no_median() -> None:
    runs = group(row(crash=600), row(seed=1, crash=900), row(seed=2, steps=700)).runs
    assert median_step(runs) is None
    assert median_step([]) is None


def test_other_sizes_are_another_group_and_the_same_run_counts_once() -> None:
    small, large = (
        row(crash=600),
        row(crash=900, params={**SIZE, "width": 64, "seed": 0, "steps": 1}),
    )
    found = [Found(r, None, i) for i, r in enumerate((small, large, small))]
    assert [len(g.runs) for g in groups(found)] == [1, 1]


def test_of_two_runs_with_the_same_seed_the_one_that_says_more_is_kept() -> None:
    only = group(row(steps=500), row(steps=4000, crash=3802), row(steps=3000))
    assert [run.step for run in only.runs] == [3802]


def test_a_kernel_without_the_option_stands_at_the_mantissa_of_its_dtype() -> None:
    only = group(row(bits=2, crash=600), row("triton/stock", None, dtype="float32"))
    assert only.bits() == [2, 23]
    assert group(row("triton/stock", None, dtype="bfloat16")).bits() == [7]


def test_options_but_for_m_name_a_line() -> None:
    beta = [row("eager-ladder/stabilized", options={"mantissa_bits": 1, "beta": b}) for b in (2.0, 7.0)]
    assert group(*beta).labels() == [
        "eager-ladder/stabilized beta=2",
        "eager-ladder/stabilized beta=7",
    ]


def test_exact_doubling_is_found_with_no_width() -> None:
    runs = group(*(row(bits=m, seed=s, crash=100 * 2**m) for m in (1, 2, 3) for s in (0, 1))).runs
    found = growth(runs)
    assert found is not None
    assert (found.slope, found.low, found.high) == pytest.approx((1, 1, 1))
    assert str(found) == "×2.00 a bit (95%: 2.00 to 2.00; 6 runs, M = 1, 2, 3)"


def test_the_interval_is_that_of_least_squares_by_hand() -> None:
    # y = log2 step: 8, 10 at M = 1 and 10, 10 at M = 2. Slope 1, rest −1, 1, 0, 0, variance 2/2, Σ(M−mean)² = 1.
    runs = group(
        *(row(bits=m, seed=s, crash=2**y) for s, (m, y) in enumerate(((1, 8), (1, 10), (2, 10), (2, 10))))
    ).runs
    found = growth(runs)
    assert found is not None
    assert found.slope == pytest.approx(1)
    assert found.high - found.slope == pytest.approx(4.30265, abs=1e-4)


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.7062), (2, 4.30265), (7, 2.36462), (30, 2.04227)])
def test_student_t_is_the_table_s(freedom: int, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, abs=1e-4)


def test_nothing_is_fitted_to_too_little_or_to_censored_bits() -> None:
    assert growth(group(*(row(seed=s, crash=500 + s) for s in range(5))).runs) is None  # one M
    assert growth(group(*(row(bits=m, crash=500) for m in (1, 2, 3))).runs) is None  # three runs
    fine = [row(bits=m, seed=s, crash=100 * 2**m) for m in (1, 2) for s in (0, 1)]
    with_censored = [*fine, row(bits=3, crash=400), row(bits=3, seed=1)]
    found = growth(group(*with_censored).runs)
    assert found is not None
    assert found.bits == (1, 2)
    assert "left out for censored runs: M = 3" in ladder_table(group(*with_censored)).note


def curves(alarm_at: float, crash: float, log: int = 10) -> dict[str, list[float]]:
    """A signal that is 1, then 2 from `alarm_at` on; a loss of 1, then 2 from `crash` on."""
    steps = [float(s) for s in range(0, int(crash) + 21, log)]
    return {
        "step": steps,
        "loss": [5.0 if s == 0 else 2.0 if s >= crash else 1.0 for s in steps],
        "row_max_abs": [2.0 if s >= alarm_at else 1.0 for s in steps],
    }


def stable(kernel: str = "eager-ladder/delta_dp", level: float = 1.0, seed: int = 0) -> Row:
    steps = [float(s) for s in range(0, 300, 10)]
    return row(
        kernel,
        seed=seed,
        series={
            "step": steps,
            "loss": [1.0] * 30,
            "row_max_abs": [50.0, *[level] * 29],
            "key_mean_ratio": [0.9] * 30,
        },
    )


def test_the_loss_is_lost_where_it_leaves_for_good() -> None:
    spiky = curves(100, 200)
    spiky["loss"][12] = 3.0  # step 120, and back again
    assert lost_step(row(crash=200, series=spiky)) == 200
    assert lost_step(row(crash=195, series=spiky)) == 195  # the explosion came before the next log
    gone = {**spiky, "loss": [1.0] * len(spiky["step"])}
    assert lost_step(row(crash=215, series=gone)) == 215  # ended by the gradient norm or a NaN


def test_warning_is_the_distance_from_alarm_to_loss() -> None:
    runs = group(stable(level=1.2)).runs
    limit = threshold("row_max_abs", runs)
    assert limit == pytest.approx(1.5)  # 1.25 × 1.2: the 50 of the warm-up does not count
    assert warning_steps(row(crash=200, series=curves(130, 200)), "row_max_abs", 1.5) == 70
    assert warning_steps(row(crash=200, series=curves(220, 200)), "row_max_abs", 1.5) == -20
    assert warning_steps(row(crash=200, series=curves(130, 200)), "row_max_abs", 2.0) is None


def test_signs_do_not_count_and_a_nan_is_an_alarm() -> None:
    series = curves(130, 200)
    series["row_max_abs"] = [-x for x in series["row_max_abs"]]
    assert alarm_step(row(crash=200, series=series), "row_max_abs", 1.5) == 130
    series["row_max_abs"][5] = math.nan
    assert alarm_step(row(crash=200, series=series), "row_max_abs", 1.5) == 50


def test_a_stable_run_whose_scores_ran_away_is_sick_and_sets_no_threshold() -> None:
    ill = stable("eager-ladder/delta_fp32", level=10.5)
    fine, sick = healthy(group(row(crash=200, series=curves(130, 200)), stable(), ill).runs)
    assert [r.label for r in fine] == ["eager-ladder/delta_dp"]
    assert [r.label for r in sick] == ["eager-ladder/delta_fp32"]


def test_row_maxima_that_are_not_a_number_are_sick_and_leave_the_limit_to_others() -> None:
    broken = stable("eager-ladder/o_fp32", level=math.nan)
    ill = stable("eager-ladder/delta_fp32", level=400)
    for runs in ((broken, ill, stable()), (stable(), ill, broken)):
        fine, sick = healthy(group(*runs).runs)
        assert [r.label for r in fine] == ["eager-ladder/delta_dp"]
        assert {r.label for r in sick} == {"eager-ladder/o_fp32", "eager-ladder/delta_fp32"}


def test_the_warning_table_says_what_it_compares() -> None:
    runs = [row(seed=s, crash=200, series=curves(a, 200)) for s, a in enumerate((130, 150, 999))]
    ill = stable("eager-ladder/delta_fp32", level=99)
    table = warning_table(group(*runs, stable(), ill))
    assert table is not None
    (label, line), (second, _) = table.rows[0], table.rows[0]
    assert label == second == "max |row-max score| (alarm above 1.25)"
    assert line[0] is not None
    assert line[0].text == "60 (50 to 70), no alarm in 1 of 3"
    assert "eager-ladder/delta_dp (1)" in table.note
    assert "left out: eager-ladder/delta_fp32 M=1 seed 0" in table.note
    silent = warning_table(group(row(crash=200, series=curves(999, 200)), stable()))
    assert silent is not None
    assert silent.rows[0][1][0] is not None
    assert silent.rows[0][1][0].text == "no alarm"


def test_a_share_whose_limit_passes_one_is_out_of_reach() -> None:
    series = curves(130, 200)
    series["key_mean_ratio"] = [1.0] * len(series["step"])
    table = warning_table(group(row(crash=200, series=series), stable()))
    assert table is not None
    assert "|mean key| / mean |key| (alarm above 1.12: out of reach)" in dict(table.rows)


def test_without_a_stable_run_or_an_explosion_nothing_is_compared() -> None:
    alone = warning_table(group(row(crash=200, series=curves(130, 200))))
    assert alone is not None
    assert alone.rows == []
    assert "No stable run" in alone.note
    assert warning_table(group(stable())) is None


def test_incomplete_rows_of_a_strange_file_are_passed_over() -> None:
    odd = [
        row(params=dict(SIZE)),
        row(metrics={}),
        row(options={"mantissa_bits": "many"}),
        row(series={"step": [0.0], "loss": [1.0, 2.0]}),
        row(options={"mantissa_bits": True}),
        row(seed=True),
        *(row(params={**SIZE, "seed": 0, "warmup": w}) for w in ("abc", None, True)),
    ]
    assert groups([Found(r, None, i) for i, r in enumerate(odd)]) == []


def test_a_note_cannot_become_markup() -> None:
    named = [row(options={"mantissa_bits": 1, "x": f"<b>{i}"}, seed=i, crash=600) for i in (0, 1)]
    table = ladder_table(group(*named))
    assert "<b>" in table.note
    assert "<b>" not in markdown_table(table, Path()).replace("\\<", "")


def test_layers_count_from_one() -> None:
    assert signal_name("w_q_norm_1") == "‖W_Q‖₂ of layer 2"


def test_a_run_a_kernel_needs_no_overview() -> None:
    pair = [Found(r, None, i) for i, r in enumerate((row(crash=200), row("eager-ladder/delta_fp32")))]
    assert overview_tables("crash/ladder", pair) == []
    assert len(run_tables(pair, "here")) == 1


def test_the_page_gives_the_answers_of_the_report() -> None:
    """It keeps of a row only what the answers look at, and kept too little to call a training run complete."""
    if not (paths := committed_results("results/*/ladder-*.json")):
        pytest.skip("not a git checkout")
    loaded, _ = load_all(paths)
    table = answer_table(all_rows(loaded))
    assert any("yes at M=" in cells[2].text for _, cells in table.rows if cells[2])
    assert any("sick" in cells[3].text for _, cells in table.rows if cells[3])
    data, problems = gather(paths, ROOT / "site", None)
    assert problems == []
    shown = data.finish()["answers"]["rows"]
    assert [(line["machine"], [c["text"] for c in line["cells"]]) for line in shown] == [
        (label, [c.text if c else "" for c in cells]) for label, cells in table.rows
    ]


def pinned_matplotlib() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith("matplotlib=="))


def test_the_committed_figures_are_up_to_date() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    if not committed_results("results/*/ladder-*.json") or matplotlib.__version__ != pinned_matplotlib():
        pytest.skip("not a git checkout, or another matplotlib than constraints.txt names")
    from bench.report.plot import figures

    loaded, problems = load_all(committed_results("results/*/ladder-*.json"))
    assert problems == []
    made = figures(loaded)
    assert sorted(made) == sorted(p.name for p in (ROOT / "docs" / "figures").glob("*.svg"))
    for name, svg in made.items():
        assert (ROOT / "docs" / "figures" / name).read_text() == svg, "run: make figures"


def test_figures_do_not_depend_on_the_day() -> None:
    pytest.importorskip("matplotlib")
    from bench.report.plot import figures

    loaded, _ = load_all(committed_results("results/*/ladder-*.json")[:1])
    if not loaded:
        pytest.skip("not a git checkout")
    svg = figures(loaded)["ladder.svg"]
    assert "<dc:date>" not in svg
    assert "matplotlib.org" not in svg


def run_plot(*arguments: str, blocked: bool = False) -> subprocess.CompletedProcess[str]:
    block = "sys.modules['matplotlib'] = None\n" if blocked else ""
    code = f"import sys\n{block}sys.argv = ['runner.py', 'plot', *{list(arguments)!r}]\nimport runner\nrunner.main()"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_plot_without_matplotlib_says_how_to_get_it(tmp_path: Path) -> None:
    done = run_plot("results/nvidia-h200", "-o", str(tmp_path), blocked=True)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("pip install matplotlib -c constraints.txt")


def test_plot_of_files_without_a_ladder_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run_plot("results/nvidia-h200/bias.json", "-o", str(tmp_path))
    assert done.returncode == 2
    assert "no finished runs of crash/ladder" in done.stderr
    assert list(tmp_path.iterdir()) == []
