"""Personal things are found in files and taken out of error texts; the suite's own names are not."""

from __future__ import annotations

import pytest

from bench.files.privacy import personal, scrub


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (
            "CUDA out of memory. Process 31337 has 9 GiB; see /scratch/alice/log",
            "CUDA out of memory. Process <n> has 9 GiB; see <path>",
        ),
        ("(/nfs/alice/venv/lib.so: undefined symbol)", "(<path>: undefined symbol)"),
        ("C:\\Users\\alice\\x.dll missing", "<path>"),
        ("mail alice@example.org now", "mail <mail> now"),
        ("no route to 10.0.0.7", "no route to <address>"),
        ("first\n  second", "first second"),
    ],
)
def test_scrub(text: str, clean: str) -> None:
    assert scrub(text).startswith(clean)
    assert not list(personal(scrub(text)))
    expected = {"CUDA": 2, "first": 0}.get(text.split()[0], 1)
    assert len(list(personal(text))) == expected


@pytest.mark.parametrize(
    "text",
    [
        "bias/tie_break",
        "eager-fused/stabilized+consistent_l",
        "python runner.py run configs/bias.yaml",
        'kernels: ["*/stabilized", "*/stabilized+consistent_l"]',
        "https://arxiv.org/abs/2510.04212",
        "torch 2.13.0",
        "shape [1, 2, 3]",
        "q / k",
    ],
)
def test_our_own_names_are_not_personal(text: str) -> None:
    assert list(personal(text)) == []
    assert scrub(text) == text


def test_where_is_named() -> None:
    found = list(personal({"a": [{"user": "x"}, "/home/me/x"], "driver": "24.1.0.3"}))
    assert found == ["a[0].user: a personal field", "a[1]: holds a path"]
