"""What is measured. One file a case; this table is the registry.

Adding a case: write `cases/<group>/<name>.py` with a subclass of `cases.base.Case`, and add its line here
(DESIGN.md, "A case").
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from bench.errors import UsageError, nearest

if TYPE_CHECKING:  # a case's module, and torch, are imported when its name is asked for
    from cases.base import Case

CASES: dict[str, str] = {
    "bias/bf16_addition": "cases.bias.bf16_addition:Bf16Addition",
    "bias/tie_break": "cases.bias.tie_break:TieBreak",
    "bias/normalizer": "cases.bias.normalizer:Normalizer",
    "bias/leak": "cases.bias.leak:Leak",
    "bias/shift_range": "cases.bias.shift_range:ShiftRange",
    "bias/tile_size": "cases.bias.tile_size:TileSize",
    "bias/low_rank": "cases.bias.low_rank:LowRank",
    "determinism/run_to_run": "cases.determinism.run_to_run:RunToRun",
    "determinism/batch_invariance": "cases.determinism.batch_invariance:BatchInvariance",
    "crash/drift": "cases.crash.drift:Drift",
    "crash/ladder": "cases.crash.ladder:Ladder",
    "crash/gpt2": "cases.crash.gpt2.case:Gpt2",
    "speed/attention": "cases.speed.attention:SpeedAttention",
}


@cache
def load_case(name: str) -> Case[Any]:
    """The case registered as `name`; UsageError with the nearest name otherwise."""
    if name not in CASES:
        raise UsageError(f"unknown case '{name}'{nearest(name, CASES)}")
    module, _, attribute = CASES[name].partition(":")
    case: Case[Any] = getattr(importlib.import_module(module), attribute)()
    return case


def known_case(name: str) -> Case[Any] | None:
    """The same; None for a name that this version does not know, as a result file may hold."""
    return load_case(name) if name in CASES else None
