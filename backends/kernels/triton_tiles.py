"""Launch shapes of the Triton attention kernels: tile sizes, warps, pipeline stages, pinned per chip.

They decide the order of summation, hence low-order bits: a row records them, and changing a pinned one
changes digests. No Triton is needed to read this file.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import torch


@dataclass(frozen=True)
class Tile:
    """Launch shape of one kernel: queries and keys a tile, warps, software-pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = 0  # cap a thread, so that more programs fit a multiprocessor; 0: none
    in_registers: bool = False  # hold the program's own tiles (q; q, do; k, v) in registers


@dataclass(frozen=True)
class LaunchShapes:
    """Pinned launch shapes of the three passes."""

    forward: Tile
    dkdv: Tile
    dq: Tile


# Pinned defaults by chip family and largest head_dim.  They decide the order of summation, hence
# low-order bits: changing one changes digests.
PINNED = {
    # One warp group a program and several programs a multiprocessor: one multiplies while another
    # exponentiates, which Triton doesn't arrange inside a program on this family.
    "sm90": {
        32: LaunchShapes(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
        64: LaunchShapes(Tile(64, 64, 4, 3, 0, True), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3)),
        128: LaunchShapes(Tile(64, 64, 4, 3, 0, True), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3, 0, True)),
        256: LaunchShapes(Tile(64, 32, 4, 3, 0, True), Tile(64, 64, 8, 2), Tile(128, 32, 8, 2)),
    },
    "sm100": {  # compiled ahead of time, never run
        64: LaunchShapes(Tile(128, 128, 8, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2)),
        128: LaunchShapes(Tile(128, 128, 8, 2), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2)),
        256: LaunchShapes(Tile(128, 64, 8, 2), Tile(32, 64, 8, 1), Tile(64, 32, 8, 2)),
    },
    "sm80": {  # also sm86, sm89, sm120: within 99 KiB a block; compiled ahead of time, never run
        64: LaunchShapes(Tile(64, 64, 4, 3), Tile(32, 64, 4, 2), Tile(64, 32, 4, 2)),
        128: LaunchShapes(Tile(64, 64, 4, 2), Tile(64, 64, 8, 2), Tile(64, 32, 4, 2)),
        256: LaunchShapes(Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 4, 1)),
    },
    # Within 192 KiB of unified buffer a vector core, 64/64/128 KiB of L0A/L0B/L0C and 512 KiB of L1 a
    # cube core, every fix; compiled ahead of time, never run. Warps and stages mean nothing there.
    "ascend910b": {
        128: LaunchShapes(Tile(64, 64, 4, 1), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
        256: LaunchShapes(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    },
}
ASCEND = (0, 0)  # stands for the compute capability that an NPU has none of
FP32 = LaunchShapes(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))  # no tensor cores
ASCEND_FP32 = replace(FP32, dkdv=Tile(16, 32, 4, 1))  # what fits at head_dim 256


def default_shapes(
    head_dim: int, dtype: torch.dtype, capability: tuple[int, int], stochastic: bool = False
) -> LaunchShapes:
    """The pinned launch shapes for a head_dim, dtype and compute capability.

    Args: stochastic the fix rounds O stochastically: bishengir-compile (1.2.0) does not finish on random
    words for more than 4096 elements. Fewer queries a tile change no row's order of summation.
    """
    if dtype == torch.float32:
        return ASCEND_FP32 if capability == ASCEND else FP32
    family = {0: "ascend910b", 9: "sm90", 10: "sm100"}.get(capability[0], "sm80")
    shapes = next(shapes for limit, shapes in PINNED[family].items() if head_dim <= limit)
    if stochastic and capability == ASCEND:
        padded = 1 << (head_dim - 1).bit_length()
        queries = min(shapes.forward.block_m, 4096 // padded)
        shapes = replace(shapes, forward=replace(shapes.forward, block_m=queries))
    return shapes


# torch.library operators take no dataclass: launch shapes travel as 18 integers, or none for the default.


def pack(shapes: LaunchShapes | None) -> list[int]:
    """The launch shapes as integers."""
    tiles = (shapes.forward, shapes.dkdv, shapes.dq) if shapes else ()
    return [int(n) for tile in tiles for n in astuple(tile)]


def unpack(packed: list[int]) -> LaunchShapes | None:
    """The inverse of `pack`."""
    if not packed:
        return None
    forward, dkdv, dq = (packed[i : i + 6] for i in (0, 6, 12))
    return LaunchShapes(_tile(forward), _tile(dkdv), _tile(dq))


def _tile(n: list[int]) -> Tile:
    return Tile(n[0], n[1], n[2], n[3], n[4], in_registers=bool(n[5]))
