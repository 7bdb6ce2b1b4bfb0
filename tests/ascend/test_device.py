"""Tier D: on a 910B itself. Elsewhere every test here is reported as not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.base import Unsupported
from bench.measure.inputs import Inputs, digest, key_of, normal
from bench.measure.reference import attention_reference
from bench.run.registry import load_backend
from cases.passes import forward_backward, forward_only

pytestmark = pytest.mark.requires_npu
OURS = ("composite/", "eager-fused/", "eager-stored/", "triton/")


def problem(queries: int, keys: int, causal: bool, heads: tuple[int, int] = (4, 2)) -> Inputs:
    rows, cols = (2, heads[0], queries, 64), (2, heads[1], keys, 64)
    q, do = (normal(key_of("npu-device", name), rows) for name in ("q", "do"))
    k, v = (normal(key_of("npu-device", name), cols) for name in ("k", "v"))
    k[:, :, 1::2] = k[:, :, : keys - 1 : 2]
    return Inputs.quantized(torch.bfloat16, q, k, v, do, causal=causal)


def relative_errors(kernel: Any, backend: Any, x: Inputs) -> dict[str, float]:
    ref = attention_reference(x)
    with backend.deterministic():
        grads = forward_backward(kernel, backend, x)
    pairs = {name: (getattr(grads, name).double(), getattr(ref, name)) for name in ("o", "dq", "dk", "dv")}
    return {name: float((a - b).abs().max() / b.abs().max()) for name, (a, b) in pairs.items()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (127, 127), (192, 133), (2304, 2304)])
def test_every_kernel_is_right(queries: int, keys: int, causal: bool) -> None:
    """2304 keys lie beyond the 2048 of the compressed mask."""
    backend, x = load_backend("ascend"), problem(queries, keys, causal)
    for name, kernel in backend.kernels().items():
        if name.startswith("eager-ladder/"):
            continue  # float32 alone, for training
        for tensor, error in relative_errors(kernel, backend, x).items():
            assert error < 0.03, f"{name} {tensor}"


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "TND"])
@pytest.mark.parametrize("sparse_mode", [2, 3])
def test_layouts_and_masks_of_the_vendors_kernel(layout: str, sparse_mode: int) -> None:
    backend, x = load_backend("ascend"), problem(256, 256, True)
    kernel = backend.kernels()["npu-fusion/stock"].configure(layout=layout, sparse_mode=sparse_mode)
    assert max(relative_errors(kernel, backend, x).values()) < 0.03
    lse = kernel.forward(*(t.to(backend.device) for t in (x.q, x.k, x.v)), causal=True).lse
    assert lse is not None
    assert (lse.cpu().double() - attention_reference(x).lse).abs().max() < 0.01


def test_the_vendors_gradient_takes_our_shift() -> None:
    """The one kernel that is right on paper alone so far: see docs/ascend.md."""
    backend, x = load_backend("ascend"), problem(256, 256, True)
    kernel = backend.kernels()["composite/stabilized+vendor-backward"]
    assert max(relative_errors(kernel, backend, x).values()) < 0.03


def test_composite_agrees_with_the_host_within_roundings_of_o() -> None:
    backend, host, x = load_backend("ascend"), load_backend("cpu"), problem(256, 256, True)
    for fix in ("stock", "stabilized", "delta_fp32", "stochastic"):
        ours, _ = forward_only(backend.kernels()[f"composite/{fix}"], backend, x)
        theirs, _ = forward_only(host.kernels()[f"eager-fused/{fix}"], host, x)
        equal = float((ours == theirs).double().mean())
        assert equal > 0.95, f"{fix}: {equal:.3f} of the elements are the same bits"


def test_the_same_bits_twice() -> None:
    backend, x = load_backend("ascend"), problem(256, 256, True)
    for name, kernel in backend.kernels().items():
        if not name.startswith((*OURS, "npu-fusion/")):
            continue
        with backend.deterministic():
            runs = [forward_backward(kernel, backend, x).digests() for _ in range(5)]
        assert all(run == runs[0] for run in runs), name


def test_the_device_adds_in_float32() -> None:
    """HF32 off: 2^-12 next to 1 survives a product."""
    backend = load_backend("ascend")
    x = torch.tensor([[1 + 2**-12, 0.0], [0.0, 1.0]], device=backend.device)
    with backend.deterministic():
        assert digest(x @ torch.eye(2, device=backend.device)) == digest(x)


def test_time_and_memory_are_of_the_device() -> None:
    backend = load_backend("ascend")
    x = torch.ones(4096, 4096, dtype=torch.bfloat16, device=backend.device)
    assert all(time > 0 for time in backend.time_ms(lambda: x @ x, rounds=3))
    assert (backend.memory_of(lambda: x @ x) or 0) >= 4096 * 4096 * 2


def test_bad_input_stays_one_clear_line() -> None:
    backend = load_backend("ascend")
    q = torch.zeros(1, 4, 8, 776, dtype=torch.bfloat16, device=backend.device)
    with pytest.raises(Unsupported, match="head_dim 776: this kernel takes up to 768"):
        backend.kernels()["npu-fusion/stock"](q, q, q, causal=True)
