"""The command line as a user meets it: exit codes, streams, messages."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.files.store import read_submission
from bench.run.plan import Request
from conftest import TINY
from runner import resume_command

ROOT = Path(__file__).resolve().parent.parent


def runner(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "runner.py", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        encoding=environment.get("PYTHONIOENCODING", "utf-8"),
        timeout=120,
    )


def test_run_report_validate_compare(tiny_config: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    done = runner("run", tiny_config, "--results", results)
    assert done.returncode == 0, done.stderr
    (path,) = results.rglob("tiny.json")
    assert f"result file: {path}" in done.stdout
    assert done.stdout.splitlines()[-1] == f"next: python runner.py validate {path}"
    assert "9/9" in done.stderr, "progress goes to stderr"
    assert runner("validate", path).stdout == f"{path}: ok\n"
    assert "Summary" in runner("report", results).stdout
    output = tmp_path / "out" / "REPORT.md"
    assert runner("report", results, "--format", "markdown", "-o", output).returncode == 0
    assert output.read_text().startswith("# Results")
    assert "Facts: the same" in runner("compare", path, path).stdout


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"HOME": "/proc/none"},
    ],
    ids=lambda environment: "-".join(environment.values()),
)
def test_a_poor_terminal_ends_no_run(tiny_config: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    done = runner("run", tiny_config, "--results", tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert "* Largest row maximum with a right result: eager-fused/stabilized (" in done.stdout
    assert "Traceback" not in done.stderr


def test_from_another_folder_with_spaces_in_its_name(tmp_path: Path) -> None:
    """Configs are the suite's, results the working directory's, and a printed command can be copied."""
    folder = tmp_path / "a b"
    folder.mkdir()
    listed = runner("list", cwd=folder).stdout
    assert str(ROOT / "configs" / "quick.yaml") in listed
    done = runner("run", "configs/gpt2-tiny.yaml", "--dry-run", cwd=folder)
    assert "crash/gpt2" in done.stdout, done.stderr
    assert "→ results/" in done.stderr
    (folder / "t.yaml").write_text(TINY)
    done = runner("run", "t.yaml", "--results", folder / "r s", cwd=folder)
    command = done.stdout.splitlines()[-1].removeprefix("next: python ")
    (path,) = folder.rglob("tiny.json")
    assert command == f"{shlex.quote(str(ROOT / 'runner.py'))} validate {shlex.quote(str(path))}"
    done = runner("run", "configs/bias.yaml", "--contribute", cwd=folder)
    assert done.returncode == 2
    assert "leave out --results" not in done.stderr


def test_json_is_one_document_on_stdout(tiny_config: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    ran = json.loads(runner("run", tiny_config, "--results", results, "--json").stdout)
    assert len(ran["rows"]) == 9
    planned = json.loads(runner("run", tiny_config, "--results", results, "--dry-run", "--json").stdout)
    assert len(planned["units"]) == 9
    listed = json.loads(runner("list", "--json").stdout)
    assert {c["name"] for c in listed["cases"]} >= {"bias/tie_break", "bias/leak"}
    assert json.loads(runner("validate", ran["path"], "--json").stdout) == {ran["path"]: []}
    assert len(json.loads(runner("report", results, "--json").stdout)["rows"]) == 9
    assert json.loads(runner("compare", ran["path"], ran["path"], "--json").stdout)["equal"] == 9


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["runn"]])
def test_help_and_a_mistyped_command_load_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['runner.py', *{arguments}]\n"
        "import runner\n"
        "try:\n    runner.main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'jinja2', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_dry_run_prints_the_plan_and_writes_nothing(tiny_config: Path, tmp_path: Path) -> None:
    done = runner("run", tiny_config, "--results", tmp_path / "results", "--dry-run")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 9
    assert "bias/shift_range  eager-fused/stabilized  bfloat16" in done.stdout
    assert not (tmp_path / "results").exists()


def test_list_shows_everything() -> None:
    text = runner("list").stdout
    for name in ("cpu", "eager-stored/stabilized", "bias/low_rank", "configs/quick.yaml"):
        assert name in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "none.yaml"], "none.yaml: no such file"),
        (["run", "configs/quik.yaml"], "did you mean 'configs/quick.yaml'?"),
        (["run", "configs"], "not a file"),
        (["run", "configs/quick.yaml", "--kernel", "eager-fused/stok"], "did you mean 'eager-fused/stock'?"),
        (["run", "configs/quick.yaml", "--results", "README.md"], "not a directory"),
        (["run", "configs/quick.yaml", "--results", "/proc/none"], "cannot write"),
        (["runn"], "No such command 'runn'"),
        (["run"], "Missing argument"),
        (["run", "configs/quick.yaml", "--fast"], "No such option: --fast"),
        (["validate", "none"], "none: no such file or directory"),
        (["validate", "configs"], "no result files"),
        (["report", "none"], "none: no such file or directory"),
        (["report", "configs"], "no readable result files"),
        (["report", "results", "--format", "pdf"], "allowed: text, markdown, paper, csv, json"),
        (["compare", "README.md", "README.md"], "README.md: not JSON"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments: list[str], expected: str) -> None:
    done = runner(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert expected in line
    assert "Traceback" not in done.stderr


def test_a_failing_unit_gives_exit_code_1(tiny_config: Path, tmp_path: Path) -> None:
    tiny_config.write_text(TINY + "    options: {mantissa_bits: 20}\n")  # more than BF16 has
    done = runner("run", tiny_config, "--results", tmp_path)
    assert done.returncode == 1
    assert "mantissa_bits: 20 does not fit torch.bfloat16 (1 to 7)" in done.stderr


def test_an_invalid_file_gives_exit_code_1(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    done = runner("validate", bad)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{bad}: 1 problems\n  not JSON")


def test_the_command_to_resume_asks_for_the_same_again() -> None:
    asked = Request(Path("my configs/a.yaml"), Path("r s"), kernel="eager-*", only=["values=a b"], jobs=2)
    line = resume_command(asked, contribute=True)
    assert line == (
        "python runner.py run 'my configs/a.yaml' --results 'r s' --jobs 2 --kernel 'eager-*' "
        "--only 'values=a b' --contribute"
    )
    assert "--contribute" not in resume_command(asked, contribute=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_good_file_and_says_how_to_resume(tmp_path: Path, number: int) -> None:
    config = tmp_path / "slow.yaml"
    config.write_text(
        "version: 1\nname: slow\nseeds: 16\ncases:\n  - case: bias/tie_break\n"
        "    params: {repeats: [1, 2, 3], gap: [6, 7, 8, 9, 10, 11, 12]}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "runner.py", "run", str(config), "--results", str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob("slow.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 130, messages
    assert f"resume with: python runner.py run {config} --results {tmp_path}" in messages
    (path,) = tmp_path.rglob("slow.json")
    assert len(read_submission(path)[0].rows) < 378
    assert "Traceback" not in messages
