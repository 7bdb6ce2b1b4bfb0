"""`crash/gpt2` through the command line, as one process and as two of a torchrun (gloo)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.check.validate import validate_file
from bench.errors import UsageError
from bench.files.records import Row
from bench.files.store import read_submission
from bench.run.engine import execute, prepare
from bench.run.plan import Request
from cases.processes import World
from conftest import Quiet

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """\
version: 1
name: small
backends: [cpu]
kernels: [sdpa-flash/stock]
seeds: 1
cases:
  - case: crash/gpt2
    params: {steps: 100, width: 32, context: 32, warmup: 20, decay_steps: 100, checkpoint_every: 2, dtype: float32}
"""
# Frequent checkpoints: a run must not end before it is cut.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
Command = Callable[..., list[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    (path / "small.yaml").write_text(CONFIG)
    return path


def command(folder: Path, results: str, processes: int, config: str = "small.yaml") -> list[str]:
    launcher = [*TORCHRUN, str(processes)] if processes > 1 else []
    arguments = ["run", str(folder / config), "--results", str(folder / results)]
    return [sys.executable, *launcher, "runner.py", *arguments]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        arguments, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def row(folder: Path, results: str) -> Row:
    (path,) = (folder / results).rglob("*.json")
    assert validate_file(path) == []
    (found,) = read_submission(path)[0].rows
    return found


def wait_for_a_checkpoint(results: Path) -> None:
    deadline = time.monotonic() + 60
    while not list(results.rglob("checkpoint.previous.pt")) and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[int, tuple[Row, str, str]]:
    """An uncut run as 1 and as 2 processes: row, stdout, stderr."""
    found = {}
    for processes in (1, 2):
        code, out, err = finish(start(command(folder, f"whole{processes}", processes)))
        assert code == 0, err
        found[processes] = row(folder, f"whole{processes}"), out, err
    return found


def test_one_and_two_processes_see_the_same_tokens(whole: dict[int, tuple[Row, str, str]]) -> None:
    one, two = whole[1][0], whole[2][0]
    for name in ("inputs", "data", "weights", "sequence", "batches"):
        assert one.digests[name] == two.digests[name]
    # The first step's losses are those of the same micro-batches: the same bits. From the first update
    # on, gradients are added in another order.
    assert one.series["loss"][0] == two.series["loss"][0]
    assert two.series["loss"] == pytest.approx(one.series["loss"], abs=2e-5)
    assert two.series["loss"][-1] < one.series["loss"][0] - 1
    assert (one.launch["processes"], two.launch["processes"]) == (1, 2)


def test_only_rank_0_speaks_and_writes(folder: Path, whole: dict[int, tuple[Row, str, str]]) -> None:
    _, out, err = whole[2]
    assert out.count("result file:") == 1
    assert err.count("1/1 crash/gpt2") == 1
    assert err.count("step 0/100") == 1
    assert len(list((folder / "whole2").rglob("*.json"))) == 1


def test_sigterm_ends_in_order_and_the_run_goes_on_to_the_same_bits(
    folder: Path, whole: dict[int, tuple[Row, str, str]]
) -> None:
    process = start(command(folder, "cut1", 1))
    wait_for_a_checkpoint(folder / "cut1")
    process.terminate()
    code, _, err = finish(process)
    assert code == 130, err
    assert "checkpoint at step" in err
    assert f"resume with: python runner.py run {folder}/small.yaml" in err
    code, _, err = finish(start(command(folder, "cut1", 1)))
    assert code == 0, err
    assert "resumed at step" in err
    resumed = row(folder, "cut1")
    assert resumed.digests == whole[1][0].digests
    assert resumed.metrics == whole[1][0].metrics


def test_two_processes_cut_and_resumed_have_the_bits_of_uncut_ones(
    folder: Path, whole: dict[int, tuple[Row, str, str]]
) -> None:
    process = start(command(folder, "cut2", 2))
    wait_for_a_checkpoint(folder / "cut2")
    process.terminate()
    _, _, err = finish(process)
    assert "resume with: torchrun --nproc-per-node 2 runner.py run" in err
    # One process may not go on with it: it would add gradients in another order.
    (work,) = (folder / "cut2").rglob(".small.work")
    request = Request(folder / "small.yaml", folder / "cut2")
    with pytest.raises(UsageError, match="world_size is 2 there, 1 here"):
        execute(prepare(request), request, Quiet())
    code, _, err = finish(start(command(folder, "cut2", 2)))
    assert code == 0, err
    assert "resumed at step" in err
    assert row(folder, "cut2").digests == whole[2][0].digests
    assert [p.name.endswith(".done") for p in work.iterdir()] == [True]


def test_what_several_processes_cannot_do_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cases.processes.world", lambda: World(0, 3))
    monkeypatch.setattr("cases.crash.gpt2.case.world", lambda: World(0, 3))
    expected = "8 sequences a step do not divide among 3 processes in micro-batches of 4"
    with pytest.raises(UsageError, match=expected):
        prepare(Request(folder / "small.yaml", folder / "three"))
    with pytest.raises(UsageError, match="bias/tie_break runs in one process; start it without torchrun"):
        prepare(Request(ROOT / "configs/quick.yaml", folder / "three"))


def test_a_missing_token_file_is_found_before_anything_runs(folder: Path) -> None:
    (folder / "missing.yaml").write_text(CONFIG.replace("{steps", "{data: none/train.bin, steps"))
    with pytest.raises(UsageError, match=r"no such file; prepare it \(docs/gpt2\.md, Data\)"):
        prepare(Request(folder / "missing.yaml", folder / "missing"))


def test_force_begins_anew_and_keeps_the_last_finished_run(folder: Path) -> None:
    config = folder / "short.yaml"
    config.write_text(CONFIG.replace("steps: 100", "steps: 20").replace("name: small", "name: short"))
    found = []
    for force in (False, True):
        request = Request(config, folder / "short", force=force)
        planned = prepare(request)
        execute(planned, request, watcher := Listening())
        assert not any("resumed" in text for text in watcher.said_so_far)
        (unit,) = planned.units
        done = planned.work_folder(unit)
        assert not done.exists()
        assert (done.with_name(done.name + ".done") / "checkpoint.pt").exists()
        found.append(planned.rows[unit.key])
    assert found[0].digests == found[1].digests


class Listening(Quiet):
    """A watcher that keeps what a long unit said."""

    def __init__(self) -> None:
        super().__init__()
        self.said_so_far: list[str] = []

    def said(self, text: str) -> None:
        self.said_so_far.append(text)


@pytest.mark.parametrize(("processes", "printed"), [(1, "said\nat exit\n"), (2, "said\n")])
def test_a_process_of_several_ends_without_taking_the_interpreter_down(processes: int, printed: str) -> None:
    """DDP's threads outlive its group; at finalisation they now and then aborted a finished run."""
    program = (
        "import atexit; from bench.run.distributed import end; "
        "atexit.register(print, 'at exit'); print('said'); end(3)"
    )
    world = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": str(processes)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **world}, text=True, capture_output=True
    )
    assert (done.returncode, done.stdout) == (3, printed), done.stderr
