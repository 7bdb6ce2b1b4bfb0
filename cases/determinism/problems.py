"""A plain random problem for the determinism cases."""

from __future__ import annotations

from typing import Annotated, Self

import torch
from pydantic import Field, model_validator

from bench.measure.inputs import Inputs, key_of, normal, to_storage
from cases.base import CaseParams


class ProblemParams(CaseParams):
    batch: Annotated[int, Field(ge=2, le=64)] = 4
    heads: Annotated[int, Field(ge=1, le=64)] = 4
    kv_heads: Annotated[int, Field(ge=1, le=64)] = 2
    tokens: Annotated[int, Field(ge=1, le=8192)] = 256
    head_dim: Annotated[int, Field(ge=1, le=256)] = 64
    causal: bool = True

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return self


def problem_values(params: ProblemParams) -> int:
    """Values of q, k, v and do of one seed."""
    heads = 2 * (params.heads + params.kv_heads)
    return params.batch * heads * params.tokens * params.head_dim


def random_inputs(stream: str, params: ProblemParams, dtype: torch.dtype, seed: int) -> Inputs:
    """q, k, v, do ~ N(0, 1) in the storage dtype; scale 1/sqrt(head_dim)."""

    def tensor(name: str, heads: int) -> torch.Tensor:
        shape = (params.batch, heads, params.tokens, params.head_dim)
        return to_storage(normal(key_of(stream, seed, name), shape), dtype)

    q, do = tensor("q", params.heads), tensor("do", params.heads)
    return Inputs(q, tensor("k", params.kv_heads), tensor("v", params.kv_heads), do, params.causal)
