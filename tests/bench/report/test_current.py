"""Newest runs are shown, repetitions counted, stale rows set apart; the answer table quotes its rows."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from test_report import found, row, training

from bench.errors import UsageError
from bench.files.load import Found, all_rows, load_all
from bench.files.records import Row, submission_text
from bench.files.store import read_submission
from bench.report.answers import NOT_MEASURED, answer_table
from bench.report.current import CURRENT, OLDER, STALE, Entry, current, states
from bench.report.write import write_report
from cases import load_case
from conftest import RunIt


def test_the_newest_run_stands_for_a_unit_and_agreement_is_counted() -> None:
    entries = [
        Entry("u", "2026-01-01", "A", False),
        Entry("u", "2026-03-01", "B", False),
        Entry("u", "2026-02-01", "B", False),
        Entry("v", "2026-01-01", None, False),
        Entry("u", "2027-01-01", "A", True),
    ]
    assert [tuple(s) for s in states(entries)] == [
        (OLDER, 2, 3),
        (CURRENT, 2, 3),
        (OLDER, 2, 3),
        (CURRENT, 0, 1),
        (STALE, 0, 1),
    ]


def again(path: Path, name: str, written: str, verdict: str | None = None) -> None:
    """A second submission beside `path`."""
    submission, _ = read_submission(path)
    submission.volatile["written"] = written
    if verdict is not None:
        submission.rows[0].verdict = verdict
    (path.parent / name).write_text(submission_text(submission))


def test_a_run_of_several_processes_is_another_machine(run_tiny: RunIt, tmp_path: Path) -> None:
    path = run_tiny().path
    submission, _ = read_submission(path)
    submission.machine.backends["cpu"]["processes"] = 2
    (path.parent / "tiny+2.json").write_text(submission_text(submission))
    loaded, _ = load_all([tmp_path / "results"])
    slug = submission.machine.slug
    assert {item.machine for item in loaded} == {slug, f"{slug}, 2 processes"}
    now = current(all_rows(loaded))
    assert (len(now.rows), len(now.older), now.repeated) == (2 * len(submission.rows), 0, 0)


def test_a_repeated_run_replaces_the_older_one_in_every_table(run_tiny: RunIt, tmp_path: Path) -> None:
    path = run_tiny().path
    again(path, "tiny+2.json", "2999-01-01T00:00:00+00:00", "pass")
    loaded, problems = load_all([tmp_path / "results"])
    now = current(all_rows(loaded))
    assert problems == []
    assert {f.file for f in now.rows} == {"tiny+2.json"}
    assert len(now.older) == len(now.rows) == now.repeated == now.agreeing
    text, _ = write_report("markdown", [tmp_path / "results"], None, None)
    assert text is not None
    assert "in 9 of them all runs agree bit for bit" in text
    rows = list(csv.DictReader(io.StringIO(write_report("csv", [tmp_path / "results"], None, None)[0] or "")))
    assert sorted({r["state"] for r in rows}) == [CURRENT, OLDER]


def test_stale_rows_are_in_no_table_but_named(
    run_tiny: RunIt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_tiny()
    monkeypatch.setattr(type(load_case("bias/shift_range")), "version", 2)
    text, _ = write_report("text", [tmp_path / "results"], None, None)
    assert text is not None
    assert "Stale, not shown: bias/shift_range version 1" in text
    assert "eager-fused/stabilized" not in text
    report, _ = write_report("json", [tmp_path / "results"], None, None)
    assert {r["state"] for r in json.loads(report or "")["rows"]} == {STALE}


def cells(rows: list[Found]) -> list[str]:
    return [cell.text for _, line in answer_table(rows).rows for cell in line if cell]


INF = float("inf")


def leak(kernel: str, verdict: str, mean: float = 1e-3, gap: float = 12.0) -> Row:
    return row(
        kernel,
        verdict,
        case="bias/leak",
        metrics={"leak_mean": mean},
        params={"repeats": 2, "gap": gap, "other_values": "same_sign"},
    )


def changed(run: Row, **fields: object) -> Row:
    """A training row with other fields; `params`, `options` and `metrics` are added to its own."""
    merged = {
        name: {**getattr(run, name), **value} if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    return run.model_copy(update=merged)


def test_answers_quote_the_rows() -> None:
    rows = found(
        row(),
        row("sdpa-math/stock", "pass", 0.01),
        leak("a/stock", "leaks", 2e-3),
        leak("a/delta_fp32", "pass", 1e-9),
        leak("a/stabilized", "leaks", 1e-4),
        training("stock", 0, 900.0),
        training("stock", 1, 700.0),
        training("delta_fp32", 0, INF),
        training("stock", 0, INF, bits=2),
    )
    assert cells(rows) == [
        "biased: 1 of 2: eager-stored +0.22 ulp",
        "leaking: 1 of 1: a +2e-03",
        "yes at M=1: step 700 to 900 (2 of 2 runs); no at M=2 to step 1500 (1 run)",
        "yes: delta_fp32 (tried on 1 of 1 leaking kernel, 1 of 2 exploded runs); "
        "no: stabilized (leaks in a; tried on 1 of 1 leaking kernel, 0 of 2 exploded runs)",
        NOT_MEASURED,
    ]


def test_a_fix_may_hold_in_one_implementation_and_not_in_another() -> None:
    rows = found(
        leak("a/stock", "leaks"),
        leak("b/stock", "leaks"),
        leak("c/stock", "pass"),
        leak("a/delta_dp", "leaks"),
        leak("b/delta_dp", "pass"),
        leak("c/stochastic", "leaks"),
    )
    # c never needed a fix
    assert cells(rows)[3] == "in part: delta_dp (leaks in a; tried on 2 of 2 leaking kernels)"


def test_a_fix_whose_runs_are_sick_holds_in_part() -> None:
    """Stable by its loss, with row maxima over ten times those of the healthiest run."""

    def trained(fix: str, row_max: float) -> Row:
        series = {"step": [0.0, 1490.0], "loss": [4.0, 1.6], "row_max_abs": [1.0, row_max]}
        return training(fix, 0, INF).model_copy(update={"series": series})

    runs = found(training("stock", 0, 900.0), trained("delta_dp", 30.0), trained("delta_fp32", 400.0))
    assert cells(runs)[3] == (
        "yes: delta_dp (tried on 1 of 1 exploded run); "
        "in part: delta_fp32 (stable but sick in 1 run; tried on 1 of 1 exploded run)"
    )


def test_a_fix_is_held_against_the_same_training_only() -> None:
    fixed = training("delta_fp32", 0, INF)
    stock = training("stock", 0, 900.0)
    others = [
        training("delta_fp32", 1, INF),
        training("delta_fp32", 0, INF, bits=2),
        changed(fixed, dtype="bfloat16"),
        changed(fixed, params={"width": 64}),
        changed(fixed, kernel="triton/delta_fp32"),
        changed(fixed, metrics={"steps_run": 899.0}),  # ends before stock exploded
    ]
    for other in others:
        assert cells(found(stock, other))[3] == NOT_MEASURED
    held = "yes: delta_fp32 (tried on 1 of 1 exploded run)"
    assert cells(found(stock, changed(fixed, metrics={"steps_run": 900.0})))[3] == held


def test_a_spike_is_no_explosion() -> None:
    spike = changed(training("stock", 0, INF), verdict="spike")
    answers = cells(found(spike, training("delta_fp32", 0, INF)))
    assert answers[2:4] == ["no at M=1 to step 1500 (1 run)", NOT_MEASURED]


def test_bf16_has_seven_bits_and_two_comes_before_ten() -> None:
    bf16 = changed(training("stock", 0, 900.0), dtype="bfloat16")
    runs = [training("stock", 0, 900.0, bits=b) for b in (10, 2)]
    runs = [changed(run, dtype="bfloat16") for run in runs]
    runs.append(bf16.model_copy(update={"options": {}}))
    assert cells(found(*runs))[2] == "; ".join(
        f"yes at M={bits}: step 900 (1 of 1 run)" for bits in (2, 7, 10)
    )


def test_the_same_training_counts_once_and_sizes_are_apart() -> None:
    run = changed(training("stock", 0, 900.0), params={"width": 32})
    wide = changed(training("stock", 0, 500.0), params={"width": 64})
    again_longer = changed(run, params={"steps": 3000})
    assert cells(found(run, again_longer))[2] == "yes at M=1: step 900 (1 of 1 run)"
    assert cells(found(run, again_longer, wide))[2] == (
        "eager-ladder/stock, float32, width 32: yes at M=1: step 900 (1 of 1 run); "
        "eager-ladder/stock, float32, width 64: yes at M=1: step 500 (1 of 1 run)"
    )


def test_a_kernel_counts_once_and_at_one_gap() -> None:
    rows = found(
        leak("triton/stock", "leaks", 2e-3),
        leak("triton/stock", "leaks", 9e-3, gap=18.0),
        changed(leak("triton/stock", "leaks", 3e-3), options={"block_n": 64}),
    )
    assert cells(rows)[1] == "leaking: 1 of 1: triton +3e-03"


def test_the_cost_is_a_ratio_to_stock_of_the_same_shape() -> None:
    def timed(fix: str, ms: float, tokens: int = 64):
        return row(
            f"triton/{fix}",
            "measured",
            case="speed/attention",
            metrics={"both_ms": ms},
            params={"tokens": tokens},
        )

    rows = [timed("stock", 2.0), timed("delta_fp32", 2.1), timed("delta_fp32", 9.0, tokens=128)]
    assert cells(found(*rows))[-1] == "delta_fp32 ×1.05"


def test_nothing_measured_is_no_line() -> None:
    assert answer_table(found(row(status="error", reason="x", verdict="", metrics={}))).rows == []


def test_spreadsheets_run_nothing_of_a_file(run_tiny: RunIt, tmp_path: Path) -> None:
    path = run_tiny().path
    again(path, path.name, "2026-01-01", "=HYPERLINK(1)")
    text, _ = write_report("csv", [path], None, None)
    assert ",'=HYPERLINK(1)," in (text or "")


def test_parquet_holds_every_row(run_tiny: RunIt, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install pyarrow")
    output = tmp_path / "out" / "rows.parquet"
    write_report("parquet", [run_tiny().path], output, None)
    table = parquet.read_table(output).to_pylist()
    assert len(table) == 9
    assert table[0]["case"] == "bias/shift_range"
    assert isinstance(table[0]["row_max_limit"], float)


def test_a_paper_gets_tables_without_links(run_tiny: RunIt) -> None:
    text, _ = write_report("paper", [run_tiny().path], None, None)
    assert text is not None
    assert "](" not in text
    assert "bias/shift\\_range · eager-fused/stock" in text


def test_formats_that_need_a_file_say_so(run_tiny: RunIt) -> None:
    for form in ("html", "parquet"):
        with pytest.raises(UsageError, match="needs -o FILE"):
            write_report(form, [run_tiny().path], None, None)
    with pytest.raises(UsageError, match="allowed: text, markdown"):
        write_report("pdf", [run_tiny().path], None, None)
