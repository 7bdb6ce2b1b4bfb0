"""Two files: facts, bits (and from which stage on), biases side by side."""

from __future__ import annotations

from bench.compare.submissions import compare, comparison_text
from bench.files.store import read_submission
from conftest import RunIt


def test_a_file_equals_itself(run_tiny: RunIt) -> None:
    submission, _ = read_submission(run_tiny().path)
    result = compare(submission, submission)
    assert (result.facts, result.different, result.biases) == ([], [], [])
    assert result.equal == len(submission.rows)
    assert "Bits: 9 of 9 common rows agree" in comparison_text(result, "a", "b")


def test_differences_are_found_and_placed(run_tiny: RunIt) -> None:
    path = run_tiny().path
    a, b = read_submission(path)[0], read_submission(path)[0]
    b.machine.versions["torch"] = "9.9"
    b.rows[0].digests["lse"] = "0" * 64
    b.rows[1].digests |= {"o": "0" * 64, "lse": "0" * 64}
    b.rows[1].metrics["row_max_limit"] = 3.0
    b.rows[2].status, b.rows[2].reason = "unsupported", "no"
    b.rows[2].digests, b.rows[2].metrics = {}, {}
    del b.rows[8]
    result = compare(a, b)
    assert result.facts == [("machine.versions.torch", a.machine.versions["torch"], "9.9")]
    assert [d["first_difference"] for d in result.different] == [
        "lse",
        "o",
        "status: ok / unsupported",
    ]
    assert (result.only_a, result.only_b, result.equal) == (1, 0, 5)
    assert result.biases[0]["b"] == "3 out_of_range"
    text = comparison_text(result, "a.json", "b.json")
    assert "only in A 1, only in B 0" in text
    assert "first differing stage" in text


def test_training_runs_part_at_their_losses(run_tiny: RunIt) -> None:
    path = run_tiny().path
    a, b = read_submission(path)[0], read_submission(path)[0]
    for submission, loss in ((a, "1"), (b, "2")):
        submission.rows = submission.rows[:2]
        for row in submission.rows:
            row.digests = {"inputs": "0" * 64, "weights": "0" * 64, "loss": "0" * 64}
        submission.rows[1].digests["loss"] = loss * 64
    result = compare(a, b)
    assert result.equal == 1
    assert [d["first_difference"] for d in result.different] == ["loss"]


def test_z_is_in_combined_standard_errors(run_tiny: RunIt) -> None:
    path = run_tiny().path
    a, b = read_submission(path)[0], read_submission(path)[0]
    for submission, mean in ((a, 0.10), (b, 0.15)):
        row = submission.rows[0]
        row.case, row.verdict = "bias/tie_break", "biased"
        row.metrics = {
            "aligned_ulp_mean": mean,
            "aligned_ulp_sem": 0.003 if mean == 0.10 else 0.004,
        }
    (bias,) = compare(a, b).biases
    assert abs(bias["z"] - 10.0) < 1e-9


def test_rows_of_two_backends_do_not_hide_each_other(run_tiny: RunIt) -> None:
    path = run_tiny().path
    a, b = read_submission(path)[0], read_submission(path)[0]
    twins = [row.model_copy(update={"backend": "cuda"}) for row in b.rows]
    b.rows += twins
    result = compare(a, b)
    assert (result.equal, result.only_a, result.only_b) == (len(a.rows), 0, len(twins))


def test_a_cpu_is_compared_with_a_gpu(run_tiny: RunIt) -> None:
    path = run_tiny().path
    a, b = read_submission(path)[0], read_submission(path)[0]
    b.rows = [row.model_copy(update={"backend": "cuda"}) for row in b.rows]
    b.rows[0].digests = b.rows[0].digests | {"o": "0" * 64}
    result = compare(a, b)
    assert result.equal == len(a.rows) - 1
    assert result.different[0]["row"].startswith("bias/shift_range · eager-fused/stock @cpu/cuda")
