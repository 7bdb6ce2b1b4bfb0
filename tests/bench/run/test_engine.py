"""A run is written after every unit, resumes where it stopped, and loses nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.base import Unsupported
from bench.errors import UsageError
from bench.files.records import Row
from bench.files.store import read_submission
from bench.run import engine
from bench.run.engine import execute, prepare
from bench.run.plan import PlannedRun, Request, Unit
from bench.run.registry import load_backend
from bench.run.side_by_side import may_share
from bench.run.unit import run_unit, thin
from cases import load_case
from cases.base import Measurement
from conftest import TINY, Quiet, RunIt

UNITS = 9


def comparable(path: Path) -> list[dict[str, object]]:
    """Rows of a file without their running times."""
    return [row.model_dump(exclude={"wall_s"}) for row in read_submission(path)[0].rows]


def test_a_run_writes_every_planned_row_in_plan_order(run_tiny: RunIt) -> None:
    run = run_tiny()
    submission, text = read_submission(run.path)
    assert [row.key for row in submission.rows] == [unit.key for unit in run.plan]
    assert len(submission.rows) == UNITS
    assert text.endswith("}\n")
    assert submission.config.text == TINY
    assert sorted(os.listdir(run.path.parent)) == ["tiny.json"], "no temporary files are left"


def test_a_second_run_measures_nothing_and_force_measures_again(run_tiny: RunIt) -> None:
    run_tiny()
    again, forced = Quiet(), Quiet()
    run_tiny(again)
    assert again.count == 0
    run_tiny(forced, force=True, kernel="*/stock")
    assert forced.count == 2


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stop_at=st.integers(0, UNITS - 1))
def test_a_run_stopped_at_any_unit_and_resumed_gives_the_same_rows(
    run_tiny: RunIt, tmp_path: Path, stop_at: int
) -> None:
    whole = comparable(run_tiny(force=True).path)
    (path,) = tmp_path.rglob("tiny.json")
    path.unlink()
    with pytest.raises(KeyboardInterrupt):
        run_tiny(Quiet(stop_at))
    assert len(read_submission(path)[0].rows) == stop_at, "what was done is in the file"
    rest = Quiet()
    run_tiny(rest)
    assert rest.count == UNITS - stop_at
    assert comparable(path) == whole


def test_kill_9_loses_at_most_the_running_unit(tiny_config: Path, tmp_path: Path, run_tiny: RunIt) -> None:
    results = tmp_path / "results"
    code = f"""
import os, signal
from pathlib import Path
from bench.run.plan import Request
from bench.run.engine import execute, prepare
from conftest import Quiet
class Killer(Quiet):
    def started(self, unit):
        super().started(unit)
        if self.count == 5:
            os.kill(os.getpid(), signal.SIGKILL)
request = Request(Path({str(tiny_config)!r}), Path({str(results)!r}))
execute(prepare(request), request, Killer())
"""
    root = Path(__file__).resolve().parents[3]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root)
    assert done.returncode == -signal.SIGKILL
    (path,) = results.rglob("tiny.json")
    assert len(read_submission(path)[0].rows) == 4
    rest = Quiet()
    run_tiny(rest)
    assert rest.count == UNITS - 4


def test_an_interrupted_force_keeps_the_earlier_rows(run_tiny: RunIt) -> None:
    path = run_tiny().path
    with pytest.raises(KeyboardInterrupt):
        run_tiny(Quiet(3), force=True)
    assert len(read_submission(path)[0].rows) == UNITS


def test_a_config_that_names_somebody_is_refused(tiny_config: Path, tmp_path: Path) -> None:
    tiny_config.write_text("# mine: /home/someone/configs\n" + TINY)
    with pytest.raises(UsageError, match="holds a path; it would be copied into the result file"):
        prepare(Request(tiny_config, tmp_path))


def test_units_side_by_side_give_the_file_of_a_serial_run(run_tiny: RunIt) -> None:
    first = run_tiny().path
    serial = comparable(first)
    assert "cpu_peak_mib" in read_submission(first)[0].volatile
    counted = Quiet()
    run = run_tiny(counted, force=True, jobs=2)
    assert counted.count == UNITS
    assert comparable(run.path) == serial
    assert "cpu_peak_mib" not in read_submission(run.path)[0].volatile, "that of the workers"
    assert [row["case"] for row in serial] == ["bias/shift_range"] * UNITS


def test_an_interrupted_run_of_several_jobs_keeps_what_was_measured(run_tiny: RunIt) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_tiny(Quiet(stop_at=2), jobs=2)
    assert not multiprocessing.active_children(), "workers are gone"
    rest = Quiet()
    run = run_tiny(rest, jobs=2)
    assert rest.count == UNITS - 2
    assert len(comparable(run.path)) == UNITS


class Killer(Quiet):
    """Kills the processes that measure once a unit is done, as a machine out of memory does."""

    def finished(self, unit: Unit, row: Row) -> None:
        if self.count == 1:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid or 0, signal.SIGKILL)


def test_a_killed_worker_is_one_line_and_what_was_measured_stays(run_tiny: RunIt) -> None:
    killer = Killer()
    with pytest.raises(UsageError, match=r"--jobs 2: a process .* was killed") as caught:
        run_tiny(killer, jobs=2)
    assert f"{killer.count} of {UNITS} units are in " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not multiprocessing.active_children()
    rest = Quiet()
    run = run_tiny(rest, jobs=2)
    assert rest.count == UNITS - killer.count
    assert len(comparable(run.path)) == UNITS


def test_a_work_folder_that_cannot_be_renamed_is_a_note(
    run_tiny: RunIt, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepare(Request(tiny_config, tmp_path / "results"))
    folder = run.work_folder(run.units[0])
    for each in (folder, folder.with_name(f"{folder.name}.done")):
        each.mkdir(parents=True)
        (each / "checkpoint.pt").write_bytes(b"")
    monkeypatch.setattr("bench.files.store.shutil.rmtree", lambda *_, **__: None)  # as if refused
    counted = Quiet()
    run = run_tiny(counted)
    assert counted.count == UNITS
    assert len(read_submission(run.path)[0].rows) == UNITS
    (note,) = run.notes
    assert note.startswith(f"{folder}: the checkpoints of a finished unit stay there (")
    assert (folder / "checkpoint.pt").exists()


def test_what_is_timed_never_shares_the_machine() -> None:
    fields = {"case_version": 1, "kernel": "a/b", "backend": "cpu", "dtype": "bfloat16"}
    rest: dict[str, Any] = {**fields, "params": {}, "options": {}, "seeds": 1}
    assert may_share(Unit(case="crash/ladder", **rest))
    assert not may_share(Unit(case="speed/attention", **rest))


def test_filters_leave_the_other_rows_alone(run_tiny: RunIt) -> None:
    run = run_tiny(kernel="*/stock")
    assert len(read_submission(run.path)[0].rows) == 2
    run_tiny(kernel="*/delta_*")
    assert len(read_submission(run.path)[0].rows) == 4


def test_a_broken_file_is_kept_aside(run_tiny: RunIt) -> None:
    path = run_tiny().path
    for number, content in enumerate(['{"schema_version": 1, "rows', '{"some": "json"}', "\xff"], 1):
        path.write_text(content, encoding="latin-1")
        run = run_tiny()
        assert path.with_name(f"tiny.json.corrupt-{number}").read_bytes() == content.encode("latin-1")
        assert f"tiny.json.corrupt-{number}" in run.notes[0]
        assert len(read_submission(path)[0].rows) == UNITS


def test_a_file_of_another_config_is_kept_as_stale(run_tiny: RunIt, tiny_config: Path) -> None:
    run_tiny()
    tiny_config.write_text(TINY + "    params: {repeats: 3}\n")
    counted = Quiet()
    run = run_tiny(counted)
    assert counted.count == UNITS
    assert "another config" in run.notes[0]
    assert run.path.with_name("tiny.json.stale-1").exists()


def test_a_file_of_other_code_or_machine_is_kept_as_stale(run_tiny: RunIt) -> None:
    path = run_tiny().path
    text = path.read_text()
    changed = text.replace('"python": "', '"python": "0.')
    assert changed != text
    path.write_text(changed)
    assert "machine or software" in run_tiny().notes[0]


def test_two_runs_do_not_write_one_file(run_tiny: RunIt) -> None:
    class Second(Quiet):
        def started(self, unit: object) -> None:
            with pytest.raises(UsageError, match="another run"):
                run_tiny()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tiny(Second())


def test_results_that_cannot_be_written(tiny_config: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for results, expected in [(file, "not a directory"), (Path("/proc/none"), "cannot write")]:
        request = Request(tiny_config, results)
        with pytest.raises(UsageError, match=expected):
            execute(prepare(request), request, Quiet())
    assert file.read_text() == "mine"


def test_bad_option_values_are_refused_before_anything_runs(tiny_config: Path, tmp_path: Path) -> None:
    tiny_config.write_text(TINY + "    options: {beta: high}\n")
    with pytest.raises(UsageError, match=r"options\.beta: input should be a valid number, got 'high'"):
        prepare(Request(tiny_config, tmp_path))


@pytest.fixture
def one_unit(tiny_config: Path, tmp_path: Path) -> PlannedRun:
    return prepare(Request(tiny_config, tmp_path / "results", kernel="eager-fused/stock"))


def measure(run: PlannedRun) -> Row:
    backend = load_backend("cpu")
    unit = run.units[0]
    return run_unit(unit, backend.kernels()[unit.kernel], backend)


def test_what_fails_is_a_row_with_its_reason(one_unit: PlannedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    case = load_case("bias/shift_range")

    def raises(error: Exception) -> Row:
        def run(*_: object) -> Measurement:
            raise error

        monkeypatch.setattr(case, "run", run)
        return measure(one_unit)

    failed = raises(RuntimeError("out of memory:\n  tried to allocate 80 GiB"))
    assert (failed.status, failed.verdict) == ("error", "")
    assert failed.reason == "RuntimeError: out of memory: tried to allocate 80 GiB"
    refused = raises(Unsupported("head_dim 300: this kernel takes up to 256"))
    assert (refused.status, refused.reason) == (
        "unsupported",
        "head_dim 300: this kernel takes up to 256",
    )


def test_an_error_does_not_end_the_run_and_is_tried_again(
    run_tiny: RunIt, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = load_case("bias/shift_range")
    genuine, calls = case.run, []

    def sometimes(kernel: object, *rest: object) -> Measurement:
        calls.append(kernel)
        if len(calls) == 3:
            raise MemoryError("no room")
        return genuine(kernel, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(case, "run", sometimes)
    path = run_tiny().path
    assert [row.status for row in read_submission(path)[0].rows].count("error") == 1
    again = Quiet()
    run_tiny(again)
    assert again.count == 1
    assert {row.status for row in read_submission(path)[0].rows} == {"ok"}


def test_a_dtype_that_a_kernel_lacks_is_unsupported(one_unit: PlannedRun) -> None:
    unit = one_unit.units[0]
    backend = load_backend("cpu")
    kernel = backend.kernels()[unit.kernel]
    object.__setattr__(kernel, "dtypes", frozenset())
    row = run_unit(unit, kernel, backend)
    assert (row.status, row.reason) == ("unsupported", "eager-fused/stock does not take bfloat16")


def test_thinned_curves_keep_their_ends() -> None:
    curve = [float(i) for i in range(12_345)]
    thinned = thin(curve)
    assert len(thinned) == 500
    assert (thinned[0], thinned[-1]) == (0.0, 12_344.0)
    assert thinned == sorted(set(thinned))
    assert thin(curve[:500]) == curve[:500]


def test_curves_keep_every_float32_apart_in_half_the_bytes() -> None:
    near = torch.tensor([0.1, 1.7e9, -3e-9])
    values = torch.cat([near, near.nextafter(torch.tensor(9e9))]).tolist()
    kept = thin(values)
    assert torch.equal(torch.tensor(kept), torch.tensor(values))
    assert len(repr(kept)) < 0.75 * len(repr(values))
    assert repr(thin([float("nan"), float("-inf")])) == "[nan, -inf]"


def test_a_file_that_could_not_be_read_again_is_not_written(
    run_tiny: RunIt, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_tiny().path
    whole = path.read_bytes()
    monkeypatch.setattr("bench.run.result_file.MAX_BYTES", len(whole) - 100)
    with pytest.raises(UsageError, match="split tiny into two configs"):
        run_tiny(force=True)
    assert path.read_bytes() == whole


def test_a_unit_runs_with_the_algorithms_that_its_kernel_asks_for(
    one_unit: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, backend = one_unit.units[0], load_backend("cpu")
    kernel, seen = backend.kernels()[unit.kernel], []

    @contextlib.contextmanager
    def lenient() -> Iterator[None]:  # as a GPU's backend
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    def run(*_: object) -> Measurement:
        seen.append(torch.is_deterministic_algorithms_warn_only_enabled())
        raise Unsupported("seen")

    monkeypatch.setattr(backend, "deterministic", lenient)
    monkeypatch.setattr(load_case(unit.case), "run", run)
    for strict in (False, True):
        monkeypatch.setattr(type(kernel), "strict", strict)
        run_unit(unit, kernel, backend)
    assert seen == [True, False]


def test_unavailable_backend_says_why(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config.write_text(TINY.replace("seeds: 1", "seeds: 1\nbackends: [cdua]"))
    with pytest.raises(UsageError, match="unknown backend 'cdua'"):
        prepare(Request(tiny_config, tmp_path))
    monkeypatch.setitem(engine.BACKENDS, "cdua", "backends.cpu")
    monkeypatch.setattr("backends.cpu.unavailable_reason", lambda: "no such device")
    with pytest.raises(UsageError, match="'cdua' is not available here: no such device"):
        prepare(Request(tiny_config, tmp_path))


@pytest.mark.skipif(engine.unavailable_reason("ascend") is None, reason="there is an NPU")
def test_a_filter_for_an_unavailable_backend_says_why(tiny_config: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'ascend' is not available here: .*torch_npu"):
        prepare(Request(tiny_config, tmp_path, backend="ascend"))


def test_units_that_ask_the_same_share_their_inputs_and_each_is_made_once(
    tiny_config: Path, run_tiny: RunIt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the plan's order: a point that comes back, and one that differs in what no input depends on."""
    tiny_config.write_text(
        'version: 1\nname: tiny\nkernels: ["eager-fused/stock", "eager-fused/delta_*"]\nseeds: 2\ncases:\n'
        "  - case: crash/drift\n    params: {steps: 10, eps: [1e-6, 1e-4]}\n"
        "  - case: bias/shift_range\n"
        "  - case: crash/drift\n    params: {steps: 10, lr: 1e-4}\n"
    )
    made: list[tuple[str, int]] = []
    cases = ("crash/drift", "bias/shift_range")
    for name in cases:
        case = load_case(name)
        inputs = type(case).inputs

        def count(self: Any, params: Any, dtype: Any, seed: int, inputs: Any = inputs) -> Any:
            made.append((self.name, seed))
            return inputs(self, params, dtype, seed)

        monkeypatch.setattr(type(case), "inputs", count)
    rows = run_tiny().selected_rows()
    assert len(rows) == 4 * 3
    assert sorted(made) == sorted((name, seed) for name in cases for seed in (0, 1))
    assert len({row.digests["inputs"] for row in rows if row.case == "crash/drift"}) == 1
