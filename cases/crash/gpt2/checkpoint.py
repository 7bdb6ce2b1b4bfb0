"""Checkpoints that survive whatever ends a run: the old or the new one is whole at every moment.

A file is one line of JSON (step, what the run is, length and sha256 of the rest) and `torch.save` bytes,
read back with `weights_only`. The checkpoint before is kept, for the case that the last one is damaged;
the damaged one is renamed, so that it never takes the place of a whole one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.errors import UsageError
from bench.files.records import dumps
from bench.files.store import write_bytes
from cases.crash.gpt2.data import Say

CURRENT, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"
FRESH = f"{CURRENT}.new"  # whole, but not yet in its place
DAMAGED = "checkpoint.damaged.pt"
STEP = "checkpoint_step"  # key of the state: the header is not hashed, the state is
FORMAT = "attnrepro-checkpoint-1"
MAX_HEADER = 64 * 1024  # bytes
State = dict[str, Any]
Fingerprint = dict[str, Any]  # what a run is, flat, plain values


class Damaged(Exception):
    """A file that is no whole checkpoint; the text says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back, on the host."""

    step: int  # the next one to do
    state: State


def save(folder: Path, step: int, fingerprint: Fingerprint, state: State) -> None:
    """Write a checkpoint and keep the one before. OSError leaves both old ones as they were."""
    buffer = io.BytesIO()
    torch.save(state | {STEP: step}, buffer)
    body = buffer.getbuffer()
    header = {
        "format": FORMAT,
        "step": step,
        "bytes": len(body),
        "run": fingerprint,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    fresh = folder / FRESH
    write_bytes(fresh, [(dumps(header) + "\n").encode(), body])
    # Between the two renames there is no current one: `load` then takes the fresh one.
    with contextlib.suppress(FileNotFoundError):
        os.replace(folder / CURRENT, folder / PREVIOUS)
    os.replace(fresh, folder / CURRENT)


def load(folder: Path, fingerprint: Fingerprint, say: Say) -> Checkpoint | None:
    """The last whole checkpoint in `folder`, or None where there is none at all.

    UsageError for one of another run (names the differing keys), and where none is whole. A damaged
    current one is renamed to `checkpoint.damaged.pt` once another is found whole.
    """
    damaged: dict[str, str] = {}  # why, by name
    for name in (CURRENT, FRESH, PREVIOUS):
        path = folder / name
        try:
            found = _read(path, fingerprint)
        except FileNotFoundError:  # or renamed just now by another process of the run
            continue
        except Damaged as problem:
            damaged[name] = f"{path}: {problem}"
            say(f"checkpoint {path} is left out: {problem}")
            continue
        if name != CURRENT:
            which = "before" if name == PREVIOUS else "that was being put in its place"
            say(f"going on from the checkpoint {which}, {path}, at step {found.step}")
        if CURRENT in damaged:
            _set_aside(folder, say)
        return found
    if damaged:
        first = next(iter(damaged.values()))
        raise UsageError(f"{first}; no checkpoint is whole: move {folder} away to begin anew")
    return None


def _set_aside(folder: Path, say: Say) -> None:
    """Keep `save` from putting the damaged current checkpoint over the whole one before."""
    with contextlib.suppress(FileNotFoundError):  # another process of the run did it
        os.replace(folder / CURRENT, folder / DAMAGED)
    say(f"the damaged checkpoint is kept as {folder / DAMAGED}")


def _read(path: Path, fingerprint: Fingerprint) -> Checkpoint:
    with open(path, "rb") as handle:
        try:
            header = json.loads(handle.readline(MAX_HEADER))
            step, size, sha256 = int(header["step"]), int(header["bytes"]), header["sha256"]
            run = dict(header["run"])
        except (ValueError, TypeError, KeyError) as error:
            raise Damaged("no header of a checkpoint") from error
        if header.get("format") != FORMAT:
            raise Damaged(f"format {header.get('format')!r}, expected {FORMAT!r}")
        _refuse_another_run(path, run, fingerprint)
        body = handle.read()
    if len(body) != size:
        raise Damaged(f"{len(body)} bytes where {size} were written: truncated")
    if hashlib.sha256(body).hexdigest() != sha256:
        raise Damaged("its sha256 does not match: damaged")
    state = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    if (saved := state.pop(STEP, None)) != step:
        raise Damaged(f"its header says step {step}, what was saved is of step {saved}")
    return Checkpoint(step, state)


def _refuse_another_run(path: Path, there: Fingerprint, here: Fingerprint) -> None:
    here = json.loads(dumps(here))  # what the header's JSON made of it
    names = sorted(there.keys() | here.keys())
    differ = [n for n in names if there.get(n) != here.get(n)]
    if differ:
        parts = [f"{n} is {_plain(there.get(n))} there, {_plain(here.get(n))} here" for n in differ]
        raise UsageError(
            f"{path}: the checkpoint of another run: {'; '.join(parts)}. "
            f"Put that back, or move {path.parent} away to begin anew"
        )


def _plain(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:12] + "…"
