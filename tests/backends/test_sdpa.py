"""PyTorch's own attention on the CPU, pinned: against FP64, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from backends.base import Call, Unsupported
from backends.cpu import CpuBackend
from backends.kernels.sdpa import SdpaKernel, cpu_sdpa_kernels
from bench.measure.inputs import Inputs, key_of, normal
from bench.measure.reference import Reference, attention_reference

KERNELS = cpu_sdpa_kernels()
# Unit roundoffs allowed: of FP32 many small ones add up, of BF16 and FP16 a few casts.
ROUNDOFFS = {
    torch.float32: 40 * 2.0**-24,
    torch.bfloat16: 4 * 2.0**-8,
    torch.float16: 4 * 2.0**-11,
}
SHAPES = [  # batch, kv heads, query heads a kv head, queries, keys, head_dim
    (1, 1, 1, 1, 1, 16),
    (2, 2, 2, 5, 5, 16),
    (1, 1, 3, 40, 133, 40),
    (1, 2, 2, 133, 40, 64),
    (1, 1, 1, 5, 33, 256),
]


def problem(shape: tuple[int, ...], causal: bool, dtype: torch.dtype, scale: float | None = None) -> Inputs:
    batch, kv_heads, groups, queries, keys, dim = shape
    rows, cols = (batch, kv_heads * groups, queries, dim), (batch, kv_heads, keys, dim)
    arrays = [
        normal(key_of("sdpa", name, *size), size)
        for name, size in (("q", rows), ("k", cols), ("v", cols), ("do", rows))
    ]
    return Inputs.quantized(dtype, *arrays, causal=causal, scale=scale)


def magnitudes(ref: Reference) -> dict[str, Tensor]:
    """What each result would be if every term were positive."""
    o = ref.p @ ref.v.abs()
    ds = ref.p * (ref.do.abs() @ ref.v.abs().mT + (ref.do.abs() * o).sum(-1, keepdim=True))
    return {
        "o": o,
        "dq": ref.scale * (ds @ ref.k.abs()),
        "dk": ref._fold(ref.scale * (ds.mT @ ref.q.abs())),
        "dv": ref._fold(ref.p.mT @ ref.do.abs()),
    }


def results(kernel: SdpaKernel, x: Inputs) -> dict[str, Tensor]:
    q, k, v = (t.clone().requires_grad_() for t in (x.q, x.k, x.v))
    o = kernel(q, k, v, causal=x.causal, scale=x.scale)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), x.do)
    return {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("dtype", ROUNDOFFS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_equals_the_reference(name: str, shape: tuple[int, ...], causal: bool, dtype: torch.dtype) -> None:
    """Causal with queries ≠ keys is top-left aligned: the reference is, so this pins it."""
    x = problem(shape, causal, dtype)
    ref = attention_reference(x)
    scales = magnitudes(ref)
    for output, value in results(KERNELS[name], x).items():
        assert value.dtype == dtype
        expected = getattr(ref, output)
        assert value.shape == expected.shape
        excess = (value.double() - expected).abs() - ROUNDOFFS[dtype] * scales[output]
        assert excess.max() <= 0, f"{output}: {excess.max()} beyond, at {int(excess.argmax())}"


@pytest.mark.parametrize("name", KERNELS)
def test_causal_is_top_left(name: str) -> None:
    x = problem((1, 1, 1, 3, 7, 16), True, torch.float32)
    o = KERNELS[name](x.q, x.k, x.v, causal=True)
    torch.testing.assert_close(o[:, :, 0], x.v[:, :, 0])
    shorter = KERNELS[name](x.q, x.k[:, :, :3], x.v[:, :, :3], causal=True)
    torch.testing.assert_close(o, shorter)


@pytest.mark.parametrize("name", KERNELS)
def test_scale_is_taken(name: str) -> None:
    x = problem((1, 1, 1, 5, 6, 16), False, torch.float32, scale=0.05)
    ref = attention_reference(x)
    o = KERNELS[name](x.q, x.k, x.v, causal=False, scale=0.05)
    torch.testing.assert_close(o.double(), ref.o, rtol=1e-5, atol=1e-6)
    default = KERNELS[name](x.q, x.k, x.v, causal=False)
    assert (default - o).abs().max() > 0.01


@pytest.mark.parametrize("name", KERNELS)
def test_forward_is_the_call_without_a_graph(name: str) -> None:
    x = problem((2, 2, 2, 5, 5, 16), True, torch.bfloat16)
    q = x.q.clone().requires_grad_()
    out = KERNELS[name].forward(q, x.k, x.v, causal=True)
    assert torch.equal(out.o, KERNELS[name](x.q, x.k, x.v, causal=True))
    assert not out.o.requires_grad
    assert out.lse is None


def test_the_two_are_different_implementations() -> None:
    x = problem((1, 1, 3, 40, 133, 40), False, torch.bfloat16)
    outputs = [kernel(x.q, x.k, x.v, causal=False) for kernel in KERNELS.values()]
    assert len(outputs) == 2
    assert not torch.equal(*outputs)


def test_nan_in_means_nan_out() -> None:
    # Of the math path; PyTorch 2.13's flash kernel for the CPU gives 0 for a row of NaN scores.
    x = problem((2, 2, 2, 5, 5, 16), False, torch.bfloat16)
    q = x.q.clone()
    q[0, 1, 2, 3] = torch.nan
    o = KERNELS["sdpa-math/stock"](q, x.k, x.v, causal=False)
    assert o[0, 1, 2].isnan().all()
    assert int(o.isnan().sum()) == 16


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("option", ["tile", "beta", "mantissa_bits", "implementation", "fix"])
def test_configure_refuses_every_option(name: str, option: str) -> None:
    kernel = KERNELS[name]
    assert kernel.option_names == frozenset()
    with pytest.raises(ValidationError, match=option):
        kernel.configure(**{option: 1})
    assert kernel.configure() == kernel


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's own reasons
def test_an_implementation_that_cannot_run_is_unsupported_not_replaced() -> None:
    # The flash kernel wants the last dimension contiguous; the math path takes any stride.
    x = problem((1, 1, 1, 5, 5, 16), False, torch.bfloat16)
    strided = x.q.mT.contiguous().mT
    expected = KERNELS["sdpa-math/stock"](x.q, x.k, x.v, causal=False)
    o = KERNELS["sdpa-math/stock"](strided, x.k, x.v, causal=False)
    torch.testing.assert_close(o, expected)
    with pytest.raises(Unsupported, match="flash"):
        KERNELS["sdpa-flash/stock"](strided, x.k, x.v, causal=False)


def test_the_pin_does_not_outlive_the_call() -> None:
    x = problem((1, 1, 1, 5, 5, 16), False, torch.bfloat16)
    before = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
    KERNELS["sdpa-math/stock"](x.q, x.k, x.v, causal=False)
    after = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
    assert before == after == (True, True)


def test_names_and_launch_facts() -> None:
    assert set(KERNELS) == {"sdpa-math/stock", "sdpa-flash/stock"}
    offered = CpuBackend().kernels()
    call = Call((1, 1, 8, 16), (1, 1, 8, 16), torch.bfloat16, torch.device("cpu"), causal=False)
    for name, kernel in KERNELS.items():
        assert kernel.name == name
        assert kernel.fix == "stock"
        assert torch.__version__ in kernel.launch_facts(call)["library"]
        assert name in offered


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", [(0, 4, 3, 16), (1, 4, 0, 16)])
def test_zero_size_batches_work(name: str, shape: tuple[int, ...]) -> None:
    q, k = torch.zeros(shape, requires_grad=True), torch.zeros(shape[0], 2, 5, 16)
    o = KERNELS[name](q, k, k, causal=True)
    assert o.shape == shape
    assert torch.autograd.grad(o.sum(), q)[0].shape == shape


def test_a_kernel_that_cannot_run_gives_pytorchs_reason() -> None:
    cudnn = SdpaKernel(algorithm="cudnn")
    x = torch.zeros(1, 1, 4, 16)
    with pytest.raises(Unsupported, match=r"PyTorch has no cudnn kernel for this: .+"):
        cudnn(x, x, x, causal=False)
