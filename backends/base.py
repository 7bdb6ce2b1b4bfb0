"""What a platform and a kernel must offer. Cases see only this file, never a concrete backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from backends.knobs import Knob


class KernelOptions(BaseModel):
    """Base of a kernel's options: knobs of the algorithm that a config may vary (tile, beta, …)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Unsupported(Exception):
    """Raised when a kernel, backend or case cannot do what a unit asks; the text is the row's reason."""


@dataclass(frozen=True)
class Forward:
    """A forward pass without autograd: o [B, H, T, D]; lse [B, H, T] (natural log) where exposed."""

    o: Tensor
    lse: Tensor | None


@dataclass(frozen=True)
class Call:
    """What a launch may depend on, without the values: q_shape [B, Hq, T, D], kv_shape [B, Hkv, S, D]."""

    q_shape: tuple[int, ...]
    kv_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    causal: bool

    @classmethod
    def with_tensors(cls, q: Tensor, k: Tensor, causal: bool) -> Call:
        """The call with these tensors."""
        return cls(tuple(q.shape), tuple(k.shape), q.dtype, q.device, causal)


@runtime_checkable
class Kernel(Protocol):
    """One implementation with one fix. Shapes: q [B, Hq, T, D], k and v [B, Hkv, S, D], Hq % Hkv == 0.

    Causal means top-left aligned (query i sees keys 0..i), as PyTorch's `is_causal`.
    """

    @property
    def name(self) -> str:
        """`implementation/fix`, as in `eager-stored/stabilized`."""

    @property
    def fix(self) -> str:
        """A name of `backends.fixes.ALL_FIXES`."""

    @property
    def version(self) -> int:
        """Raised when its bits change on purpose; part of a row's key."""

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Input dtypes it takes."""

    @property
    def options(self) -> KernelOptions:
        """Its options at their present values."""

    @property
    def option_names(self) -> frozenset[str]:
        """The options that concern this kernel."""

    @property
    def strict(self) -> bool:
        """Whether it is deterministic only where PyTorch's `warn_only` is off, see `cases.algorithms`."""

    @property
    def draws(self) -> bool:
        """Whether it rounds at random: it then has an option `seed`."""

    def configure(self, **options: Any) -> Kernel:
        """The same kernel with some options changed; unknown names are an error."""

    def reseeded(self, key: int) -> Kernel:
        """The kernel with the random bits that a 128-bit key names, where it draws any; else itself."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        """o [B, Hq, T, D] in q's dtype; autograd works through it."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Forward:
        """The forward pass alone, with LSE where the implementation exposes it."""

    def launch_facts(self, call: Call) -> dict[str, Any]:
        """Tile sizes, warps, stages, library and version of a call that it takes; one is recorded with
        every row. Plain scalars."""


@dataclass(frozen=True)
class MachineFacts:
    """Facts of one backend. `identity` is compared and fixed for a submission; `volatile` is not.

    `identity` holds at least `accelerator`, the device's name, from which a submission's slug is made.
    """

    identity: dict[str, Any]
    volatile: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Backend(Protocol):
    """A platform with its kernels. Constructed only when asked for, so vendor imports stay lazy."""

    name: str
    device: torch.device

    def kernels(self) -> Mapping[str, Kernel]:
        """Every kernel this machine can run, by name."""

    def facts(self) -> MachineFacts:
        """Identity and volatile facts; nothing personal (no user, host name, path, address)."""

    def knobs(self) -> Mapping[str, Knob]:
        """Settings besides torch's deterministic switch, by the names under which `facts` records them."""

    def deterministic(self) -> AbstractContextManager[None]:
        """Sets every determinism knob for the duration of a unit and restores it afterwards."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def peak_memory(self) -> int | None:
        """Peak device memory in bytes since the process began, or None where it is not known."""

    def time_ms(self, run: Callable[[], object], rounds: int) -> list[float]:
        """Milliseconds of each of `rounds` calls, after warm-up, caches of the device flushed."""

    def memory_of(self, run: Callable[[], object]) -> int | None:
        """Peak device memory in bytes that one call allocates on top; None where not known."""
