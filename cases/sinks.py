"""Inputs with planted attention sinks: identical keys that hold each row's maximum.

Channel 1 carries the sinks' score, channels 2 to 7 stay zero, channel 0 is left free for a probe.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from bench.measure.inputs import Float64Array, Inputs, key_of, normal, signs

ValueSign = Literal["negative", "positive", "mixed"]
SCALE = 0.125  # 1/sqrt(64), a power of two: scaling S is exact
HEAD_DIM = 64
SINK = 4.0  # the sink keys' channel 1


def value_signs(stream: str, seed: int, value_sign: ValueSign, shape: tuple[int, ...]) -> Float64Array:
    """s = ±1 per (batch, dim) for `mixed`, else one sign everywhere."""
    if value_sign == "mixed":
        return signs(key_of(stream, seed, "sign"), shape)
    return np.full(shape, -1.0 if value_sign == "negative" else 1.0)


def sink_inputs(
    stream: str,
    seed: int,
    dtype: torch.dtype,
    *,
    sinks: list[int],
    gap: float,
    row_jitter: float,
    value_sign: ValueSign,
    keys: int = 128,
    quiet_values: bool = False,
    probe: float = 0.0,
    batch: int = 8,
    queries: int = 256,
) -> Inputs:
    """q, do [batch, 1, queries, 64] and k, v [batch, 1, keys, 64], non-causal.

    Each row's maximum is about `gap` + `row_jitter`·N(0,1), held by every key in `sinks`, over other
    scores of about ±2. v = s·(2.3 + 0.3·N(0,1)), or 0.5·N(0,1) outside the sinks if `quiet_values`;
    do = s·1e-2 + 1e-3·N(0,1). `probe` is the keys' channel 0 (q's stays 0: S is untouched).
    """

    def noise(name: str, *shape: int) -> Float64Array:
        return normal(key_of(stream, seed, name), shape)

    q = 0.5 * noise("q", batch, 1, queries, HEAD_DIM)
    k = 0.5 * noise("k", batch, 1, keys, HEAD_DIM)
    q[..., :8] = 0
    k[..., :8] = 0
    k[:, :, sinks] = 0
    k[:, :, sinks, 1] = SINK
    k[..., 0] = probe
    row_max = gap + row_jitter * noise("row_max", batch, 1, queries)
    q[..., 1] = row_max / (SCALE * SINK)
    s = value_signs(stream, seed, value_sign, (batch, 1, 1, HEAD_DIM))
    v = s * (2.3 + 0.3 * noise("v", batch, 1, keys, HEAD_DIM))
    if quiet_values:
        others = [key for key in range(keys) if key not in sinks]
        v[:, :, others] = 0.5 * noise("quiet_v", batch, 1, len(others), HEAD_DIM)
    do = s * 1e-2 + 1e-3 * noise("do", batch, 1, queries, HEAD_DIM)
    return Inputs.quantized(dtype, q, k, v, do, scale=SCALE)
