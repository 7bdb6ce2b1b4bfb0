"""Tables: one cell a row, labels that name what varies, links to the row's line, nothing hostile."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from bench.files import labels
from bench.files.load import Found, all_rows, load_all
from bench.files.records import Row
from bench.report.cases import run_tables
from bench.report.current import current
from bench.report.export import csv_report, json_report
from bench.report.findings import findings
from bench.report.render import (
    markdown_report,
    render,
    terminal_report,
    text_table,
)
from bench.report.tables import (
    awaited,
    case_table,
    digest_table,
    summary_table,
)
from cases.headline import cell_text
from conftest import RunIt, committed_results

ROOT = Path(__file__).resolve().parents[3]


def row(
    kernel: str = "eager-stored/stock",
    verdict: str = "biased",
    mean: float = 0.219,
    **fields: object,
) -> Row:
    base: dict[str, object] = {
        "case": "bias/tie_break",
        "case_version": 1,
        "kernel": kernel,
        "backend": "cpu",
        "dtype": "bfloat16",
        "options": {"tile": 128},
        "seeds": 2,
        "status": "ok",
        "verdict": verdict,
        "params": {"repeats": 2, "gap": 12.0, "row_jitter": 0.5, "value_sign": "mixed", "min_z": 5.0},
        "metrics": {"aligned_ulp_mean": mean, "aligned_ulp_sem": 0.003},
    }
    return Row(**(base | fields))  # type: ignore[arg-type]


def found(*rows: Row) -> list[Found]:
    return [Found(r, None, i) for i, r in enumerate(rows)]


def said(rows: list[Row], beside: list[Row] | None = None) -> list[str]:
    return findings(found(*rows), found(*beside or ()))


def test_a_cell_shows_value_error_and_verdict() -> None:
    assert cell_text(row()) == "+0.219±0.003 biased"
    assert cell_text(row(status="unsupported", reason="x", verdict="", metrics={})) == "unsupported"


def test_labels_name_only_what_varies() -> None:
    points = [
        {"repeats": r, "gap": 12.0, "row_jitter": j, "min_z": z} for r, j, z in [(1, 0.5, 5.0), (2, 0.0, 4.0)]
    ]
    table = case_table("bias/tie_break", found(*(row(params=p) for p in points)), "here")
    assert table.columns == ["repeats=1 row_jitter=0.5 min_z=5", "repeats=2 row_jitter=0 min_z=4"]
    assert [label for label, _ in table.rows] == ["eager-stored/stock"]


def test_options_that_vary_make_rows_of_their_own() -> None:
    table = case_table("bias/tie_break", found(row(options={"tile": 64}), row(options={"tile": 0})), "here")
    assert [label for label, _ in table.rows] == [
        "eager-stored/stock tile=64",
        "eager-stored/stock tile=0",
    ]


def test_no_row_hides_another() -> None:
    """Rows that differ in any key field have cells of their own."""
    rows = [
        row(params={"repeats": r, "floor_ulp": f}, dtype=d, options={"tile": t}, backend=b, seeds=n)
        for r in (1, 2)
        for f in (0.0, 0.5)
        for n in (3, 16)
        for d in ("bfloat16", "float16")
        for t in (64, 128)
        for b in ("cpu", "cuda")
    ]
    table = case_table("bias/tie_break", found(*rows), "here")
    assert sum(cell is not None for _, cells in table.rows for cell in cells) == len(rows)


def test_summary_counts_verdicts_and_shows_the_worst() -> None:
    rows = found(row(), row(verdict="pass", mean=0.9), row(mean=-0.4), row(kernel="a/b", verdict="pass"))
    table = summary_table(rows)
    cells = {label: cells[0].text for label, cells in table.rows if cells[0]}
    assert cells["bias/tie_break · eager-stored/stock"] == "biased 2/3, pass 1/3: -0.400±0.003"
    assert cells["bias/tie_break · a/b"] == "pass 1/1"


def training(kernel: str, seed: int, crash: float, bits: int = 1) -> Row:
    exploded = crash < float("inf")
    return row(
        f"eager-ladder/{kernel}",
        f"exploded@{crash:.0f}" if exploded else "stable@1500",
        case="crash/ladder",
        dtype="float32",
        seeds=1,
        params={"seed": seed, "steps": 1500},
        options={"mantissa_bits": bits},
        metrics={"crash_step": crash, "steps_run": crash + 19 if exploded else 1500.0, "best_loss": 1.6},
    )


def test_crash_rows_are_counted_by_their_word_and_the_first_crash_is_named() -> None:
    inf = float("inf")
    runs = [
        training("stock", 0, 900.0),
        training("stock", 1, 700.0),
        training("stock", 2, inf),
        training("delta_dp", 0, inf),
        training("stock", 0, inf, bits=2),
    ]
    cells = {label: cells[0].text for label, cells in summary_table(found(*runs)).rows if cells[0]}
    assert cells["crash/ladder · eager-ladder/stock"] == "exploded 2/4, stable 2/4: first at step 700"
    assert cells["crash/ladder · eager-ladder/delta_dp"] == "stable 1/1"
    assert cell_text(runs[0]) == "1.60 exploded@900"
    assert said(runs) == [
        "Training with O and P̄ in 1 mantissa bit: explodes: eager-ladder/stock (step 700, 900, 2 of 3 runs); "
        "holds: eager-ladder/delta_dp (to step 1500).",
        "Training with O and P̄ in 2 mantissa bits: explodes: none; holds: eager-ladder/stock (to step 1500).",
    ]


def test_a_stable_run_with_sick_row_maxima_does_not_count_as_one_that_holds() -> None:
    def curves(last: float) -> dict[str, list[float]]:
        return {
            "step": [0.0, 750.0, 1490.0],
            "loss": [4.0, 1.7, 1.6],
            "row_max_abs": [1.0, 20.0, last],
        }

    well, ill = (
        training(kernel, 0, float("inf")).model_copy(update={"series": curves(last)})
        for kernel, last in (("delta_dp", 30.0), ("o_fp32", 301.0))
    )
    lines = said([training("stock", 0, 900.0), ill, well])
    assert lines == [
        "Training with O and P̄ in 1 mantissa bit: explodes: eager-ladder/stock (step 900); holds: "
        "eager-ladder/delta_dp (to step 1500); stable by its loss but sick (row maxima over 10 × the "
        "healthiest run's): eager-ladder/o_fp32 (to step 1500)."
    ]
    fine = ill.model_copy(update={"series": curves(299.0)})
    assert "sick" not in said([fine, well])[0]
    # The healthiest run may stand in another file of the machine.
    assert "sick" not in said([ill])[0]
    assert "sick (row" in said([ill], beside=[ill, well])[0]


def test_bf16_training_is_not_in_all_mantissa_bits_and_bits_are_in_order() -> None:
    """A kernel without the option rounds as its dtype does: BF16 stores 7 bits."""
    runs = [
        training("stock", 0, 900.0, bits=10),
        training("stock", 0, 900.0, bits=2),
        training("stock", 0, 900.0).model_copy(update={"options": {}, "dtype": "bfloat16"}),
        training("stock", 0, 900.0).model_copy(update={"options": {"mantissa_bits": "x"}}),
    ]
    assert [line.partition(":")[0] for line in said(runs)] == [
        f"Training with O and P̄ in {bits} mantissa bits" for bits in (2, 7, 10)
    ]


def test_drift_rows_are_grouped_by_their_verdict() -> None:
    def drift(kernel: str, verdict: str, mean: float, **params: object) -> Row:
        point = {
            "repeats": 2,
            "gap": 12.0,
            "values": "fresh",
            "other_values": "same_sign",
            "eps": 2.0**-13,
        }
        return row(
            kernel,
            verdict,
            case="crash/drift",
            params=point | params,
            metrics={"drift_mean": mean, "drift_abs_mean": abs(mean), "fp32_drift_abs_mean": 1.2e-5},
        )

    runs = [
        drift("eager-stored/stock", "drifts", 0.912),
        drift("eager-fused/stock", "drifts", -0.434),
        drift("eager-fused/stochastic", "wanders", 0.011),
        drift("sdpa-math/stock", "holds", 1e-4),
        drift("sdpa-math/stock", "inconclusive", 1e-4, eps=1e-8),
    ]
    assert said(runs) == [
        "Drift of W_Q where the exact gradient is 0, learning rates a step (FP32: 1e-05): "
        "drifts: eager-stored/stock (+0.91), eager-fused/stock (-0.43); "
        "wanders: eager-fused/stochastic (+0.01); holds: sdpa-math/stock."
    ]
    cells = {label: cells[0].text for label, cells in summary_table(found(*runs)).rows if cells[0]}
    assert cells["crash/drift · eager-stored/stock"] == "drifts 1/1: 0.9120"
    assert cells["crash/drift · sdpa-math/stock"].startswith("holds 1/2, inconclusive 1/2")


def test_many_points_make_a_table_a_case() -> None:
    many = found(*(row(params={"repeats": r}) for r in range(1, 9)), row(case="bias/normalizer"))
    assert len(run_tables(many, "here")) == 2
    assert len(run_tables(many[-2:], "here")) == 1


def test_equal_digests_share_a_letter(run_tiny: RunIt, tmp_path: Path) -> None:
    def bits(o: str) -> Row:
        return row(
            case="determinism/run_to_run",
            digests={"o": o * 64},
            metrics={"distinct_max": 1.0},
            verdict="pass",
        )

    class On(Found):
        machine = property(lambda self: f"machine-{self.index}")  # type: ignore[assignment]

    rows = [On(bits(o), None, i) for i, o in enumerate("aba")]
    table = digest_table(rows)
    assert [cell.text for cell in table.rows[0][1] if cell] == ["A", "B", "A"]


def test_the_same_bits_table_looks_at_a_row_once_not_once_for_every_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class On(Found):
        machine = property(lambda self: f"machine-{self.index % 2}")  # type: ignore[assignment]

    looked = 0
    original = labels.point

    def counted(row: Row) -> dict[str, object]:
        nonlocal looked
        looked += 1
        return original(row)

    monkeypatch.setattr(labels, "point", counted)
    rows = [
        On(row(case="determinism/run_to_run", params={"n": n}, options={"tile": n}), None, n)
        for n in range(50)
    ]
    table = digest_table(rows)
    assert looked == 2 * len(rows)  # what varies, and the label
    assert [label for label, _ in table.rows][:2] == [
        f"determinism/run_to_run · eager-stored/stock tile={n} · n={n}" for n in (0, 1)
    ]


def test_other_inputs_are_never_compared() -> None:
    class On(Found):
        machine = property(lambda self: f"machine-{self.index}")  # type: ignore[assignment]

    rows = [
        On(row(case="determinism/run_to_run", digests={"o": "a" * 64, "inputs": i * 64}), None, n)
        for n, i in enumerate("112")
    ]
    table = digest_table(rows)
    assert [cell.text for cell in table.rows[0][1] if cell] == ["A", "A", "other inputs"]


def test_the_worst_row_of_a_range_is_the_smallest() -> None:
    rows = found(
        *(
            row(case="bias/shift_range", verdict="out_of_range", metrics={"row_max_limit": limit})
            for limit in (23.75, 3.953, 86.5)
        )
    )
    (cell,) = summary_table(rows).rows[0][1]
    assert cell is not None
    assert cell.text == "out_of_range 3/3: 3.953"


def test_rows_without_metrics_do_not_break_a_report() -> None:
    empty = row(metrics={})
    assert said([empty]) == []
    assert cell_text(empty) == "biased"
    assert summary_table(found(empty)).rows


@pytest.mark.parametrize(
    ("slug", "missing"),
    [
        ("nvidia-a100-sxm4-80gb", False),
        ("nvidia-rtx-a1000", True),
        ("nvidia-geforce-rtx-4090", True),
    ],
)
def test_an_a1000_is_no_a100(slug: str, missing: bool) -> None:
    class On(Found):
        machine = property(lambda self: slug)  # type: ignore[assignment]

    assert ("NVIDIA A100" in awaited([On(row(), None, 0)])) == missing


def test_what_is_missing_is_named() -> None:
    assert awaited([]) == ["NVIDIA A100", "NVIDIA RTX 4090", "NVIDIA H200", "Ascend 910B"]


def test_findings_quote_the_rows() -> None:
    lines = said(
        [
            row(),
            row("sdpa-math/stock", "pass", -0.02),
            row("eager-stored/stabilized", "pass", 0.004, options={"beta": 2.0}),
        ]
    )
    assert lines[0].endswith("biased: eager-stored (+0.22 ulp); not biased: sdpa-math.")
    assert "eager-stored: +0.004 ulp where row maxima vary (pass)" in lines[1]
    assert said([]) == []


def test_reports_of_a_real_file(run_tiny: RunIt, tmp_path: Path) -> None:
    path = run_tiny().path
    loaded, problems = load_all([tmp_path / "results"])
    assert problems == []
    rows = all_rows(loaded)
    now = current(rows)
    text = terminal_report(now)
    assert "bias/shift_range · eager-fused/stabilized" in text
    assert "Awaiting submission: NVIDIA A100" in text
    markdown = markdown_report(loaded, now, tmp_path / "results")
    line = next(
        i
        for i, t in enumerate(path.read_text().splitlines(), 1)
        if '"kernel": "eager-fused/stabilized"' in t and '"case"' in t
    )
    assert f"({path.parent.name}/tiny.json#L{line})" in markdown
    table = list(csv.DictReader(io.StringIO(csv_report(rows, now))))
    assert len(table) == len(rows)
    limits = {r["kernel"]: float(r["row_max_limit"]) for r in table}
    assert limits["eager-fused/stabilized"] == rows_limit(rows)
    assert len(json.loads(json_report(rows, now))["rows"]) == len(rows)


def rows_limit(rows: list[Found]) -> float:
    return next(f.row for f in rows if f.row.kernel == "eager-fused/stabilized").metrics["row_max_limit"]


def test_unreadable_files_are_left_out_and_named(run_tiny: RunIt, tmp_path: Path) -> None:
    (run_tiny().path.parent / "bad.json").write_text("nope")
    loaded, problems = load_all([tmp_path / "results"])
    assert len(loaded) == 1
    assert "bad.json: not JSON" in problems[0]


def test_text_of_a_file_cannot_become_markup(tmp_path: Path, run_tiny: RunIt) -> None:
    run_tiny()
    loaded, _ = load_all([tmp_path / "results"])
    loaded[0].submission.machine.versions["torch"] = "<script>alert(1)</script>|[x](http://x)"
    loaded[0].submission.rows[0].verdict = "<b>**|"
    markdown = markdown_report(loaded, current(all_rows(loaded)), tmp_path)
    assert "<script" not in markdown.replace("\\<", "")
    assert "[x](" not in markdown
    assert "<b>" not in markdown.replace("\\<", "")


def test_text_table_is_aligned() -> None:
    lines = text_table(case_table("bias/tie_break", found(row(), row("a/b")), "here")).splitlines()
    assert lines[0] == "bias/tie_break · here"
    assert lines[-1].startswith("a/b ")


def test_the_committed_report_is_up_to_date() -> None:
    if not (paths := committed_results()):
        pytest.skip("not a git checkout, or no committed results")
    loaded, problems = load_all(paths)
    assert problems == []
    text = render("markdown", loaded, ROOT / "results")
    assert (ROOT / "results" / "REPORT.md").read_text() == text, "run: make report"
