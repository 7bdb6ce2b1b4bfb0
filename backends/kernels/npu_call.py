"""Arguments of `npu_fusion_attention` and its gradient: made in one place, refused where they are wrong.

The vendor's operators answer much bad input with numbers instead of an error: a causal call without
a mask computes full attention, an unknown layout is taken for another one. So every keyword is named,
every call goes through `checked`, and a keyword that an older torch_npu lacks is an error.

This file needs no torch_npu: it makes dictionaries, and reads operator schemas.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from backends.base import Unsupported
from backends.kernels.base_kernel import FLOATS

Layout = Literal["BNSD", "BSND", "TND"]
LAYOUTS: dict[Layout, tuple[int, int]] = {
    "BNSD": (4, 1),
    "BSND": (4, 2),
    "TND": (3, 1),
}  # rank, heads
MAX_HEAD_DIM = 768
COMPRESSED = 2048  # the modes below read one triangle of this size, whatever the lengths
TOP_LEFT, BOTTOM_RIGHT = 2, 3  # sparse_mode: where the causal triangle is anchored
NO_LIMIT = 2**31 - 1  # of tokens before and after


_triangles: dict[torch.device, Tensor] = {}


def causal_triangle(device: torch.device) -> Tensor:
    """The [2048, 2048] mask of sparse_mode 2 and 3; True = masked out. Made once a device."""
    if device not in _triangles:
        mask = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)
        if type(mask) is not Tensor:  # a fake one, while tracing: not to be kept
            return mask
        _triangles[device] = mask
    return _triangles[device]


def forward_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    causal: bool,
    scale: float,
    sparse_mode: int = TOP_LEFT,
    mask: Tensor | None = None,
    ends_q: Sequence[int] | None = None,
    ends_kv: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of `npu_fusion_attention`.

    Args:
        q, k, v: BNSD [B, N, S, D], BSND [B, S, N, D] or TND [T, N, D] with sequences end to end.
        sparse_mode: of a causal call: 2 anchors the triangle top-left, 3 bottom-right.
        mask: instead of causal: bool [S, T], [B, 1, S, T] or [B, N, S, T], True = masked out.
        ends_q, ends_kv: TND alone: where each sequence ends, cumulative.
    """
    check_tensors(q, k, v, layout)
    _check_ends(q, k, layout, ends_q, ends_kv)
    if causal and mask is not None:
        raise ValueError("mask: not with causal, which has a mask of its own")
    if causal and sparse_mode not in (TOP_LEFT, BOTTOM_RIGHT):
        raise ValueError(f"sparse_mode: {sparse_mode}; allowed with causal: 2 (top-left), 3 (bottom-right)")
    return {
        "query": q,
        "key": k,
        "value": v,
        "head_num": q.shape[LAYOUTS[layout][1]],
        "input_layout": layout,
        "pse": None,
        "padding_mask": None,
        "atten_mask": causal_triangle(q.device) if causal else mask,
        "scale": float(scale),
        "keep_prob": 1.0,
        "pre_tockens": NO_LIMIT,
        "next_tockens": NO_LIMIT,
        "inner_precise": 0,
        "prefix": None,
        "actual_seq_qlen": None if ends_q is None else list(ends_q),
        "actual_seq_kvlen": None if ends_kv is None else list(ends_kv),
        "sparse_mode": sparse_mode if causal else 0,
        "gen_mask_parallel": True,
        "sync": False,
    }


def gradient_call(
    forward: dict[str, Any], do: Tensor, o: Tensor, softmax_max: Tensor, softmax_sum: Tensor
) -> dict[str, Any]:
    """Keyword arguments of `npu_fusion_attention_grad` for the forward call `forward`.

    The scale has another name there. softmax_max and softmax_sum: FP32, [B, N, S, 8] (BNSD, BSND) or
    [T, N, 8] (TND), eight equal values a row.
    """
    for name, x in (("softmax_max", softmax_max), ("softmax_sum", softmax_sum)):
        if x.dtype != torch.float32 or x.shape[-1] != 8:
            raise ValueError(f"{name}: {x.dtype} {list(x.shape)}; expected float32, 8 values a row")
    call = {name: value for name, value in forward.items() if name != "scale"}
    return call | {
        "scale_value": forward["scale"],
        "dy": do,
        "attention_in": o,
        "softmax_in": None,
        "softmax_max": softmax_max,
        "softmax_sum": softmax_sum,
        "seed": 0,
        "offset": 0,
        "numels": 0,
    }


def check_tensors(q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
    """One line for the first tensor that the kernel cannot take: ValueError, or Unsupported."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r}; allowed: {', '.join(LAYOUTS)}")
    rank, heads = LAYOUTS[layout]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != rank:
            raise ValueError(f"{name}: {x.dim()} dimensions; layout {layout} has {rank}")
        if x.dtype not in FLOATS:
            raise Unsupported(f"{name}: dtype {x.dtype}; allowed: bfloat16, float16, float32")
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise ValueError(f"{name}: {x.dtype} on {x.device}, but q is {q.dtype} on {q.device}")
    if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k, v: shapes {list(k.shape)}, {list(v.shape)}; q is {list(q.shape)}")
    if layout != "TND" and k.shape[0] != q.shape[0]:
        raise ValueError(f"k: batch of {k.shape[0]}; q has {q.shape[0]}")
    if q.shape[-1] > MAX_HEAD_DIM:
        raise Unsupported(f"head_dim {q.shape[-1]}: this kernel takes up to {MAX_HEAD_DIM}")
    if k.shape[heads] == 0 or q.shape[heads] % k.shape[heads]:
        raise ValueError(f"q: {q.shape[heads]} heads are not a multiple of k's {k.shape[heads]}")


def _check_ends(
    q: Tensor, k: Tensor, layout: str, ends_q: Sequence[int] | None, ends_kv: Sequence[int] | None
) -> None:
    for name, ends, tokens in (("ends_q", ends_q, q.shape[0]), ("ends_kv", ends_kv, k.shape[0])):
        if layout != "TND":
            if ends is not None:
                raise ValueError(f"{name}: only layout TND has sequences end to end, not {layout}")
        elif not ends:
            raise ValueError(f"{name}: layout TND needs the cumulative lengths of its sequences")
        elif ends[-1] != tokens or any(a > b for a, b in itertools.pairwise(ends)):
            raise ValueError(f"{name}: {list(ends)} do not rise to the {tokens} tokens there are")
    if ends_q and ends_kv and len(ends_q) != len(ends_kv):
        raise ValueError(f"ends_kv: {len(ends_kv)} sequences; ends_q has {len(ends_q)}")


def checked(schema: Any, call: dict[str, Any], version: str) -> dict[str, Any]:
    """`call`, if the operator's schema has every keyword of it and its mask masks what it should.

    Args: schema a `torch.FunctionSchema`; version of torch_npu, for the message.
    """
    known = {argument.name for argument in schema.arguments}
    if missing := sorted(call.keys() - known):
        raise Unsupported(
            f"torch_npu {version}: {schema.name} has no keyword {', '.join(missing)}; 2.6 to 2.14 have it"
        )
    _check_mask(call)
    return call


def _check_mask(call: dict[str, Any]) -> None:
    mask, sparse_mode = call["atten_mask"], call["sparse_mode"]
    if mask is None:
        if sparse_mode != 0:
            raise ValueError(
                f"atten_mask: missing with sparse_mode {sparse_mode}; the kernel would compute full "
                "attention without a word"
            )
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"atten_mask: {mask.dtype}; allowed: bool, True = masked out")
    allowed = [[COMPRESSED, COMPRESSED]] if sparse_mode else _mask_shapes(call)
    if list(mask.shape) not in allowed:
        raise ValueError(f"atten_mask: {list(mask.shape)}; allowed: {', '.join(map(str, allowed))}")


def _mask_shapes(call: dict[str, Any]) -> list[list[int]]:
    """Of a mask of one's own: [S, T], [B, 1, S, T], [B, N, S, T]."""
    q, k, layout = call["query"], call["key"], call["input_layout"]
    if layout == "TND":
        raise ValueError("atten_mask: with layout TND only the causal one")
    tokens = 3 - LAYOUTS[layout][1]  # the other of dimensions 1 and 2
    shape = [q.shape[tokens], k.shape[tokens]]
    return [shape, [q.shape[0], 1, *shape], [q.shape[0], call["head_num"], *shape]]
