"""Every kernel of the suite by name, free of torch: what a config may ask for on any machine.

`triton/*` is no mistake on a laptop, `tritn/*` is one everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.fixes import ABLATIONS, FIXES

STOCK = ("stock",)


@dataclass(frozen=True)
class Implementation:
    """A family of kernels. Raise `version` where its bits change on purpose: the rows of older versions
    are then stale."""

    name: str
    fixes: tuple[str, ...] = STOCK  # what stands after the slash in a kernel's name
    version: int = 1


IMPLEMENTATIONS: dict[str, Implementation] = {
    implementation.name: implementation
    for implementation in (
        # Ours, with every fix.
        Implementation("eager-stored", tuple(FIXES)),
        Implementation("eager-fused", tuple(FIXES)),
        Implementation("eager-ladder", (*FIXES, *ABLATIONS)),
        Implementation("triton", tuple(FIXES)),
        Implementation("composite", (*FIXES, "stabilized+vendor-backward")),
        # Closed: other libraries', as they are.
        Implementation("sdpa-math"),
        Implementation("sdpa-flash"),
        Implementation("sdpa-cudnn"),
        Implementation("sdpa-efficient"),
        Implementation("flex"),
        Implementation("flash-attn-2"),
        Implementation("flash-attn-3"),
        Implementation("flash-attn-4"),
        Implementation("npu-fusion"),
    )
}
KNOWN_KERNELS = tuple(f"{known.name}/{fix}" for known in IMPLEMENTATIONS.values() for fix in known.fixes)


def kernel_version(kernel: str) -> int:
    """Today's version of `implementation/fix`; 1 for a kernel that the suite does not know."""
    known = IMPLEMENTATIONS.get(kernel.partition("/")[0])
    return known.version if known else 1
