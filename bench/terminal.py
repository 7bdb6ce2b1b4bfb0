"""Printing on terminals and into pipes that cannot show every character: spelled out, never a crash.

A run may take hours; that its last table has a δ in it must not end it with a traceback.
"""

from __future__ import annotations

import codecs
import sys
import unicodedata

SIGNS = {"→": "->", "–": "-", "−": "-", "×": "x", "·": "*", "±": "+-", "≈": "~", "≠": "!=", "∘": " o "}
SIGNS |= {"‖": "||", "√": "sqrt", "‰": " per mille", "≤": "<=", "≥": ">=", "∞": "inf", "━": "-"}


def spell_out() -> None:
    """From now on stdout and stderr spell out what their encoding lacks: δ becomes delta, → ->."""
    codecs.register_error("spelled", _handle)
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):  # a test's stand-in has none
            reconfigure(errors="spelled")


def spelled(character: str) -> str:
    """ASCII for one character; what has no spelling, such as a byte of a file's name, as its escape."""
    if sign := SIGNS.get(character):
        return sign
    decomposed = unicodedata.normalize("NFKD", character)  # Ō is O and a macron, ² is 2
    if plain := decomposed.encode("ascii", "ignore").decode():
        return plain
    if unicodedata.combining(character):
        return ""
    name = unicodedata.name(character, "")
    if name.startswith("GREEK "):
        word = name.split()[-1]
        return word.title() if "CAPITAL" in name else word.lower()
    return ascii(character)[1:-1]


def _handle(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(spelled, error.object[error.start : error.end])), error.end
