"""Files of `crash/gpt2`: tokens, batch sequences, checkpoints; whatever is wrong with them is named."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.errors import UsageError
from bench.measure.inputs import key_of, raw_words
from cases.crash.gpt2 import checkpoint
from cases.crash.gpt2.batches import (
    CounterBatches,
    ExplicitBatches,
    chained,
    counter_header,
    read_batches,
    share,
    words_from,
    write_counter,
    write_explicit,
)
from cases.crash.gpt2.data import FOLDER_VARIABLE, bundled, open_tokens
from cases.crash.language import LENGTH, tokens

SHA = "0" * 64


class Said(list[str]):
    """What a run said."""

    def __call__(self, text: str) -> None:
        self.append(text)


# ---- token files ------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for token files, with `text.bin`: the bundled text as nanoGPT would store it."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    tokens().numpy().astype("<u2").tofile(folder / "text.bin")
    return folder


def open_it(name: str, vocabulary: int = 64, sha256: str | None = None, said: Said | None = None) -> Any:
    return open_tokens(name, 16, vocabulary, sha256, Said() if said is None else said)


def test_a_file_of_the_bundled_text_is_the_bundled_text(data: Path) -> None:
    found, inside = open_it("text.bin"), open_it("bundled")
    assert found.sha256 == inside.sha256 == bundled()[1].sha256
    assert found.sha256 == "341817b6980677beed921f82e780e707c372fa1c7ec8acfa335489b3a894e40a"
    rows = found.rows(np.array([5, LENGTH - 17]), 17)
    assert (rows.shape, rows.dtype) == ((2, 17), np.int64)
    assert rows[0].tolist() == tokens()[5:22].tolist()


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        (b"\0" * 101, "x.bin", "101 bytes, an odd number"),
        (b"\0" * 32, "x.bin", "16 tokens; a context of 16 needs at least 17"),
        (b"", "x.bin", "0 tokens"),
        (
            b"\0" * 40 + b"\x40\0" + b"\x50\0",
            "x.bin",
            "id 80 at token 21; a vocabulary of 64 has ids 0 to 63",
        ),
        (b"\0" * 40, "y.bin", "no such file"),
        (b"\0" * 40, "../x.bin", "relative"),
        (b"\0" * 40, "/x.bin", "relative"),
    ],
)
def test_bad_token_files_are_named(data: Path, content: bytes, name: str, expected: str) -> None:
    (data / "x.bin").write_bytes(content)
    with pytest.raises(UsageError, match="data: ") as caught:
        open_it(name)
    assert expected in str(caught.value)


def test_another_file_than_the_one_asked_for_is_refused(data: Path) -> None:
    right = open_it("text.bin").sha256
    assert open_it("text.bin", sha256=right).sha256 == right
    with pytest.raises(UsageError, match=f"data_sha256: {SHA} is asked for"):
        open_it("text.bin", sha256=SHA)


def test_a_file_is_read_once_and_again_when_it_changed(data: Path) -> None:
    first, second, third = Said(), Said(), Said()
    before = open_it("text.bin", said=first).sha256
    assert open_it("text.bin", said=second).sha256 == before
    assert (len(first), len(second)) == (1, 0)
    (data / "text.bin").write_bytes(b"\1\0" * 40)
    assert open_it("text.bin", said=third).sha256 != before
    assert len(third) == 1
    (data / "text.bin.facts").write_text("{}")
    assert open_it("text.bin").sha256 != before, "a damaged note is not believed"


# ---- batch sequences --------------------------------------------------------------------------


def header(batch: int = 6, length: int = 1000, context: int = 16) -> Any:
    return counter_header("crash/gpt2", 3, length, SHA, context, batch)


def test_offsets_are_words_of_the_stream_times_starts() -> None:
    batches = CounterBatches(header())
    words = raw_words(key_of("crash/gpt2/3/batches"), 60)
    expected = [(int(word) * 984) >> 64 for word in words]
    assert [int(o) for step in range(10) for o in batches.offsets(step)] == expected
    for start in range(9):
        assert words_from(5, start, 7).tolist() == raw_words(5, 16)[start : start + 7].tolist()


def test_a_file_of_more_than_four_billion_tokens_is_used_to_its_end() -> None:
    batches = CounterBatches(header(batch=1000, length=9_035_582_198, context=1024))
    offsets = batches.offsets(0)
    assert offsets.min() >= 0
    assert 2**33 < offsets.max() < 9_035_581_174


def test_ranks_and_micro_batches_take_all_of_a_step_in_order() -> None:
    offsets = np.arange(24)
    for size in (1, 2, 3, 4):
        parts = [share(offsets, rank, size, 2) for rank in range(size)]
        assert {part.shape for part in parts} == {(12 // size, 2)}
        assert np.concatenate([part.ravel() for part in parts]).tolist() == offsets.tolist()


def test_recorded_sequences_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.batches"
    write_counter(path, header())
    assert path.stat().st_size < 500
    counted = read_batches(path)
    assert isinstance(counted, CounterBatches)
    offsets = np.stack([counted.offsets(step) for step in range(5)])
    written = write_explicit(path, offsets, tokens=1000, tokens_sha256=SHA, context=16)
    explicit = read_batches(path)
    assert isinstance(explicit, ExplicitBatches)
    assert explicit.header == written
    assert path.read_bytes().endswith(offsets.astype("<u8").tobytes())
    assert all((explicit.offsets(s) == offsets[s]).all() for s in range(5))
    assert explicit.header.identity() != counted.header.identity()


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b[:-8], "232 bytes of offsets; 5 steps of 6 are 240"),
        (lambda b: b[:-1] + b"\1", "offsets_sha256 does not match"),
        (lambda b: b[50:], "not a batch file"),
        (lambda b: b"", "not a batch file"),
        (lambda b: b.replace(b'"batch": 6', b'"batch": 6, "more": 1'), "unknown key"),
        (lambda b: b.replace(b'"context": 16', b'"context": 0'), "context"),
        (lambda b: b.replace(b'"tokens": 1000', b'"tokens": 500 '), "offset 9"),
    ],
)
def test_bad_batch_files_are_named(tmp_path: Path, change: Any, expected: str) -> None:
    path = tmp_path / "run.batches"
    offsets = np.arange(900, 930).reshape(5, 6)
    write_explicit(path, offsets, tokens=1000, tokens_sha256=SHA, context=16)
    damage(path, change)
    with pytest.raises(UsageError, match="replay: ") as caught:
        read_batches(path)
    assert expected in str(caught.value)
    with pytest.raises(UsageError, match="no such file"):
        read_batches(tmp_path / "none")


def test_a_chain_tells_every_sequence_apart() -> None:
    a, b = np.array([1, 2]), np.array([3, 4])
    assert chained(chained(SHA, a), b) != chained(chained(SHA, b), a)


# ---- checkpoints ------------------------------------------------------------------------------

RUN = {"lr": 1e-3, "kernel": "a/b", "beta": None}


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint.save(folder, step, RUN, {"x": torch.full((1000,), float(step)), "n": [step, "a"]})


def load(folder: Path, run: dict[str, Any] = RUN) -> tuple[checkpoint.Checkpoint | None, Said]:
    said = Said()
    return checkpoint.load(folder, run, said), said


def test_a_checkpoint_reads_back_and_the_one_before_is_kept(tmp_path: Path) -> None:
    assert load(tmp_path) == (None, [])
    save(tmp_path, 4, 8)
    found, said = load(tmp_path)
    assert found is not None
    assert (found.step, found.state["n"], said) == (8, [8, "a"], [])
    assert torch.equal(found.state["x"], torch.full((1000,), 8.0))
    assert {p.name for p in tmp_path.iterdir()} == {checkpoint.CURRENT, checkpoint.PREVIOUS}


@pytest.mark.parametrize(
    "change",
    [lambda b: b[:-100], lambda b: b[:3000] + b"x" + b[3001:], lambda b: b"", lambda b: b[5:]],
    ids=["truncated", "flipped", "empty", "beheaded"],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, change: Any) -> None:
    save(tmp_path, 4, 8)
    damage(tmp_path / checkpoint.CURRENT, change)
    found, said = load(tmp_path)
    assert found is not None
    assert found.step == 4
    assert checkpoint.CURRENT in said[0]
    assert checkpoint.PREVIOUS in said[1]
    assert "step 4" in said[1]
    damage(tmp_path / checkpoint.PREVIOUS, change)
    with pytest.raises(UsageError, match="no checkpoint is whole"):
        load(tmp_path)


def test_a_cut_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 4, 8)
    os.replace(tmp_path / checkpoint.CURRENT, tmp_path / checkpoint.PREVIOUS)
    found, said = load(tmp_path)
    assert found is not None
    assert found.step == 8
    assert "going on from the checkpoint before" in said[0]


def save_but_cut_between_the_renames(folder: Path, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def replace(source: Path, target: Path) -> None:
            if Path(target).name == checkpoint.CURRENT:
                raise KeyboardInterrupt
            rename(source, target)

        rename = os.replace
        patch.setattr(checkpoint.os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            save(folder, step)


def test_a_cut_between_the_renames_goes_on_at_the_step_that_was_saved(tmp_path: Path) -> None:
    save(tmp_path, 4, 8)
    save_but_cut_between_the_renames(tmp_path, 12)
    assert not (tmp_path / checkpoint.CURRENT).exists()
    found, said = load(tmp_path)
    assert found is not None
    assert found.step == 12
    assert checkpoint.FRESH in said[0]
    save(tmp_path, 16)
    assert load(tmp_path)[0].step == 16  # type: ignore[union-attr]


def test_a_damaged_checkpoint_never_takes_the_place_of_the_whole_one_before(tmp_path: Path) -> None:
    save(tmp_path, 4, 8)
    damage(tmp_path / checkpoint.CURRENT, lambda b: b[:-100])
    _, said = load(tmp_path)
    assert checkpoint.DAMAGED in said[-1]
    save_but_cut_between_the_renames(tmp_path, 12)
    os.unlink(tmp_path / checkpoint.FRESH)  # the worst case: only what was there before is left
    found, _ = load(tmp_path)
    assert found is not None
    assert found.step == 4


def test_the_only_checkpoint_being_damaged_is_said_every_time(tmp_path: Path) -> None:
    save(tmp_path, 4)
    damage(tmp_path / checkpoint.CURRENT, lambda b: b[:-100])
    for _ in range(2):
        with pytest.raises(UsageError, match="no checkpoint is whole"):
            load(tmp_path)


def test_a_changed_step_in_the_header_is_damage(tmp_path: Path) -> None:
    save(tmp_path, 4)
    damage(tmp_path / checkpoint.CURRENT, lambda b: re.sub(rb'"step": ?4', b'"step":5', b, count=1))
    with pytest.raises(UsageError, match="its header says step 5, what was saved is of step 4"):
        load(tmp_path)


def test_a_checkpoint_of_another_run_is_refused_with_the_differing_keys(tmp_path: Path) -> None:
    save(tmp_path, 4)
    with pytest.raises(UsageError, match="another run") as caught:
        load(tmp_path, {**RUN, "lr": 2e-3, "seed": 1})
    assert "lr is 0.001 there, 0.002 here; seed is None there, 1 here" in str(caught.value)
    assert "kernel" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_full_disk_leaves_both_checkpoints_as_they_were(tmp_path: Path) -> None:
    save(tmp_path, 4, 8)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path, 12)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    checkpoint.save(tmp_path, 4, RUN, {"x": Evil()})
    with pytest.raises(Exception, match=r"Weights only"):
        load(tmp_path)
    assert not (tmp_path / "evil").exists()
