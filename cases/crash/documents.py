"""A larger synthetic language: 4096 documents of 4096 tokens from integers alone, all grown side by side.

The same kind of text as `language.py` (Zipf words, likely successors, copied spans) for a model of GPU
size: thousands of words, no spaces between them, as a byte-pair encoding leaves few.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.measure.inputs import key_of, raw_words

DOCUMENTS, LENGTH = 4096, 4096  # tokens a document
WORDS, WORD_LENGTH = 4096, 4
COPY_WINDOW = 72  # tokens back that a copied span may begin
COPY_MIN, COPY_SIZES = 4, 12  # spans of 4 to 15 tokens
_LIKELY = np.array([0, 0, 0, 0, 1, 1, 2, 2, 3, 0, 0, 0, 0, 0, 0, 0])  # the first nine count
_CUMULATIVE = np.array(list(accumulate(2**20 // rank for rank in range(1, WORDS + 1))))

Ints = NDArray[np.int64]


def _below(words: NDArray[np.uint64], n: int) -> Ints:
    """Integers in [0, n) from the top 32 bits of 64-bit words."""
    return ((words >> np.uint64(32)).astype(np.int64) * n) >> 32


def _zipf(words: NDArray[np.uint64]) -> Ints:
    return np.searchsorted(_CUMULATIVE, _below(words, int(_CUMULATIVE[-1])), side="right")


class Lexicon:
    """4096 words of 1 to 4 letters out of `letters`, and four likely successors of each."""

    def __init__(self, letters: int):
        def draw(what: str, *shape: int) -> NDArray[np.uint64]:
            words = raw_words(key_of("documents", letters, what), int(np.prod(shape)))
            return words.reshape(shape)

        self.spelling = _below(draw("letters", WORDS, WORD_LENGTH), letters)
        self.sizes = 1 + _below(draw("sizes", WORDS), WORD_LENGTH)
        self.successors = _zipf(draw("successors", WORDS, 4))


def _bits(words: NDArray[np.uint64], first: int, count: int) -> Ints:
    """`count` bits of each word from bit `first` on."""
    return ((words >> np.uint64(first)) & np.uint64(2**count - 1)).astype(np.int64)


@lru_cache(maxsize=1)
def documents(vocabulary: int, length: int = LENGTH) -> Tensor:
    """The text, int32 [4096 · length], values in [0, vocabulary): the documents one after the other.

    Where a word ends, one step in 16 copies 4 to 15 tokens from the last 72 between brackets, one in
    16 of the others sets a break, and the rest say a word: with 9 chances in 16 a likely successor
    of the last (weights 4, 2, 2, 1), else a fresh Zipf draw.
    """
    breaks, opens, closes = vocabulary - 3, vocabulary - 2, vocabulary - 1  # the three marks
    lexicon = Lexicon(vocabulary - 3)
    generator = np.random.Philox(key=key_of("documents", vocabulary, "text"))
    everyone = np.arange(DOCUMENTS)
    text = np.zeros((length, DOCUMENTS), dtype=np.int32)
    word, place = everyone % WORDS, np.full(DOCUMENTS, WORD_LENGTH)  # the first word is over
    left, source = np.zeros((2, DOCUMENTS), dtype=np.int64)  # of a copy: tokens and its bracket
    for now in range(length):
        words = generator.random_raw(DOCUMENTS)
        copying = left > 0
        free = ~copying & (place >= lexicon.sizes[word])
        opening = free & (_bits(words, 0, 4) == 0) & (now >= COPY_WINDOW)
        breaking = free & ~opening & (_bits(words, 4, 4) == 0)
        chance = _bits(words, 8, 4)
        likely = lexicon.successors[word, _LIKELY[chance]]
        says = free & ~opening & ~breaking
        word = np.where(says, np.where(chance < 9, likely, _zipf(words)), word)
        place = np.where(says, 0, place)
        mark = np.where(opening, opens, np.where(breaking, breaks, closes))
        speaking = ~copying & ~opening & ~breaking
        said = lexicon.spelling[word, np.minimum(place, WORD_LENGTH - 1)]
        copied = text[source, everyone]
        text[now] = np.where(speaking, said, np.where(copying & (left > 1), copied, mark))
        place += speaking
        size = COPY_MIN + (_bits(words, 12, 8) * COPY_SIZES >> 8)
        back = _bits(words, 20, 12) * (COPY_WINDOW - size + 1) >> 12
        source = np.where(opening, now - size - back, source + (copying & (left > 1)))
        left = np.where(opening, size + 1, left - copying)
    return torch.from_numpy(np.ascontiguousarray(text.T)).flatten()
