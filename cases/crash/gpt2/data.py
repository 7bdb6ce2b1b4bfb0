"""Token files: nanoGPT's `train.bin` (raw little-endian uint16) or the text inside the suite.

A file is mapped into memory, never read whole. Its sha256 and largest id cost one pass, which is kept
beside it in `<file>.facts` for as long as size and time of change stay the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.errors import UsageError
from bench.files.store import write_text
from cases.crash.language import tokens

BUNDLED = "bundled"  # the synthetic language of cases/crash/language.py
FOLDER_VARIABLE = "ATTNREPRO_DATA"
ROOT = Path(__file__).resolve().parents[3]
CHUNK = 2**25  # ids a read: 64 MiB

Ids = NDArray[np.uint16]
Say = Callable[[str], None]  # how a run of hours tells what it does


@dataclass(frozen=True)
class Tokens:
    """Token ids uint16 [length] and the sha256 of their bytes."""

    ids: Ids
    sha256: str

    def rows(self, offsets: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Ids int64 [len(offsets), length], each row from its offset on."""
        return np.stack([self.ids[o : o + length].astype(np.int64) for o in offsets])


def data_path(name: str, key: str) -> Path:
    """The file that a config calls `name`: below the folder in ATTNREPRO_DATA, else below data/.

    Names are relative, so that one config fits every machine and no path enters a result file.
    """
    relative = Path(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise UsageError(
            f"{key}: '{name}'; allowed: '{BUNDLED}' or a path relative to data/ "
            f"(or to the folder in the environment variable {FOLDER_VARIABLE})"
        )
    return Path(os.environ.get(FOLDER_VARIABLE, ROOT / "data")) / relative


def check_tokens(name: str, context: int) -> None:
    """What can be said of a token file without reading it. Raises UsageError."""
    if name == BUNDLED:
        return
    path = data_path(name, "data")
    if not path.is_file():
        raise UsageError(
            f"data: {path}: no such file; prepare it (docs/gpt2.md, Data), set "
            f"{FOLDER_VARIABLE} to the folder that holds '{name}', or use data: {BUNDLED}"
        )
    size = path.stat().st_size
    if size % 2:
        raise UsageError(f"data: {path}: {size} bytes, an odd number; tokens are uint16, 2 bytes each")
    if size // 2 <= context:
        raise UsageError(
            f"data: {path}: {size // 2} tokens; a context of {context} needs at least {context + 1}"
        )


def open_tokens(name: str, context: int, vocabulary: int, sha256: str | None, say: Say) -> Tokens:
    """The tokens called `name`; UsageError where the file is missing, odd, too short, has ids that the
    model does not know, or is not the file with the given sha256."""
    check_tokens(name, context)
    if name == BUNDLED:
        ids, facts, path = *bundled(), Path("the bundled text")
    else:
        path = data_path(name, "data")
        facts = _facts(path, say)
        ids = np.memmap(path, dtype="<u2", mode="r")
    if facts.largest_id >= vocabulary:
        raise UsageError(
            f"data: {path}: id {facts.largest_id} at token {facts.largest_at}; "
            f"a vocabulary of {vocabulary} has ids 0 to {vocabulary - 1}"
        )
    if sha256 is not None and sha256 != facts.sha256:
        raise UsageError(f"data_sha256: {sha256} is asked for, but {path} has {facts.sha256}")
    return Tokens(ids, facts.sha256)


@dataclass(frozen=True)
class TokenFacts:
    """What one pass over a token file says."""

    sha256: str
    largest_id: int
    largest_at: int  # the first token that has it


@lru_cache(maxsize=1)
def bundled() -> tuple[Ids, TokenFacts]:
    """The synthetic language as uint16."""
    ids = tokens().numpy().astype("<u2")
    return ids, _scan(lambda start: ids[start : start + CHUNK])


def _facts(path: Path, say: Say) -> TokenFacts:
    """From the file beside it, or from a pass over the tokens."""
    status = path.stat()
    state = {"bytes": status.st_size, "changed_ns": status.st_mtime_ns}
    beside = path.with_name(f"{path.name}.facts")
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        kept = json.loads(beside.read_text())
        if kept["state"] == state:
            return TokenFacts(**kept["facts"])
    say(f"reading {path} once for its sha256 ({status.st_size / 1e9:.1f} GB)")
    with open(path, "rb") as handle:
        facts = _scan(lambda start: np.fromfile(handle, dtype="<u2", count=CHUNK))
    with contextlib.suppress(OSError):  # a read-only folder: then the next run reads again
        write_text(beside, json.dumps({"state": state, "facts": vars(facts)}, sort_keys=True) + "\n")
    return facts


def _scan(chunk_at: Callable[[int], Ids]) -> TokenFacts:
    """`chunk_at(start)` gives the next ids, none at the end."""
    h = hashlib.sha256()
    start, largest, largest_at = 0, -1, 0
    while len(chunk := chunk_at(start)):
        h.update(chunk.tobytes())
        if int(chunk.max()) > largest:
            largest, largest_at = int(chunk.max()), start + int(chunk.argmax())
        start += len(chunk)
    return TokenFacts(h.hexdigest(), largest, largest_at)
