"""A step of training as CUDA graphs, which launch the very kernels of a plain step: the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class CapturedStep:
    """A step's two halves as CUDA graphs, for an attention that is the same each step.

    Capture after a few plain steps on the same stream: they compile, allocate and choose.
    """

    def __init__(self, gradients: Callable[[], tuple[Tensor, Tensor]], apply: Callable[[], None]):
        stream = torch.cuda.current_stream()
        self._gradients, self._apply = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._gradients, stream=stream):
            self._results = gradients()
        with torch.cuda.graph(self._apply, pool=self._gradients.pool(), stream=stream):
            apply()

    def gradients(self) -> tuple[Tensor, Tensor]:
        """What the captured function gave; the next call overwrites it."""
        self._gradients.replay()
        return self._results

    def apply(self) -> None:
        self._apply.replay()


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """On a CUDA device everything on one stream that is not the default one, as capture demands."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
