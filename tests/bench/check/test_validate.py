"""A good file passes; every kind of tampering is found, and all problems are reported at once."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from backends.names import IMPLEMENTATIONS
from bench.check.stale import is_stale
from bench.check.validate import taken_on_trust, validate_file, validate_path
from bench.files.records import Submission, submission_text
from bench.files.store import read_submission
from cases import load_case
from conftest import RunIt, committed_results

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def good(run_tiny: RunIt) -> Path:
    return run_tiny().path


def edited(path: Path, edit: Callable[[Submission], None]) -> list[str]:
    submission, _ = read_submission(path)
    edit(submission)
    path.write_text(submission_text(submission))
    return validate_file(path)


def test_a_fresh_file_is_valid(good: Path) -> None:
    assert validate_file(good) == []


@pytest.mark.timeout(1200)  # makes up to half a billion random values again
@pytest.mark.parametrize("path", committed_results(), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_committed_results_are_valid_and_of_todays_config(path: Path) -> None:
    assert validate_file(path) == []
    submission, _ = read_submission(path)
    assert submission.config.text == (ROOT / "configs" / f"{submission.config.name}.yaml").read_text()


def set_verdict(s: Submission) -> None:
    s.rows[0].verdict = "out_of_range"


def set_metric(s: Submission) -> None:
    row = next(row for row in s.rows if row.kernel == "eager-fused/stabilized")
    row.metrics["row_max_limit"] = math.inf


def drop_metric(s: Submission) -> None:
    del s.rows[0].metrics["row_max_limit"]


def huge_metric(s: Submission) -> None:
    s.rows[0].metrics["wrong_fraction"] = 1e300


def set_digest(s: Submission) -> None:
    s.rows[0].digests["inputs"] = "0" * 64


def drop_row(s: Submission) -> None:
    del s.rows[3]


def repeat_row(s: Submission) -> None:
    s.rows.append(s.rows[0])


def foreign_row(s: Submission) -> None:
    s.rows[0].params["repeats"] = 5


def set_seeds(s: Submission) -> None:
    s.rows[0].seeds = 7


def wrong_z(s: Submission) -> None:
    s.rows[0].metrics |= {"x_mean": 1.0, "x_sem": 0.5, "x_z": 1.0}


def drop_digest(s: Submission) -> None:
    del s.rows[0].digests["o"]


def predicted(s: Submission) -> None:
    s.rows[0].provenance = "predicted"


def nothing_measured(s: Submission) -> None:
    for row in s.rows:
        row.status, row.reason, row.verdict = "unsupported", "no", ""
        row.metrics, row.digests = {}, {}


def mail_in_config(s: Submission) -> None:
    s.config.text = "# ask someone@example.org\n" + s.config.text


def windows_path(s: Submission) -> None:
    s.rows[0].launch["library"] = "C:\\Users\\someone\\lib.dll"


def process(s: Submission) -> None:
    s.rows[0].reason = "Process 31337 has 9 GiB"


def set_hash(s: Submission) -> None:
    s.config.sha256 = "0" * 64


def set_text(s: Submission) -> None:
    s.config.text = s.config.text.replace("name: tiny", "name: other")


def set_slug(s: Submission) -> None:
    s.machine.slug = "nvidia-h200"


def drop_facts(s: Submission) -> None:
    s.machine.backends["gpu"] = s.machine.backends.pop("cpu")


def set_time(s: Submission) -> None:
    s.rows[0].wall_s = -1


def fail_without_reason(s: Submission) -> None:
    s.rows[0].status = "error"
    s.rows[0].metrics, s.rows[0].digests, s.rows[0].verdict = {}, {}, ""


def fail_with_results(s: Submission) -> None:
    s.rows[0].status, s.rows[0].reason = "error", "MemoryError"


def home_path(s: Submission) -> None:
    s.rows[0].launch["library"] = "/home/someone/lib.so"


def mail(s: Submission) -> None:
    s.volatile["note"] = "someone@example.org"


def address(s: Submission) -> None:
    s.machine.os["node"] = "192.168.1.20"


def user(s: Submission) -> None:
    s.volatile["user"] = "someone"


def old_case(s: Submission) -> None:
    s.rows[0].case_version = 99


def new_kernel(s: Submission) -> None:
    s.rows[0].kernel_version = 2


def new_kernel_offered(s: Submission) -> None:
    """A file that is consistent, and of a suite that does not exist."""
    kernel = s.rows[0].kernel
    for item in (*s.offered, *s.rows):
        item.kernel_version = 2 if item.kernel == kernel else 1


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (set_verdict, "verdict 'out_of_range', but its metrics give 'pass'"),
        (set_metric, "verdict 'out_of_range', but its metrics give 'pass'"),
        (drop_metric, "metrics: 'row_max_limit' is missing"),
        (huge_metric, "beyond any measurement"),
        (set_digest, "digests.inputs: not the inputs"),
        (drop_row, "1 of 9 planned rows are missing"),
        (repeat_row, "1 rows appear twice"),
        (foreign_row, "1 rows are not in the plan"),
        (set_seeds, "1 rows are not in the plan"),
        (wrong_z, "but mean and sem give"),
        (drop_digest, "digests: 'o' is missing"),
        (predicted, "provenance 'predicted' on a real device"),
        (nothing_measured, "no row was measured"),
        (mail_in_config, "config.text: holds an e-mail address"),
        (windows_path, "holds a path"),
        (process, "holds a process"),
        (set_hash, "config.sha256: does not match"),
        (set_text, "config.name: 'tiny', but the text says 'other'"),
        (set_slug, "machine.slug: 'nvidia-h200', but"),
        (drop_facts, "backend 'cpu' has no facts"),
        (set_time, "wall_s"),
        (fail_without_reason, "without a reason"),
        (fail_with_results, "status 'error' with results"),
        (home_path, "holds a path"),
        (mail, "holds an e-mail address"),
        (address, "holds an IP address"),
        (user, "a personal field"),
        (old_case, "case_version 99"),
        (new_kernel, "kernel_version 2; this suite has 1: update the checkout"),
        (new_kernel, "1 rows are not in the plan"),
        (new_kernel_offered, "kernel_version 2; this suite has 1: update the checkout"),
    ],
)
def test_tampering_is_found(good: Path, edit: Callable[[Submission], None], expected: str) -> None:
    problems = edited(good, edit)
    assert any(expected in problem for problem in problems), problems


def test_versions_of_four_parts_are_no_addresses(good: Path) -> None:
    def versions(s: Submission) -> None:
        s.machine.backends["cpu"] |= {"driver": "24.1.0.3", "cudnn": "9.10.2.21"}
        s.rows[0].launch["library"] = "flash-attn 2.7.4.1"

    assert edited(good, versions) == []


def test_a_foreign_row_is_not_made_again(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> str:
        raise AssertionError("its inputs were made")

    monkeypatch.setattr(load_case("determinism/run_to_run"), "inputs_digest", never)

    def enormous(s: Submission) -> None:
        row = s.rows[0].model_copy(deep=True)
        row.case, row.seeds = "determinism/run_to_run", 1024
        row.params = {"batch": 64, "heads": 64, "kv_heads": 64, "tokens": 8192, "head_dim": 256}
        s.rows.append(row)

    assert any("not in the plan" in problem for problem in edited(good, enormous))


def test_a_stale_file_is_kept_but_not_taken_as_new(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(load_case("bias/shift_range")), "version", 2)
    assert validate_file(good) == []
    assert "stale: bias/shift_range version 1, today 2: measure again" in validate_file(good, fresh=True)
    # What does not depend on the older code is still checked.
    assert any("config.sha256" in problem for problem in edited(good, set_hash))


def raise_version(monkeypatch: pytest.MonkeyPatch, implementation: str) -> None:
    raised = replace(IMPLEMENTATIONS[implementation], version=2)
    monkeypatch.setitem(IMPLEMENTATIONS, implementation, raised)


def test_a_kernel_with_other_bits_makes_its_older_rows_stale(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = read_submission(good)[0].rows
    raise_version(monkeypatch, "sdpa-math")
    assert validate_file(good) == []
    assert validate_file(good, fresh=True) == ["stale: sdpa-math/stock version 1, today 2: measure again"]
    assert {row.kernel for row in rows if is_stale(row)} == {"sdpa-math/stock"}


def test_old_rows_do_not_pass_for_those_of_a_new_kernel(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_version(monkeypatch, "sdpa-math")

    def relabel(s: Submission) -> None:
        for row in s.rows:
            row.kernel_version = 2 if row.kernel == "sdpa-math/stock" else 1

    assert "1 rows are not in the plan" in edited(good, relabel)


def test_a_case_that_is_gone_makes_a_row_stale(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.check.stale.CASES", {})
    assert any("no longer here" in problem for problem in validate_file(good, fresh=True))


def test_all_problems_are_reported_at_once(good: Path) -> None:
    def everything(s: Submission) -> None:
        for edit in (set_verdict, set_hash, mail, repeat_row):
            edit(s)

    assert len(edited(good, everything)) >= 4


def test_reformatted_text_is_not_canonical(good: Path) -> None:
    good.write_text(good.read_text().replace('"seeds": 1', '"seeds":1'))
    assert validate_file(good) == ["not in canonical form (was it edited by hand?)"]


def test_place_must_fit(good: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "other-machine" / "renamed.json"
    elsewhere.parent.mkdir()
    shutil.copy(good, elsewhere)
    problems = validate_file(elsewhere)
    assert len(problems) == 2
    assert "stands in folder 'other-machine'" in problems[0]
    assert "expected 'tiny.json'" in problems[1]


def test_a_second_file_of_the_same_machine_has_a_number(good: Path) -> None:
    for name, fine in (("tiny+2.json", True), ("tiny+1.json", False), ("tiny+x.json", False)):
        shutil.copy(good, good.parent / name)
        assert (validate_file(good.parent / name, inputs=False) == []) == fine


def test_a_folder_is_validated_file_by_file(good: Path, tmp_path: Path) -> None:
    (good.parent / "broken.json").write_text("{")
    found = validate_path(tmp_path / "results")
    assert found[str(good)] == []
    assert "not JSON" in found[str(good.parent / "broken.json")][0]


# ---- inputs that only the measuring machine has -----------------------------------------------

EXTERNAL = """\
version: 1
name: external
backends: [cpu]
kernels: [sdpa-math/stock]
seeds: 1
cases:
  - case: crash/gpt2
    params: {data: text.bin, steps: 2, layers: 1, width: 16, context: 16, dtype: float32}
"""


@pytest.fixture
def external(run_tiny: RunIt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on a token file that is gone afterwards, as for everybody who reads the result."""
    monkeypatch.setenv("ATTNREPRO_DATA", str(tmp_path))
    (tmp_path / "text.bin").write_bytes(b"".join(bytes([i % 60, 0]) for i in range(200)))
    config = tmp_path / "external.yaml"
    config.write_text(EXTERNAL)
    path = run_tiny(config=config).path
    (tmp_path / "text.bin").unlink()
    return path


def test_an_external_file_is_taken_by_its_sha256_and_that_is_said(external: Path, good: Path) -> None:
    assert validate_file(external) == []
    (note,) = taken_on_trust(external)
    assert "made from data 'text.bin', not part of the suite" in note
    assert taken_on_trust(good) == []


def set_data(s: Submission) -> None:
    s.rows[0].digests["data"] = "0" * 64


def set_seed_of_inputs(s: Submission) -> None:
    s.rows[0].digests["inputs"] = "0" * 64


@pytest.mark.parametrize("edit", [set_data, set_seed_of_inputs])
def test_with_an_external_file_the_rest_is_still_recomputed(
    external: Path, edit: Callable[[Submission], None]
) -> None:
    assert any("digests.inputs" in problem for problem in edited(external, edit))
