"""Nothing personal in a result file: what to look for, and how to take it out of an error's text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

# Absolute paths of two or more parts; relative names such as bias/leak are not.
_PATH = re.compile(r"(?<![\w.:/*])/(?:[\w.+@~-]+/)+[\w.+@~-]*|\b[A-Za-z]:\\[\w\\.+ -]+")
# Starts only where a name can start: a search from every letter takes quadratic time.
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+\.[A-Za-z]{2,}")
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_ADDRESS = re.compile(rf"(?<![\d.]){_OCTET}(?:\.{_OCTET}){{3}}(?![\d.])")
_PROCESS = re.compile(r"\b([Pp]rocess|[Pp][Ii][Dd])[ :=]+\d+")
PATTERNS = {"a path": _PATH, "an e-mail address": _MAIL, "an IP address": _ADDRESS, "a process": _PROCESS}
KEYS = frozenset({"user", "username", "hostname", "host", "pid", "cwd", "home"})
# Versions of four parts look like addresses.
VERSIONS = frozenset({"driver", "cuda", "cudnn", "cann", "mkl", "onednn", "library", "kernel"})


def scrub(text: str) -> str:
    """`text` on one printable line, with paths, addresses and process numbers replaced."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    line = _PROCESS.sub(r"\1 <n>", line)
    return _ADDRESS.sub("<address>", _MAIL.sub("<mail>", _PATH.sub("<path>", line)))


def personal(value: Any, where: str = "") -> Iterator[str]:
    """Every personal thing in a nested value, as `where: what`."""
    if isinstance(value, dict):
        for key, item in value.items():
            if str(key).lower() in KEYS:
                yield f"{where}.{key}: a personal field".lstrip(".")
            if isinstance(item, dict | list | str):
                yield from personal(item, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            if isinstance(item, dict | list | str):
                yield from personal(item, f"{where}[{number}]")
    elif isinstance(value, str):
        key = where.rpartition(".")[2]
        version = key in VERSIONS or ".versions." in f".{where}"
        for what, pattern in PATTERNS.items():
            if pattern.search(value) and not (version and pattern is _ADDRESS):
                yield f"{where}: holds {what}"
