"""Newest runs are shown, repetitions counted, stale rows set apart; the answer table quotes its rows."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from test_report import found, row, training

from bench.errors import UsageError
from bench.records import submission_text
from bench.registry import load_case
from bench.report.answers import NOT_MEASURED, answer_table
from bench.report.collect import Found, all_rows, load_all
from bench.report.current import CURRENT, OLDER, STALE, Entry, current, states
from bench.report.write import write_report
from bench.store import read_submission
from conftest import RunIt


def test_the_newest_run_stands_for_a_unit_and_agreement_is_counted() -> None:
    entries = [
        Entry("u", "2026-01-01", "A", False), Entry("u", "2026-03-01", "B", False),
        Entry("u", "2026-02-01", "B", False), Entry("v", "2026-01-01", None, False),
        Entry("u", "2027-01-01", "A", True),
    ]  # fmt: skip
    assert [tuple(s) for s in states(entries)] == [
        (OLDER, 2, 3), (CURRENT, 2, 3), (OLDER, 2, 3), (CURRENT, 0, 1), (STALE, 0, 1),
    ]  # fmt: skip


def again(path: Path, name: str, written: str, verdict: str | None = None) -> None:
    """A second submission beside `path`."""
    submission, _ = read_submission(path)
    submission.volatile["written"] = written
    if verdict is not None:
        submission.rows[0].verdict = verdict
    (path.parent / name).write_text(submission_text(submission))


def test_a_repeated_run_replaces_the_older_one_in_every_table(
    run_tiny: RunIt, tmp_path: Path
) -> None:
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
    rows = list(
        csv.DictReader(
            io.StringIO(write_report("csv", [tmp_path / "results"], None, None)[0] or "")
        )
    )
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


def test_answers_quote_the_rows() -> None:
    inf = float("inf")

    def leak(fix: str, verdict: str, mean: float):
        return row(f"a/{fix}", verdict, case="bias/leak", metrics={"leak_mean": mean},
                   params={"repeats": 2, "other_values": "same_sign"})  # fmt: skip

    rows = found(
        row(), row("sdpa-math/stock", "pass", 0.01), leak("stock", "leaks", 2e-3),
        leak("delta_fp32", "pass", 1e-9), leak("stabilized", "leaks", 1e-4),
        training("stock", 0, 900.0), training("stock", 1, 700.0), training("delta_fp32", 0, inf),
        training("stock", 0, inf, bits=2),
    )  # fmt: skip
    assert cells(rows) == [
        "biased: 1 of 2: eager-stored +0.22 ulp",
        "leaking: 1 of 1: a +2e-03",
        "yes at M=1: step 700 to 900 (2 of 2 runs); no at M=2 to step 1500 (1 runs)",
        "yes: delta_fp32 (leak and explosion); no: stabilized (leaks in a)",
        NOT_MEASURED,
    ]


def test_a_fix_may_hold_in_one_implementation_and_not_in_another() -> None:
    def leak(kernel: str, verdict: str):
        return row(kernel, verdict, case="bias/leak", metrics={"leak_mean": 1e-3},
                   params={"repeats": 2, "other_values": "same_sign"})  # fmt: skip

    rows = found(
        leak("a/stock", "leaks"), leak("b/stock", "leaks"), leak("c/stock", "pass"),
        leak("a/delta_dp", "leaks"), leak("b/delta_dp", "pass"), leak("c/stochastic", "leaks"),
    )  # fmt: skip
    assert cells(rows)[3] == "in part: delta_dp (leaks in a)"  # c never needed a fix


def test_the_cost_is_a_ratio_to_stock_of_the_same_shape() -> None:
    def timed(fix: str, ms: float, tokens: int = 64):
        return row(f"triton/{fix}", "measured", case="speed/attention", metrics={"both_ms": ms},
                   params={"tokens": tokens})  # fmt: skip

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
