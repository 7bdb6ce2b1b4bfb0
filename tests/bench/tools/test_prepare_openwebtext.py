"""Token files out of documents, without the network; `datasets` and `tiktoken` where installed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.errors import UsageError
from bench.tools.prepare_openwebtext import encode, prepare, record, write_tokens


class Bytes:
    """An encoding of bytes as tiktoken offers it, with GPT-2's end mark."""

    def encode_ordinary(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_single_token(self, text: str) -> int:
        assert text == "<|endoftext|>"
        return 50256


def test_documents_are_joined_with_end_marks(tmp_path: Path) -> None:
    texts = ["ab", "", "<|endoftext|>"]
    written = write_tokens((encode(text, Bytes()) for text in texts), tmp_path / "train.bin")
    content = (tmp_path / "train.bin").read_bytes()
    ids = np.frombuffer(content, dtype="<u2").tolist()
    assert ids == [97, 98, 50256, 50256, *b"<|endoftext|>", 50256]
    assert written.tokens == len(ids)
    assert written.sha256 == hashlib.sha256(content).hexdigest()


def test_what_does_not_fit_leaves_the_old_file(tmp_path: Path) -> None:
    write_tokens([[1, 2]], tmp_path / "train.bin")
    for bad in ([[3], [65536]], [[-1]]):
        with pytest.raises(UsageError, match="does not fit 16 bits"):
            write_tokens(bad, tmp_path / "train.bin")
    assert (tmp_path / "train.bin").read_bytes() == b"\1\0\2\0"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_dataset_is_split_as_nanogpt_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    datasets: Any = pytest.importorskip("datasets")
    tiktoken: Any = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding(
        "bytes",
        pat_str=r"[\s\S]",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 50256},
    )
    texts = [f"document {number}" for number in range(3000)]
    dataset = datasets.Dataset.from_dict({"text": texts})
    train, val = prepare(dataset, encoding, tmp_path / "out", processes=1)
    found = []
    for written in (train, val):
        ids = np.fromfile(written.path, dtype="<u2")
        assert len(ids) == written.tokens
        ends = np.flatnonzero(ids == 50256)
        found.append([bytes(p.astype("u1")[-13:].tolist()) for p in np.split(ids, ends)])
    assert (train.path.name, val.path.name) == ("train.bin", "val.bin")
    assert len(found[1]) - 1 == 2, "0.05 % of 3000, rounded up"
    assert len(found[0]) - 1 == 2998
    text = record(tmp_path / "out", "a test", [train, val])
    assert f"train.bin: {train.tokens} tokens, sha256 {train.sha256}" in text
    again = prepare(dataset, encoding, tmp_path / "again", processes=1)
    assert [w.sha256 for w in again] == [train.sha256, val.sha256]
