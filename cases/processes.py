"""The processes of a `torchrun`: which one this is, and the little that they say to each other.

Without torchrun there is one process, and everything here is free. `bench.run.distributed` brings them
together and parts them. torch is imported where processes talk: the command line asks who it is before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from bench.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Rank 0: the only one that writes and prints."""
        return self.rank == 0


def launched() -> bool:
    """Whether torchrun started this process; `torch.distributed.is_torchelastic_launched` without torch."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def world() -> World:
    """This process: torchrun says so in the environment, whether or not `join` was called yet."""
    if not launched():
        return World()
    return World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def from_main(value: T) -> T:
    """Rank 0's value, on every rank."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def together(action: Callable[[], T]) -> T:
    """Do `action` on every rank. If it is refused on any, it is refused on all, with the same line."""
    import torch.distributed as dist

    result: T | None = None
    refusal = ""
    try:
        result = action()
    except UsageError as error:
        refusal = str(error)
    if dist.is_initialized():
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, refusal)
        refusal = next((text for text in found if text), "")
    if refusal:
        raise UsageError(refusal)
    return result  # type: ignore[return-value]


def gather_numbers(values: Tensor) -> Tensor:
    """[n] of every rank as [ranks, n], in rank order, on every rank."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return values[None]
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return torch.stack(found)
