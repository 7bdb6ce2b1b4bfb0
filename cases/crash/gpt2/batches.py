"""Which tokens each step sees: recorded in a small file, replayed exactly, whatever the world size.

A sequence of batches is a function of the step alone: offsets into the token file, one for each
sequence of the global batch. Ranks and micro-batches take consecutive parts of it, so that one process
with accumulation and eight without see the same tokens in a step.

The file (docs/gpt2.md): one line of JSON, the header; in the kind `explicit` followed by the offsets,
uint64 little-endian, step by step. In the kind `counter` the header says it all: offset number i is
(word i of Philox4x64-10 under the key of `stream`) × starts >> 64, starts = tokens − context.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.errors import UsageError, explain
from bench.files.records import Sha256, dumps
from bench.files.store import write_bytes
from bench.measure.inputs import key_of

MAX_HEADER = 4096  # bytes
Offsets = NDArray[np.int64]


class Header(BaseModel):
    """First line of a batch file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal["attnrepro-batches"] = "attnrepro-batches"
    version: Literal[1] = 1
    kind: Literal["counter", "explicit"]
    tokens: Annotated[int, Field(ge=2)]  # length of the token file
    tokens_sha256: Sha256
    context: Annotated[int, Field(ge=1)]
    batch: Annotated[int, Field(ge=1)]  # sequences a step, over all processes
    stream: Annotated[str, Field(max_length=200)] = ""  # counter: name of the random stream
    steps: Annotated[int, Field(ge=0)] = 0  # explicit: how many are recorded
    offsets_sha256: Sha256 | None = None  # explicit: of the bytes after the header

    @property
    def starts(self) -> int:
        """How many offsets a sequence may have."""
        return self.tokens - self.context

    def identity(self) -> str:
        """sha256 of what decides the batches, given the token file."""
        kind: dict[str, Any] = {"kind": self.kind, "context": self.context, "batch": self.batch}
        rest = {"stream": self.stream} if self.kind == "counter" else {"sha256": self.offsets_sha256}
        return hashlib.sha256(dumps(kind | rest).encode()).hexdigest()


class Batches(Protocol):
    """A sequence of batches."""

    header: Header

    def offsets(self, step: int) -> Offsets:
        """Where each sequence of the global batch begins, int64 [batch]."""


class CounterBatches:
    """Offsets drawn by counter: any step at once, no state."""

    def __init__(self, header: Header):
        self.header = header
        self.key = key_of(header.stream)

    def offsets(self, step: int) -> Offsets:
        # A token file may have more than 2^32 tokens: the high half of a 128-bit product, in Python
        # integers, is exact.
        words = words_from(self.key, step * self.header.batch, self.header.batch)
        return np.array([(int(w) * self.header.starts) >> 64 for w in words], dtype=np.int64)


class ExplicitBatches:
    """Recorded offsets, mapped into memory."""

    def __init__(self, header: Header, path: Path, start: int):
        self.header = header
        self.all = np.memmap(path, "<u8", "r", start, (header.steps, header.batch))

    def offsets(self, step: int) -> Offsets:
        return self.all[step].astype(np.int64)


def words_from(key: int, start: int, count: int) -> NDArray[np.uint64]:
    """Words `start` to `start + count − 1` of `bench.measure.inputs.raw_words`, without those before."""
    generator = np.random.Philox(key=key)
    generator.advance(start // 4)  # a step of the counter gives four words
    return generator.random_raw(start % 4 + count)[start % 4 :]


def counter_header(name: str, seed: int, tokens: int, sha256: str, context: int, batch: int) -> Header:
    """The header of a run's own random sequence."""
    return Header(
        kind="counter",
        tokens=tokens,
        tokens_sha256=sha256,
        context=context,
        batch=batch,
        stream=f"{name}/{seed}/batches",
    )


def write_counter(path: Path, header: Header) -> None:
    """Record a random sequence: a few hundred bytes for any number of steps."""
    write_bytes(path, [_line(header)])


def write_explicit(
    path: Path, offsets: NDArray[Any], *, tokens: int, tokens_sha256: str, context: int
) -> Header:
    """Record offsets [steps, batch], say those logged by another training code."""
    body = np.ascontiguousarray(offsets, dtype="<u8").tobytes()
    header = Header(
        kind="explicit",
        tokens=tokens,
        tokens_sha256=tokens_sha256,
        context=context,
        steps=offsets.shape[0],
        batch=offsets.shape[1],
        offsets_sha256=hashlib.sha256(body).hexdigest(),
    )
    write_bytes(path, [_line(header), body])
    return header


def read_batches(path: Path) -> Batches:
    """Open a batch file; UsageError where it is missing or not one."""
    try:
        with open(path, "rb") as handle:
            line = handle.readline(MAX_HEADER)
            header = Header.model_validate_json(line)
            start = handle.tell()
            if header.kind == "counter":
                return CounterBatches(header)
            body = hashlib.file_digest(handle, "sha256").hexdigest()
            size = handle.tell() - start
    except FileNotFoundError as error:
        raise UsageError(f"replay: {path}: no such file") from error
    except OSError as error:
        raise UsageError(f"replay: {path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        problem = explain(error, Header)
        raise UsageError(f"replay: {path}: not a batch file: {problem}") from error
    expected = 8 * header.steps * header.batch
    if size != expected:
        raise UsageError(
            f"replay: {path}: {size} bytes of offsets; {header.steps} steps of {header.batch} are {expected}"
        )
    if body != header.offsets_sha256:
        raise UsageError(f"replay: {path}: offsets_sha256 does not match the offsets")
    found = ExplicitBatches(header, path, start)
    if found.all.size and int(found.all.max()) >= header.starts:
        raise UsageError(
            f"replay: {path}: offset {int(found.all.max())}; a sequence of {header.context} in "
            f"{header.tokens} tokens begins at most at {header.starts - 1}"
        )
    return found


def check_replay(header: Header, run: Header, steps: int, path: Path) -> None:
    """Refuse a recorded sequence that does not fit the run, naming what differs."""
    names = ("tokens", "tokens_sha256", "context", "batch")
    differ = [n for n in names if getattr(header, n) != getattr(run, n)]
    if differ:
        parts = [f"{n} {getattr(header, n)} there, {getattr(run, n)} here" for n in differ]
        raise UsageError(f"replay: {path}: recorded for another run: {'; '.join(parts)}")
    if header.kind == "explicit" and header.steps < steps:
        raise UsageError(f"replay: {path}: {header.steps} steps are recorded; params.steps is {steps}")


def share(offsets: Offsets, rank: int, size: int, micro_batch: int) -> Offsets:
    """A rank's part of the global batch, [micro-steps, micro_batch]: consecutive sequences."""
    return offsets.reshape(size, -1, micro_batch)[rank]


def chained(before: str, offsets: Offsets) -> str:
    """sha256 over all offsets so far, one step after the other: hex of sha256(before ‖ offsets)."""
    return hashlib.sha256(bytes.fromhex(before) + offsets.astype("<i8").tobytes()).hexdigest()


def _line(header: Header) -> bytes:
    return (dumps(header.model_dump()) + "\n").encode()
