"""One place that refuses bad arguments to a kernel: which argument, what it was, what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from backends.base import Unsupported


def check_qkv(q: Tensor, k: Tensor, v: Tensor, *, dtypes: frozenset[torch.dtype], max_head_dim: int) -> None:
    """q [B, Hq, T, D]; k, v [B, Hkv, S, D]. Raises ValueError (malformed) or Unsupported."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected [batch, heads, tokens, head_dim], got {list(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name}: {x.dtype} on {x.device} differs from q's {q.dtype} on {q.device}")
    if k.shape != v.shape:
        raise ValueError(f"v: shape {list(v.shape)} differs from k's {list(k.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"k: batch and head_dim of {list(k.shape)} differ from q's {list(q.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q: {q.shape[1]} heads are not a multiple of k's {k.shape[1]}")
    if k.shape[2] == 0 or q.shape[3] == 0:
        raise ValueError(f"k: no keys or no channels to attend to, shape {list(k.shape)}")
    if q.dtype not in dtypes:
        allowed = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise Unsupported(f"dtype {str(q.dtype).removeprefix('torch.')}: this kernel takes {allowed}")
    if q.shape[3] > max_head_dim:
        raise Unsupported(f"head_dim {q.shape[3]}: this kernel takes up to {max_head_dim}")
