"""What decides bits outside of a kernel: set for the duration of a unit, put back afterwards."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Knob:
    """A setting of a library and the value that a measurement wants."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    value: Any


def attribute(owner: object, name: str, value: Any) -> Knob:
    """A setting that is an attribute, as `torch.backends.cudnn.allow_tf32`."""
    return Knob(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


@contextlib.contextmanager
def deterministic(knobs: Mapping[str, Knob], warn_only: bool) -> Iterator[None]:
    """torch's deterministic algorithms and the knobs; every one is put back, whatever happens.

    `warn_only`: what has no deterministic version runs as users run it, without a warning, and the case
    measures it; else torch refuses it.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    before = {name: knob.get() for name, knob in knobs.items()}
    try:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        for knob in knobs.values():
            knob.set(knob.value)
        with warnings.catch_warnings():
            if warn_only:
                warnings.filterwarnings("ignore", message=".*determinis.*")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warned)
        for name, knob in knobs.items():
            knob.set(before[name])


def recorded(knobs: Mapping[str, Knob]) -> dict[str, Any]:
    """What a backend's facts say of them."""
    return {"deterministic_algorithms": True} | {name: knob.value for name, knob in knobs.items()}
