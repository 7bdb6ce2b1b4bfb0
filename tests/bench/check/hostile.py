"""Hostile submissions: mutations of a good file, and files made to be slow, deep or sly.

Used by test_hostile.py and, in a browser, by test_page.py.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

MARKUP = "<img src=x onerror=alert(1)>"
STRINGS = (
    "", " ", MARKUP, "</script><script>alert(1)</script>", "{{7*7}}", "javascript:alert(1)", "../../etc",
    "a/../../b", "..", "\u202egpj.exe", "\x1b[2J", "\x00", "\ud800", "::error::x", "##[error]x",
    "=HYPERLINK(1)", "NaN", "nan", "Infinity", "-Infinity", "inf", "1e5", "0x10", "١", "1_000", "a" * 501,
    "A" * 70_000, "é\n", "on", "null", "true", "/home/me/x", "me@example.org", "10.1.2.3", "pid 77",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 99, 2**31, 2**63, -(2**63) - 1, 10**400, 10**4000, 0.0, -0.0, 0.5, 1e-320, 1e308, -1e308,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
OTHERS = (None, True, False, [], {}, [[]], {"a": {"a": {"a": 1}}}, ["x"] * 600, [None])
# What an honest run on the same machine may differ in. Digests of inputs and verdicts are not among it.
FREE = ("wall_s", "launch", "digests", "metrics", "series", "reason", "provenance", "status")


def free_difference(a: Any, b: Any) -> str | None:
    """The first difference between two parsed submissions that no honest run explains; None if none."""
    for name in ("schema_version", "config"):
        if a[name] != b[name] or type(a[name]) is not type(b[name]):
            return name
    if a["machine"]["slug"] != b["machine"]["slug"] or len(a["rows"]) != len(b["rows"]):
        return "slug or rows"
    for old, new in zip(a["rows"], b["rows"], strict=True):
        for name in old.keys() | new.keys():
            if name not in FREE and json.dumps(old.get(name)) != json.dumps(new.get(name)):
                return name
        if old["status"] != new["status"] or old["digests"].get("inputs") != new["digests"].get("inputs"):
            return "status or inputs"
        if new["provenance"] != "measured" or new["reason"]:
            return "provenance or reason"
    return None


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a nested value."""
    found = [here] if here else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += paths(item, (*here, key))
    return found


def values() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from(STRINGS), st.sampled_from(NUMBERS), st.sampled_from(OTHERS).map(copy.deepcopy),
        st.text(max_size=20), st.floats(), st.integers(),
    )  # fmt: skip


def change_value(tree: Any, path: tuple[Any, ...], new: Any) -> None:
    holder = tree
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = new


def remove(tree: Any, path: tuple[Any, ...]) -> None:
    holder = tree
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]


def add_key(tree: Any, path: tuple[Any, ...], key: str, new: Any) -> None:
    holder = tree
    for step in path:
        holder = holder[step]
    if isinstance(holder, dict):
        holder[key] = new
    elif isinstance(holder, list):
        holder.append(new)


def text_mutations(text: str) -> st.SearchStrategy[str]:
    """Changes of the text itself: form, encoding marks, spellings, repeated keys, nesting."""

    def splice(at: int, cut: int, insert: str) -> str:
        at %= len(text)
        return text[:at] + insert + text[at + cut :]

    pieces = st.sampled_from((
        "", " ", "\n", ",", "{", "}", "[", "]", '"', "\\", "\\u0000", "\\ud800", "NaN", "Infinity", "-0",
        "1e999", "1E5", "0x1", "﻿", "\x00", "/*", "//", "'", "null", '"a": 1, ', "[" * 5000, '{"a":' * 5000,
        "9" * 5000, "1.0", "00",
    ))  # fmt: skip
    return st.builds(splice, st.integers(0, 10**9), st.integers(0, 40), pieces)


def slow_files(good: dict[str, Any]) -> dict[str, str]:
    """Texts of up to 4 MiB, each at another bound."""
    limit = 4 * 1024 * 1024

    def with_rows(rows: list[Any]) -> str:
        return json.dumps(good | {"rows": rows})

    def with_text(text: str) -> str:
        return json.dumps(good | {"config": good["config"] | {"text": text}})

    row = good["rows"][0]
    head = "version: 1\nname: tiny\ncases:\n"
    curve = [0.123456789012] * 500
    return {
        "one long string": json.dumps(good | {"volatile": {"note": "a" * (limit - 10_000)}}),
        "no at sign": with_text("a" * 16_000),
        "dots and dashes": with_text("a.b-" * 4_000),
        "slashes": with_text("-/" * 8_000),
        "many bad rows": with_rows([0] * 800_000),
        "many small bad rows": with_rows([{"a": []}] * 300_000),
        "many bad values": with_rows([row | {"metrics": {f"m{i}": [] for i in range(200)}}] * 400),
        "many keys": json.dumps({f"k{i}": 0 for i in range(300_000)}),
        "many repeated keys": "{" + ", ".join(['"a": 0'] * 500_000) + "}",
        "many facts": json.dumps(good | {"machine": good["machine"] | {"backends": {
            f"b{i}": {f"f{j}": {f"g{k}": [] for k in range(64)} for j in range(64)} for i in range(8)}}}),
        "deep lists": "[" * 1_000_000,
        "deep objects": '{"a":' * 800_000,
        "deep yaml": with_text("[" * 16_000),
        "wide yaml": with_text(head + "  - case: bias/leak\n    params: {gap: [" + "1," * 7_900 + "]}"),
        "many cases": with_text(head + "  - {case: x}\n" * 1_100),
        "many globs": with_text("kernels: [" + "'*?*?*?*?x'," * 32 + "]\n" + head
                                + ("  - {case: bias/leak, kernels: [" + "'*[a-z]*[!q]'," * 12 + "]}\n") * 60),
        "many units": with_text(head + ("  - {case: bias/leak, seeds: 1, params: {gap: ["
                                + ",".join(map(str, range(40))) + "]}}\n") * 20),
        "sexagesimal": with_text("a: " + "1:" * 7_000 + "1"),
        "many rows": with_rows([row] * 2_500)[:limit],
        "many floats": with_rows([row | {"series": {f"s{i}": curve for i in range(50)}}] * 10),
        "many tiny floats": with_rows([row | {"series": {f"s{i}": [0] * 500 for i in range(64)}}] * 32),
        "non-finite floats": with_rows([row | {"series": {f"s{i}": ["NaN"] * 500 for i in range(64)}}] * 12),
        "many offered": json.dumps(good | {"offered": good["offered"] * 40}),
    }  # fmt: skip
