"""A synthetic language made from integers alone: the same 400 000 tokens on every machine.

Words with Zipf frequencies, likely successors and copied spans: enough structure that a small GPT
learns to look back, and nothing to download or to license. No float decides a token.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

VOCABULARY = 64  # 60 letters and four marks
LETTERS = 60
SPACE, NEWLINE, OPEN, CLOSE = 60, 61, 62, 63
WORDS = 256
LENGTH = 400_000
COPY_WINDOW = 72  # tokens back that a copied span may begin
_SEED = 0x9E3779B9
_MASK = 0xFFFFFFFF


class Xorshift32:
    """Marsaglia's xorshift32 (13, 17, 5): 32-bit words, period 2^32 − 1."""

    def __init__(self, seed: int):
        if not 0 < seed <= _MASK:
            raise ValueError(f"seed: {seed} is not between 1 and 2^32 - 1")
        self.state = seed

    def word(self) -> int:
        x = self.state
        x ^= (x << 13) & _MASK
        x ^= x >> 17
        x ^= (x << 5) & _MASK
        self.state = x
        return x

    def below(self, n: int) -> int:
        """An integer in [0, n): the high half of the 64-bit product, so that high bits count."""
        return (self.word() * n) >> 32


class Lexicon:
    """256 words of 1 to 4 letters, their Zipf weights 2^16 // rank, four likely successors each."""

    def __init__(self, draw: Xorshift32):
        self.words = [[draw.below(LETTERS) for _ in range(1 + draw.below(4))] for _ in range(WORDS)]
        self.cumulative = list(accumulate(2**16 // rank for rank in range(1, WORDS + 1)))
        self.successors = [[self.zipf(draw) for _ in range(4)] for _ in range(WORDS)]

    def zipf(self, draw: Xorshift32) -> int:
        return bisect_right(self.cumulative, draw.below(self.cumulative[-1]))

    def next(self, word: int, draw: Xorshift32) -> int:
        """With 9 chances in 16 a likely successor (weights 4, 2, 2, 1), else a fresh Zipf draw."""
        chance = draw.below(16)
        likely = (0, 0, 0, 0, 1, 1, 2, 2, 3)
        return self.successors[word][likely[chance]] if chance < 9 else self.zipf(draw)


@lru_cache(maxsize=1)
def tokens(length: int = LENGTH) -> Tensor:
    """The text, int64 [length], values in [0, 64).

    After each word a space; a newline after six words or more (one chance in four each). One step in
    16 copies 4 to 15 tokens from the last 72 between brackets instead of saying a word.
    """
    draw = Xorshift32(_SEED)
    lexicon = Lexicon(draw)
    text: list[int] = []
    word, in_line = 0, 0
    while len(text) < length:
        if draw.below(16) == 0 and len(text) >= COPY_WINDOW:
            size = 4 + draw.below(12)
            start = len(text) - size - draw.below(COPY_WINDOW - size + 1)
            text += [OPEN, *text[start : start + size], CLOSE, SPACE]
            continue
        word = lexicon.next(word, draw)
        text += [*lexicon.words[word], SPACE]
        in_line += 1
        if in_line >= 6 and draw.below(4) == 0:
            text[-1] = NEWLINE
            in_line = 0
    return torch.tensor(text[:length])
