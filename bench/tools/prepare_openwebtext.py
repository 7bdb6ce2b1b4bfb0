"""Prepare OpenWebText, or texts of your own, as uint16 token files for `crash/gpt2`.

    pip install -r requirements-data.txt -c constraints.txt
    python -m bench.tools.prepare_openwebtext                          # data/openwebtext/train.bin, 17 GB
    python -m bench.tools.prepare_openwebtext --texts my/*.txt --out data/mine

The format and the split are nanoGPT's: GPT-2's BPE without special tokens, id 50256 after each document,
0.05 % of the documents in `val.bin`. `prepared.txt` beside them has lengths, sha256 and versions.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import UsageError
from bench.files.store import write_text

DATASET = "Skylion007/openwebtext"
VALIDATION, SPLIT_SEED = 0.0005, 2357  # nanoGPT's
END = "<|endoftext|>"


@dataclass(frozen=True)
class Written:
    """A token file as it was written."""

    path: Path
    tokens: int
    sha256: str


def encode(text: str, encoding: Any) -> list[int]:
    """The ids of one document and the end mark; whatever looks like a special token is plain text."""
    return [*encoding.encode_ordinary(text), encoding.encode_single_token(END)]


def write_tokens(documents: Iterable[Sequence[int]], path: Path) -> Written:
    """Join documents into a uint16 file; it appears under its name once it is whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    h, count = hashlib.sha256(), 0
    try:
        with open(temporary, "wb") as handle:
            for ids in documents:
                part = np.asarray(ids)
                if part.size and not 0 <= part.min() <= part.max() < 2**16:
                    raise UsageError(f"{path}: token id {part.max()} does not fit 16 bits")
                data = part.astype("<u2").tobytes()
                h.update(data)
                handle.write(data)
                count += part.size
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return Written(path, count, h.hexdigest())


def prepare(dataset: Any, encoding: Any, folder: Path, processes: int) -> list[Written]:
    """Split, encode and write a `datasets.Dataset` with a column `text`."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = dataset.train_test_split(test_size=VALIDATION, seed=SPLIT_SEED, shuffle=True)
    written = []
    for name, part in (("train", parts["train"]), ("val", parts["test"])):
        encoded = part.map(
            lambda row: {"ids": encode(row["text"], encoding)},
            remove_columns=part.column_names,
            num_proc=processes,
            desc=f"encoding {name}",
        )
        rows = (row["ids"] for row in encoded.with_format("numpy"))
        written.append(write_tokens(rows, folder / f"{name}.bin"))
    return written


def record(folder: Path, source: str, written: Sequence[Written]) -> str:
    """What was made, from what, with what: for people, and for `data_sha256` in a config."""
    versions = {name: importlib.metadata.version(name) for name in ("datasets", "tiktoken")}
    lines = [f"source: {source}", *(f"{name}: {version}" for name, version in versions.items())]
    lines += [f"{w.path.name}: {w.tokens} tokens, sha256 {w.sha256}" for w in written]
    text = "\n".join(lines) + "\n"
    write_text(folder / "prepared.txt", text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data/openwebtext"))
    parser.add_argument("--dataset", default=DATASET, help="a dataset of the Hugging Face hub")
    parser.add_argument("--texts", nargs="+", help="text files instead, a document each")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    try:
        import datasets
        import tiktoken
    except ImportError as error:
        sys.exit(f"error: {error.name}: pip install -r requirements-data.txt -c constraints.txt")
    if arguments.texts:
        dataset = datasets.load_dataset(
            "text", data_files=arguments.texts, sample_by="document", split="train"
        )
    else:
        dataset = datasets.load_dataset(arguments.dataset, split="train")
    try:
        written = prepare(dataset, tiktoken.get_encoding("gpt2"), arguments.out, arguments.processes)
    except (OSError, UsageError, ValueError) as error:
        sys.exit(f"error: {error}")
    source = "texts of your own" if arguments.texts else arguments.dataset
    print(record(arguments.out, source, written), end="")


if __name__ == "__main__":
    main()
