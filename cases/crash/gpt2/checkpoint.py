"""Checkpoints that survive whatever ends a run: the old or the new one is whole at every moment.

A file is one line of JSON (step, what the run is, length and sha256 of the rest) and `torch.save` bytes,
read back with `weights_only`. The checkpoint before is kept, for the case that the last one is damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.errors import UsageError
from bench.records import dumps
from bench.store import write_bytes

CURRENT, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"
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
    torch.save(state, buffer)
    body = buffer.getbuffer()
    header = {
        "format": FORMAT, "step": step, "bytes": len(body), "run": fingerprint,
        "sha256": hashlib.sha256(body).hexdigest(),
    }  # fmt: skip
    fresh = folder / f"{CURRENT}.new"
    write_bytes(fresh, [(dumps(header) + "\n").encode(), body])
    # Between the two renames only the previous one is there: `load` then takes that.
    with contextlib.suppress(FileNotFoundError):
        os.replace(folder / CURRENT, folder / PREVIOUS)
    os.replace(fresh, folder / CURRENT)


def load(folder: Path, fingerprint: Fingerprint, say: Callable[[str], None]) -> Checkpoint | None:
    """The last whole checkpoint in `folder`, or None where there is none at all.

    UsageError for one of another run (names the differing keys), and where none is whole.
    """
    damaged = []
    for name in (CURRENT, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            found = _read(path, fingerprint)
        except Damaged as problem:
            damaged.append(f"{path}: {problem}")
            say(f"checkpoint {path} is left out: {problem}")
            continue
        if damaged or name == PREVIOUS:
            say(f"going on from the checkpoint before, {path}, at step {found.step}")
        return found
    if damaged:
        raise UsageError(f"{damaged[0]}; no checkpoint is whole: move {folder} away to begin anew")
    return None


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
