"""A kernel's forward and backward pass on the backend's device, results back on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backends.base import Backend, Kernel
from bench.measure.inputs import Inputs, digest


@dataclass(frozen=True)
class Gradients:
    """One forward and backward pass of a kernel, back on the host: o, dq, dk, dv in the dtype."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def digests(self) -> dict[str, str]:
        return {name: digest(getattr(self, name)) for name in ("o", "dq", "dk", "dv")}


def forward_backward(kernel: Kernel, backend: Backend, inputs: Inputs) -> Gradients:
    """Run `kernel` with autograd on the backend's device, upstream gradient `inputs.do`."""
    on_device = inputs.to(backend.device)
    q, k, v = (x.clone().requires_grad_() for x in (on_device.q, on_device.k, on_device.v))
    o = kernel(q, k, v, causal=inputs.causal, scale=inputs.scale)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), on_device.do)
    return Gradients(*(x.detach().cpu() for x in (o, dq, dk, dv)))


def forward_only(kernel: Kernel, backend: Backend, inputs: Inputs) -> tuple[Tensor, dict[str, str]]:
    """O of `kernel` on the host, with the digests of O and, where exposed, of LSE."""
    x = inputs.to(backend.device)
    with torch.no_grad():
        result = kernel.forward(x.q, x.k, x.v, causal=x.causal, scale=x.scale)
    digests = {"o": digest(result.o)}
    if result.lse is not None:
        digests["lse"] = digest(result.lse)
    return result.o.cpu(), digests
