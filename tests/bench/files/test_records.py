"""Result files: canonical text, strict reading, nothing hostile gets through."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.files.records import MAX_BYTES, Row, dumps, row_key, row_text, submission_text
from bench.files.store import BadFile, read_submission, set_aside, write_text
from conftest import RunIt, committed_results

ROW = {
    "case": "bias/leak",
    "case_version": 1,
    "kernel": "eager-fused/stock",
    "backend": "cpu",
    "dtype": "bfloat16",
    "params": {"gap": 12.0},
    "options": {"tile": 64},
    "seeds": 2,
    "status": "ok",
}


def test_non_finite_numbers_survive_as_strings() -> None:
    row = Row(**ROW, metrics={"a": math.nan, "b": math.inf, "c": -math.inf, "d": -0.0})
    text = dumps(row.model_dump())
    assert '"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": -0.0' in text
    back = Row.model_validate(json.loads(text)).metrics
    assert math.isnan(back["a"])
    assert (back["b"], back["c"]) == (math.inf, -math.inf)
    assert math.copysign(1, back["d"]) == -1


@given(st.floats(allow_nan=False))
def test_floats_survive_exactly(value: float) -> None:
    back = Row.model_validate(json.loads(dumps(Row(**ROW, metrics={"x": value}).model_dump())))
    assert back.metrics["x"] == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("case", "bias/tie_break"),
        ("kernel", "a/b"),
        ("backend", "cuda"),
        ("dtype", "float16"),
        ("params", {"gap": 6.0}),
        ("options", {"tile": 0}),
        ("seeds", 3),
        ("case_version", 2),
        ("kernel_version", 2),
    ],
)
def test_every_varying_field_is_in_the_key(field: str, value: object) -> None:
    assert row_key(Row(**(ROW | {field: value}))) != row_key(Row(**ROW))


def test_a_first_version_is_in_no_key_and_no_text() -> None:
    """So files from before kernels had versions keep both."""
    row = Row(**ROW)
    assert row.kernel_version == 1
    assert "kernel_version" not in row_key(row) + row_text(row)
    assert '"kernel_version": 2' in row_text(Row(**ROW, kernel_version=2))


@pytest.mark.parametrize("path", committed_results(), ids=lambda path: path.stem)
def test_committed_files_keep_their_text_and_keys(path: Path) -> None:
    submission, text = read_submission(path)
    assert submission_text(submission) == text
    assert not any("kernel_version" in row.key for row in submission.rows)


def test_the_key_ignores_what_was_measured() -> None:
    measured = Row(**ROW, metrics={"x": 1.0}, verdict="pass", wall_s=3.0)
    assert row_key(measured) == row_key(Row(**ROW))


def test_reading_and_writing_give_the_same_bytes(run_tiny: RunIt) -> None:
    submission, text = read_submission(run_tiny().path)
    assert submission_text(submission) == text
    plain = json.loads(text)
    assert list(plain) == sorted(plain)
    assert all(line.count('"case": ') == 1 for line in text.splitlines() if "wall_s" in line)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t[: len(t) // 2], "not JSON"),
        (lambda t: "[]", "not a submission"),
        (lambda t: "{}", "not a submission: schema_version: Field required"),
        (lambda t: t.replace('"seeds": 1', '"seeds": "1"', 1), "not a submission: rows.0.seeds"),
        (lambda t: t.replace('"seeds": 1', '"seeds": NaN', 1), "bare NaN"),
        (lambda t: t.replace('"seeds": 1', '"seeds": 1, "seeds": 1', 1), "'seeds' appears twice"),
        (lambda t: t.replace('"seeds": 1', '"seeds": 1, "extra": 1', 1), "extra"),
        (lambda t: t.replace('"status": "ok"', '"status": "fine"', 1), "status"),
        (lambda t: t.replace('"schema_version": 1', '"schema_version": 2'), "schema_version"),
        (lambda t: "\ufeff" + t, "not JSON"),
        (lambda t: "[" * 200_000, "not readable JSON"),
        (lambda t: '{"a": ' + "9" * 10_000 + "}", "not readable JSON"),
        (lambda t: " " * (MAX_BYTES + 1), "at most"),
    ],
)
def test_foreign_and_broken_files_are_refused_with_a_reason(run_tiny: RunIt, change, expected: str) -> None:
    path = run_tiny().path
    path.write_text(change(path.read_text()))
    with pytest.raises(BadFile, match=expected):
        read_submission(path)


def test_only_regular_files_are_read(tmp_path: Path, run_tiny: RunIt) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(run_tiny().path)
    for path in (link, tmp_path, tmp_path / "none.json"):
        with pytest.raises(BadFile, match="not a regular file"):
            read_submission(path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_text(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old"


def test_set_aside_never_overwrites(tmp_path: Path) -> None:
    names = []
    for content in "abc":
        path = tmp_path / "x.json"
        path.write_text(content)
        names.append(set_aside(path, "corrupt").name)
    assert names == ["x.json.corrupt-1", "x.json.corrupt-2", "x.json.corrupt-3"]
    assert (tmp_path / "x.json.corrupt-2").read_text() == "b"
