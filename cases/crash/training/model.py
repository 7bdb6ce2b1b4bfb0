"""A small GPT whose attention is the kernel under test; weights from integers, the same everywhere.

Pre-norm blocks, learned positions, LayerNorm without bias, no biases, GELU, tied head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measure.inputs import key_of, normal, tensor_bytes, to_storage

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v) [B, H, T, D] → o
INIT_STD = 0.02  # of every matrix; of the two that write to the residual stream, over √(2·layers)


@dataclass(frozen=True)
class Size:
    """Shape of the model."""

    layers: int = 3
    width: int = 64
    context: int = 128
    mlp_ratio: int = 2
    vocabulary: int = 64
    heads: int = 1

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class Block(nn.Module):
    """x + W_O·attention(W_Q x, W_K x, W_V x), then x + W_2·gelu(W_1 x); both after LayerNorm."""

    def __init__(self, size: Size, layer: int):
        super().__init__()
        self.layer, self.heads = layer, size.heads
        width, hidden = size.width, size.mlp_ratio * size.width
        self.norm_attention = nn.Parameter(torch.ones(width))
        self.w_q, self.w_k, self.w_v, self.w_o = (_matrix(width, width) for _ in range(4))
        self.norm_mlp = nn.Parameter(torch.ones(width))
        self.w_1, self.w_2 = _matrix(hidden, width), _matrix(width, hidden)

    def forward(self, x: Tensor, attention: Attend) -> Tensor:
        h = F.layer_norm(x, x.shape[-1:], self.norm_attention)  # [B, T, C]
        q, k, v = (self._heads(h @ w.T) for w in (self.w_q, self.w_k, self.w_v))  # [B, H, T, D]
        o = attention(self.layer, q, k, v).transpose(1, 2).flatten(2)  # [B, T, C]
        x = x + o @ self.w_o.T
        h = F.layer_norm(x, x.shape[-1:], self.norm_mlp)
        return x + F.gelu(h @ self.w_1.T) @ self.w_2.T

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, C] → [B, H, T, D]"""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class GPT(nn.Module):
    """Token ids int64 [B, T] → logits [B, T, vocabulary], FP32 but under autocast."""

    def __init__(self, size: Size):
        super().__init__()
        self.size = size
        self.embedding = _matrix(size.vocabulary, size.width)  # and head
        self.positions = _matrix(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size, layer) for layer in range(size.layers))
        self.norm = nn.Parameter(torch.ones(size.width))

    def forward(self, ids: Tensor, attention: Attend) -> Tensor:
        x = F.embedding(ids, self.embedding) + self.positions[: ids.shape[1]]  # [B, T, C]
        for block in self.blocks:
            x = block(x, attention)
        return F.layer_norm(x, x.shape[-1:], self.norm) @ self.embedding.T


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(rows, columns))


@lru_cache(maxsize=1)
def initial_weights(name: str, size: Size, seed: int) -> tuple[tuple[str, Tensor], ...]:
    """(parameter, FP32 values) of a fresh model, in order: gains 1, matrices N(0, 0.02²) from integers.

    Not to be changed: a run makes its model and its digest from one set.
    """
    return tuple(_initial_weights(name, size, seed))


def _initial_weights(name: str, size: Size, seed: int) -> Iterator[tuple[str, Tensor]]:
    residual = (2 * size.layers) ** -0.5
    for parameter, values in GPT(size).named_parameters():
        if values.dim() == 1:
            yield parameter, torch.ones_like(values)
            continue
        std = INIT_STD * (residual if parameter.endswith(("w_o", "w_2")) else 1.0)
        sample = normal(key_of(name, seed, parameter), tuple(values.shape))
        yield parameter, to_storage(std * sample, torch.float32)


def hash_weights(h: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Add names, shapes and bytes of parameters to a sha256."""
    for parameter, values in weights:
        h.update(f"{parameter} {tuple(values.shape)}".encode())
        h.update(tensor_bytes(values))


def fresh_model(name: str, size: Size, seed: int) -> GPT:
    """The model of a seed, on the host."""
    model = GPT(size)
    model.load_state_dict(dict(initial_weights(name, size, seed)))
    return model
