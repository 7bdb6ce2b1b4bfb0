"""What a terminal cannot show is spelled out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.terminal import spelled
from conftest import ROOT


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("δ = rowsum(dO∘O)", "delta = rowsum(dO o O)"),
        ("P̄ and Ō", "P and O"),
        ("−2e-08 → ±0.5 …", "-2e-08 -> +-0.5 ..."),
        ("Σ‖x‖₂²", "Sigma||x||22"),
        ("\udce9.json", "\\udce9.json"),  # a byte of a file's name that is no text
    ],
)
def test_spelling(text: str, expected: str) -> None:
    assert "".join(c if c.isascii() else spelled(c) for c in text) == expected


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "beta * delta"), ("latin-1", "beta · delta")])
def test_only_what_the_encoding_lacks_is_spelled(encoding: str, shown: str) -> None:
    code = "from bench.terminal import spell_out; spell_out(); print('β · δ')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONIOENCODING": encoding, "PYTHONPATH": "."},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode(encoding) == f"{shown}\n"
