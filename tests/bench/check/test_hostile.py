"""Files made to crash, stall or deceive a validation: refused with a reason, each within a second.

A long run: `for seed in $(seq 10); do FUZZ_EXAMPLES=10000 pytest tests/bench/check/test_hostile.py -k mutated
--hypothesis-seed $seed; done`. The suite's is short.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hostile import (
    MARKUP,
    add_key,
    change_value,
    free_difference,
    paths,
    remove,
    slow_files,
    text_mutations,
    values,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bench.check.validate import MAX_WRONG_INPUTS, validate_file
from bench.files.records import Submission, dumps, submission_text
from bench.files.store import BadFile, read_submission
from bench.run.config import parse_config
from bench.run.engine import execute, prepare
from bench.run.plan import Request, make_plan
from cases import load_case
from conftest import TINY, Quiet, RunIt

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "300"))
LIMIT_S = 1.0
LIMIT_READINGS = 20  # of a file's worth of numbers by Python's own JSON reader, for a slower machine
SLOW_NAMES = list(slow_files({"rows": [{}], "config": {}, "machine": {}, "offered": []}))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run of the tiny config."""
    folder = tmp_path_factory.mktemp("hostile")
    config = folder / "tiny.yaml"
    config.write_text(TINY)
    request = Request(config, folder / "results")
    run = prepare(request)
    execute(run, request, Quiet())
    return run.path


@cache
def limit_s() -> float:
    """A second, or what twenty plain readings take here: an old processor is no hostile file."""
    text = json.dumps([number / 7 for number in range(200_000)])  # 3.6 MB
    tries = []
    for _ in range(3):
        start = time.process_time()
        json.loads(text)
        tries.append(time.process_time() - start)
    return max(LIMIT_S, LIMIT_READINGS * min(tries))


def judged(path: Path, text: str) -> list[str]:
    """Problems of `text` at `path`; a hang shows as processor time, the better of two tries."""
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    problems, spent = timed(path)
    if spent > limit_s():  # this process may have been busy with its own garbage
        problems, spent = timed(path)
    assert spent <= limit_s(), f"{spent:.2f} s for {len(text)} characters"
    assert all(problem.isprintable() and len(problem) <= 300 for problem in problems)
    return problems


def timed(path: Path) -> tuple[list[str], float]:
    start = time.process_time()
    problems = validate_file(path)
    return problems, time.process_time() - start


def check(path: Path, original: dict[str, Any], text: str) -> None:
    """A mutated text is refused, or differs only in what another honest run could differ in."""
    if judged(path, text):
        return
    submission, _ = read_submission(path)
    assert submission_text(submission) == text
    assert free_difference(original, json.loads(text)) is None
    config = parse_config(submission.config.text, "config")
    planned = {unit.key for unit in make_plan(config, submission.offered)}
    assert {row.key for row in submission.rows} == planned
    for row, was in zip(submission.rows, original["rows"], strict=True):
        case = load_case(row.case)
        if row.status == "ok":
            params = case.Params.model_validate(row.params)
            assert row.verdict == case.verdict(params, row.metrics)
            assert row.digests["inputs"] == was["digests"]["inputs"]


@settings(
    phases=[Phase.generate],
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(data=st.data())
def test_mutated_submissions_are_refused_or_harmless(good: Path, tmp_path: Path, data: st.DataObject) -> None:
    original_text = good.read_text()
    original = json.loads(original_text)
    path = tmp_path / good.parent.name / good.name
    path.parent.mkdir(exist_ok=True)
    if data.draw(st.integers(0, 3)) == 0:
        check(path, original, data.draw(text_mutations(original_text)))
        return
    tree = copy.deepcopy(original)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(paths(tree)))
        kind = data.draw(st.sampled_from(("change", "change", "remove", "add")))
        if kind == "change":
            change_value(tree, place, data.draw(values()))
        elif kind == "remove":
            remove(tree, place)
        else:
            key = data.draw(st.sampled_from(("x", "verdict", "inputs", "aligned_ulp_z", MARKUP)))
            add_key(tree, place, key, data.draw(values()))
    check(path, original, canonical(tree))


def canonical(tree: Any) -> str:
    """In canonical form where there is one, so that a refusal has a better reason than the form."""
    try:
        return submission_text(Submission.model_validate(tree))
    except ValueError:
        return json.dumps(tree)


@pytest.mark.parametrize("name", SLOW_NAMES)
def test_no_file_takes_longer_than_a_second(good: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / good.parent.name / good.name
    path.parent.mkdir()
    assert judged(path, slow_files(json.loads(good.read_text()))[name]) != []


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with open(path, "wb") as handle:
        handle.truncate(10**9)  # sparse
    start = time.process_time()
    assert "1000000000 bytes, at most" in validate_file(path)[0]
    assert time.process_time() - start < 0.1


def test_links_and_devices_are_not_opened(good: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").symlink_to(good.parent)
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for path in (tmp_path / "folder" / good.name, tmp_path / "pipe.json", tmp_path / "zero.json"):
        assert validate_file(path) == ["not a regular file"]
    assert (
        "cannot be read" in validate_file(Path("a\0b"))[0]
        or "not a regular" in validate_file(Path("a\0b"))[0]
    )


def test_names_that_lead_elsewhere_are_refused(good: Path) -> None:
    for field, value in (("slug", "../../etc"), ("slug", ".."), ("slug", "a/b"), ("slug", "a\0")):
        tree = json.loads(good.read_text())
        tree["machine"][field] = value
        with pytest.raises(BadFile, match=r"machine\.slug"):
            reread(good, json.dumps(tree))
    tree = json.loads(good.read_text())
    tree["config"]["name"] = "../../x"
    with pytest.raises(BadFile, match=r"config\.name"):
        reread(good, json.dumps(tree))


def reread(good: Path, text: str) -> Submission:
    path = good.parent / "other.json"
    path.write_text(text)
    try:
        return read_submission(path)[0]
    finally:
        path.unlink()


def test_wrong_inputs_stop_the_work(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = json.loads(good.read_text())
    for row in tree["rows"]:
        row["digests"]["inputs"] = "0" * 64
    path = tmp_path / good.parent.name / good.name
    path.parent.mkdir()
    path.write_text(canonical(tree))
    case = load_case("bias/shift_range")
    made: list[object] = []
    digest = type(case).hash_inputs
    monkeypatch.setattr(
        type(case),
        "hash_inputs",
        lambda *a: made.append(a) or digest(*a),  # type: ignore[func-returns-value]
    )
    problems = validate_file(path)
    assert len(problems) >= MAX_WRONG_INPUTS
    assert len(made) == 1
    assert validate_file(path, inputs=False) == []


def test_work_beyond_the_budget_is_refused_before_it_begins(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.check.validate.MAX_VALUES_A_FILE", 1)
    case = load_case("bias/shift_range")
    monkeypatch.setattr(type(case), "hash_inputs", lambda *_: pytest.fail("inputs were made"))
    assert "values to make again, at most 1" in validate_file(good)[0]


def test_many_problems_are_cut(good: Path, tmp_path: Path) -> None:
    tree = json.loads(good.read_text())
    tree["rows"] = [dict(tree["rows"][0], wall_s=-1.0) for _ in range(500)]
    path = tmp_path / good.parent.name / good.name
    path.parent.mkdir()
    path.write_text(canonical(tree))
    problems = validate_file(path)
    assert len(problems) == 101
    assert problems[-1].startswith("and ")


def test_a_fresh_run_stays_valid(run_tiny: RunIt) -> None:
    assert validate_file(run_tiny().path, fresh=True) == []
    assert dumps({"a": float("nan")}) == '{"a": "NaN"}'
