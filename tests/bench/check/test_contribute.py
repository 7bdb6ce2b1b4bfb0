"""A pull request: what may be sent, the commands, and the check of a request's changed files."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from bench import RESULTS
from bench.check import contribute
from bench.check.contribute import check_contribution, contribution
from bench.errors import UsageError
from bench.files import source
from bench.files.records import submission_text
from bench.files.store import read_submission
from bench.run.plan import Request
from conftest import RunIt

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = ROOT / ".github" / "workflows"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, run_tiny: RunIt, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own with one committed result."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    path = run_tiny().path
    (tmp_path / ".gitignore").write_text("results/*/quick.json\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "base")
    for module in (contribute, source):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return path


def test_without_a_clone_or_git_one_line_says_what_is_missing(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        with pytest.raises(UsageError, match="--contribute: git is not installed"):
            check_contribution(request(checkout))
    (tmp_path / "unpacked" / "results").mkdir(parents=True)  # inside the repository, and no part of it
    for module in (contribute, source):
        monkeypatch.setattr(module, "ROOT", tmp_path / "unpacked")
    with pytest.raises(UsageError, match="this is no git checkout; it needs a clone of the repository"):
        check_contribution(Request(Path("x.yaml"), tmp_path / "unpacked" / "results"))


def test_from_another_folder_it_says_where_to_go(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "a b"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(UsageError) as caught:
        check_contribution(Request(ROOT / "configs" / "bias.yaml", RESULTS))
    assert str(caught.value) == (f"--contribute: results must be in results/ of this checkout; cd {tmp_path}")
    assert f"In the checkout: cd {tmp_path}" in contribution(checkout)


def request(checkout: Path, **fields: object) -> Request:
    config = Path(str(fields.pop("config", ROOT / "configs/bias.yaml")))
    return Request(config, checkout.parents[1], **fields)  # type: ignore[arg-type]


def test_only_a_whole_collected_config_in_the_checkout_is_sent(checkout: Path, tmp_path: Path) -> None:
    check_contribution(request(checkout))
    for fields, expected in (
        ({"kernel": "a"}, "leave out --kernel"),
        ({"unit": "a"}, "leave out --unit"),
        ({"only": ["gap=12"]}, "leave out --only"),
        ({"config": ROOT / "configs/quick.yaml"}, "'quick' is a first look"),
    ):
        with pytest.raises(UsageError, match=expected):
            check_contribution(request(checkout, **fields))
    with pytest.raises(UsageError, match="leave out --results"):
        check_contribution(Request(Path("x.yaml"), tmp_path / "elsewhere"))


def test_the_name_in_the_config_counts_not_its_file_s(checkout: Path, tmp_path: Path) -> None:
    """A result file is named after `name`, and that is what git ignores or not."""
    text = (ROOT / "configs" / "quick.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UsageError, match="'quick' is a first look"):
        check_contribution(request(checkout, config=tmp_path / "mine.yaml"))
    (tmp_path / "quick.yaml").write_text(text.replace("name: quick", "name: mine"))
    check_contribution(request(checkout, config=tmp_path / "quick.yaml"))


def test_the_commands_commit_exactly_the_file(checkout: Path, tmp_path: Path) -> None:
    checkout.write_text(checkout.read_text())
    lines = contribution(checkout)
    add = next(line for line in lines if "git add" in line)
    relative = checkout.relative_to(tmp_path)
    assert f"git add {relative} && git commit -m 'Results: {checkout.parent.name}, tiny'" in add
    assert lines[-1] == "  git push -u origin HEAD && gh pr create --fill"


def test_a_second_machine_of_the_same_model_gets_a_file_beside(checkout: Path) -> None:
    submission, _ = read_submission(checkout)
    submission.machine.versions["torch"] = "2.99"
    checkout.write_text(submission_text(submission))
    lines = contribution(checkout)
    assert any(line.startswith("  mv ") and "tiny+2.json" in line for line in lines)
    assert any("git add" in line and "tiny+2.json" in line for line in lines)
    shutil.copy(checkout, checkout.with_name("tiny+2.json"))  # sent once; measured again:
    assert any("git add" in line and "tiny+2.json" in line for line in contribution(checkout))


def test_an_unfit_file_is_not_sent(checkout: Path) -> None:
    submission, _ = read_submission(checkout)
    submission.rows[0].verdict = "leaks"
    checkout.write_text(submission_text(submission))
    lines = contribution(checkout)
    assert lines[0].startswith("not fit to be sent")
    assert not any("git" in line for line in lines)


@pytest.fixture
def checker():
    location = ROOT / ".github" / "validate_changes.py"
    spec = importlib.util.spec_from_file_location("validate_changes", location)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_changed_files_of_a_request_are_judged(
    checkout: Path, tmp_path: Path, checker, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = git(tmp_path, "rev-parse", "HEAD")
    bad = checkout.parent / "::error::`x|y`.json"
    bad.write_text('{"a": "::set-env name=X::1"}')
    (checkout.parent / "link.json").symlink_to("/etc/passwd")
    shutil.copy(checkout, checkout.parent / "tiny+2.json")
    (tmp_path / "results" / "evil.py").write_text("raise SystemExit(99)")
    (tmp_path / "runner.py").write_text("raise SystemExit(99)")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "change")
    target = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(target))
    assert checker.main(tmp_path, base) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("::stop-commands::")
    assert "tiny+2.json: valid" in printed
    assert "not a regular file" in printed
    assert "is no result file" in printed
    assert "runner.py" not in printed
    table = target.read_text()
    assert len(table.splitlines()) == 2 + 4
    assert all(line.count("|") == 3 for line in table.splitlines())


def test_a_request_with_good_files_passes(checkout: Path, tmp_path: Path, checker) -> None:
    base = git(tmp_path, "rev-parse", "HEAD")
    shutil.copy(checkout, checkout.parent / "tiny+2.json")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "change")
    assert checker.main(tmp_path, base) == 0
    git(tmp_path, "rm", "-q", str(checkout))
    git(tmp_path, "commit", "-qm", "remove")
    assert checker.main(tmp_path, base) == 1


def test_the_workflow_of_requests_can_only_read() -> None:
    flow = yaml.safe_load((WORKFLOWS / "results.yml").read_text())
    assert set(flow[True]) == {"pull_request"}  # YAML reads `on` as a boolean
    assert flow["permissions"] == {"contents": "read"}
    text = (WORKFLOWS / "results.yml").read_text()
    assert "secrets." not in text
    assert "pull_request_target" not in text
    steps = flow["jobs"]["validate"]["steps"]
    assert all(
        step["with"]["persist-credentials"] is False for step in steps if "checkout" in step.get("uses", "")
    )
    # What runs is the base branch's code; the request is a folder of data.
    assert all("request/" not in step.get("run", "") for step in steps)
    assert all("github.event" not in step.get("run", "") for step in steps)


def test_only_the_job_that_deploys_the_page_may_write() -> None:
    flow = yaml.safe_load((WORKFLOWS / "page.yml").read_text())
    assert flow["permissions"] == {"contents": "read"}
    assert "configs/**" in flow[True]["push"]["paths"]
    writes = [name for name, job in flow["jobs"].items() if "write" in job.get("permissions", {}).values()]
    assert writes == ["deploy"]
    steps = flow["jobs"]["deploy"]["steps"]
    assert [step["uses"].partition("@")[0] for step in steps] == ["actions/deploy-pages"]
    assert not [step for step in steps if "run" in step], "it runs nothing of the repository"


def test_code_is_linted_and_tested_on_every_python_it_claims() -> None:
    flow = yaml.safe_load((WORKFLOWS / "code.yml").read_text())
    assert flow["permissions"] == {"contents": "read"}
    (job,) = flow["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert {"make lint", "make test"} <= {step.get("run") for step in job["steps"]}


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda p: p.name)
def test_actions_are_pinned_to_commits(path: Path) -> None:
    flow = yaml.safe_load(path.read_text())
    used = [step["uses"] for job in flow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used
    assert all(len(action.partition("@")[2]) == 40 for action in used)


def test_the_file_that_contributing_explains_is_as_it_says() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (name,) = set(re.findall(r"\((results/[^)]+\.json)\)", text))
    submission, _ = read_submission(ROOT / name)
    assert f"| `rows` | {len(submission.rows)} |" in text
    assert f'"written": "{submission.volatile["written"]}"' in text
    assert f"{len(submission.offered)} kernels with dtypes" in text
    row = next(
        r
        for r in submission.rows
        if r.case == "bias/leak"
        and r.kernel == "sdpa-flash/stock"
        and r.params["repeats"] == 2
        and r.params["gap"] == 12.0
    )
    assert f'"leak_mean": {row.metrics["leak_mean"]!r}' in text
    assert f'"inputs": "{row.digests["inputs"][:8]}…"' in text
    assert f"`{row.wall_s}`" in text
    fields = set(type(row).model_fields) | set(type(submission).model_fields) - {"machine"}
    assert all(f"`{field}`" in text for field in fields)
