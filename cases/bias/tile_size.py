"""`bias/tile_size`: does the bias need tiling?"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from bench.measure.inputs import Inputs
from cases.base import BiasParams, CaseParams, Metrics, bias_verdict
from cases.bias.tie_break import TieBreak
from cases.sinks import ValueSign, sink_inputs

KEYS = 512


class Params(BiasParams):
    placement: Literal["same_tile", "across_tiles"] = "same_tile"  # of the two sinks
    gap: Annotated[float, Field(ge=0, le=80)] = 12.0
    row_jitter: Annotated[float, Field(ge=0, le=8)] = 0.5
    value_sign: ValueSign = "mixed"


class TileSize(TieBreak):
    """Claim (arXiv 2510.04212, table of isolation experiments): with the tile as long as the sequence
    training still fails, so tiling is not the cause. A per-tile rule, on the other hand, can only see
    repeats within its tile.

    Inputs: as in `bias/tie_break` with 512 keys and two sinks, at keys 0 and 1 (`same_tile`) or 0 and
    511 (`across_tiles`). Vary the option `tile` (0 = the whole sequence); the row records it.

    Verdict: as in `bias/tie_break`, per tile size: compare the rows.

    Findings: eager-stored/stock keeps its bias with one tile, and the shift cannot see sinks that
    stand in different tiles: there `stabilized` equals `stock`.
    """

    name = "bias/tile_size"
    Params = Params  # type: ignore[assignment]
    subject = None  # type: ignore[assignment]  # `bias/tie_break` answers that
    told_at = {}

    def inputs(self, params: CaseParams, dtype: torch.dtype, seed: int) -> Inputs:
        assert isinstance(params, Params)
        sinks = [0, 1] if params.placement == "same_tile" else [0, KEYS - 1]
        return sink_inputs(
            self.name,
            seed,
            dtype,
            sinks=sinks,
            gap=params.gap,
            row_jitter=params.row_jitter,
            value_sign=params.value_sign,
            keys=KEYS,
        )

    def verdict(self, params: CaseParams, metrics: Metrics) -> str:
        assert isinstance(params, Params)
        return bias_verdict(params, metrics)
