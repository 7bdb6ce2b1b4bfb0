"""A stand-in for the vendor's two operators on stock torch, under the schema of any recorded torch_npu.

It does on the CPU what the documents say: masks, layouts, statistics eight times a row, and full attention
without a word where a causal call brings no mask. The dispatcher checks every call against the schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures" / "torch_npu_schemas.json").read_text())
VERSIONS: dict[str, Any] = FIXTURE["versions"]
FORWARD, GRADIENT = "npu_fusion_attention", "npu_fusion_attention_grad"


def recorded(version: str, operator: str) -> str:
    return str(VERSIONS[version]["schemas"][operator]["default"])


@contextmanager
def vendor(forward: str, gradient: str) -> Iterator[None]:
    """`torch.ops.npu` with the two operators under these schemas."""
    library = torch.library.Library("npu", "FRAGMENT")
    try:
        for schema, function in ((forward, _attention), (gradient, _gradient)):
            library.define(schema.removeprefix("npu::"))
            name = schema.removeprefix("npu::").partition("(")[0]
            library.impl(name, function, "CompositeImplicitAutograd")
        yield
    finally:
        library._destroy()


def _heads_first(x: Tensor, layout: str, ends: list[int] | None) -> Tensor:
    """[B, N, S, D] in float64; TND must hold sequences of equal length here."""
    if layout == "TND":
        assert ends is not None
        x = x.unflatten(0, (len(ends), -1))
    return (x if layout == "BNSD" else x.transpose(1, 2)).double()


def _as_given(x: Tensor, layout: str) -> Tensor:
    x = x if layout == "BNSD" else x.transpose(1, 2)
    return x.flatten(0, 1) if layout == "TND" else x


def _logits(q: Tensor, k: Tensor, mask: Tensor | None, sparse_mode: int, scale: float) -> Tensor:
    s = scale * (q @ k.mT)
    if mask is None:  # whatever sparse_mode says
        return s
    if sparse_mode in (2, 3):
        offset = k.shape[2] - q.shape[2] if sparse_mode == 3 else 0
        mask = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + offset)
    return s.masked_fill(mask, -torch.inf)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: None = None,
    padding_mask: None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2**31 - 1,
    next_tockens: int = 2**31 - 1,
    inner_precise: int = 0,
    prefix: None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    *_: Any,
    **__: Any,
) -> tuple[Any, ...]:
    q = _heads_first(query, input_layout, actual_seq_qlen)
    k, v = (_heads_first(x, input_layout, actual_seq_kvlen) for x in (key, value))
    assert q.shape[1] == head_num
    k, v = (x.repeat_interleave(head_num // x.shape[1], 1) for x in (k, v))
    s = _logits(q, k, atten_mask, sparse_mode, scale)
    m = s.amax(-1, keepdim=True)
    total = torch.exp(s - m).sum(-1, keepdim=True)
    o = _as_given(torch.softmax(s, -1) @ v, input_layout).to(query.dtype)
    statistics = [x.detach().float().expand(*x.shape[:-1], 8).contiguous() for x in (m, total)]
    if input_layout == "TND":
        statistics = [_as_given(x, "TND") for x in statistics]
    return o, *statistics, query.new_empty(0), 0, 0, 0


def _gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float = 1.0,
    sparse_mode: int = 0,
    **_: Any,
) -> tuple[Tensor, ...]:
    q, do, o = (_heads_first(x, input_layout, None) for x in (query, dy, attention_in))
    k, v = (_heads_first(x, input_layout, None) for x in (key, value))
    groups = head_num // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
    s = _logits(q, wide_k, atten_mask, sparse_mode, scale_value)
    p = torch.exp(s - softmax_max[..., :1].double()) / softmax_sum[..., :1].double()
    ds = p * (do @ wide_v.mT - (do * o).sum(-1, keepdim=True))
    dq, dk, dv = scale_value * ds @ wide_k, scale_value * ds.mT @ q, p.mT @ do
    dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
    grads = (x.to(query.dtype) for x in (dq, dk, dv))
    return *grads, query.new_empty(0), query.new_empty(0)
