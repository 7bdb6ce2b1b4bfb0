"""The vendor's NPU kernel without an NPU: every call against every recorded schema, masks, layouts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from npu_double import FORWARD, GRADIENT, VERSIONS, recorded, vendor
from torch import Tensor

from backends.base import Call, Unsupported
from backends.kernels.npu_call import LAYOUTS, checked, forward_call, gradient_call
from backends.kernels.npu_fusion import FusionKernel, VendorBackwardKernel
from bench.measure.inputs import Inputs, key_of, normal
from bench.measure.reference import attention_reference
from cases.passes import forward_backward


class Host:
    """As much of a backend as `forward_backward` asks for."""

    device = torch.device("cpu")


def problem(causal: bool, queries: int = 40, keys: int = 40) -> Inputs:
    """GQA 2:1, FP32, every second key a twin of the one before it."""
    rows, cols = (2, 4, queries, 16), (2, 2, keys, 16)
    q, do = (normal(key_of("npu", name), rows) for name in ("q", "do"))
    k, v = (normal(key_of("npu", name), cols) for name in ("k", "v"))
    k[:, :, 1::2] = k[:, :, : keys - 1 : 2]
    return Inputs.quantized(torch.float32, q, k, v, do, causal=causal)


def assert_equals_reference(kernel: Any, x: Inputs) -> None:
    ref, got = attention_reference(x), forward_backward(kernel, Host(), x)  # type: ignore[arg-type]
    for name in ("o", "dq", "dk", "dv"):
        error = (getattr(got, name).double() - getattr(ref, name)).abs().max()
        assert error < 2e-5, f"{name}: {error}"
    lse = kernel.forward(x.q, x.k, x.v, causal=x.causal).lse
    assert (lse.double() - ref.lse).abs().max() < 1e-5


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> Any:
    """Every recorded torch_npu in turn."""
    with vendor(recorded(request.param, FORWARD), recorded(request.param, GRADIENT)):
        yield request.param


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_call_fits_every_recorded_schema(version: str, layout: str, causal: bool) -> None:
    assert_equals_reference(FusionKernel().configure(layout=layout), problem(causal))


@pytest.mark.parametrize("causal", [False, True])
def test_the_vendors_gradient_takes_our_shift_and_sum(version: str, causal: bool) -> None:
    kernel, x = VendorBackwardKernel().configure(beta=4.0), problem(causal)
    m = kernel.run(x.q, x.k, x.v, x.causal, None)[1]
    assert not torch.allclose(m.double(), attention_reference(x).row_max.squeeze(-1))
    assert_equals_reference(kernel, x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_queries_than_keys_are_aligned_top_left(layout: str) -> None:
    with vendor(recorded("2.13.0", FORWARD), recorded("2.13.0", GRADIENT)):
        assert_equals_reference(FusionKernel().configure(layout=layout), problem(True, 48, 32))
        anchored = FusionKernel().configure(layout=layout, sparse_mode=3)
        assert_equals_reference(anchored, problem(True))
        x = problem(True, 48, 32)
        with pytest.raises(Unsupported, match="aligns bottom-right"):
            anchored(x.q, x.k, x.v, causal=True)


def test_row_maximum_and_sum_come_out() -> None:
    x = problem(True)
    ref = attention_reference(x)
    with vendor(recorded("2.13.0", FORWARD), recorded("2.13.0", GRADIENT)):
        for layout in LAYOUTS:
            _, m, total = FusionKernel().configure(layout=layout).run(x.q, x.k, x.v, True, None)
            assert (m.double() - ref.row_max.squeeze(-1)).abs().max() < 1e-5
            exact = torch.exp(ref.scores - ref.row_max).sum(-1)
            assert (total.double() - exact).abs().max() < 1e-4


def test_an_old_torch_npu_without_a_keyword_or_operator_is_named() -> None:
    old = re.sub(r" int sparse_mode=0,", "", recorded("2.6.0.post5", FORWARD))
    x = problem(True)
    missing = pytest.raises(Unsupported, match="npu_fusion_attention has no keyword sparse_mode")
    with vendor(old, recorded("2.6.0.post5", GRADIENT)), missing:
        FusionKernel()(x.q, x.k, x.v, causal=True)
    with pytest.raises(Unsupported, match="there is no operator npu_fusion_attention"):
        FusionKernel()(x.q, x.k, x.v, causal=True)


def test_a_causal_call_without_its_mask_is_refused() -> None:
    """The kernel would compute full attention: as the stand-in, and the documents, do."""
    x = problem(True)
    schema = torch._C.parse_schema(recorded("2.13.0", FORWARD))
    call = forward_call(x.q, x.k, x.v, layout="BNSD", causal=True, scale=0.25)
    bare = call | {"atten_mask": None}
    with vendor(recorded("2.13.0", FORWARD), recorded("2.13.0", GRADIENT)):
        silent = torch.ops.npu.npu_fusion_attention(**bare)[0]
        full = FusionKernel()(x.q, x.k, x.v, causal=False, scale=0.25)
        assert torch.equal(silent, full)
    assert checked(schema, call, "2.13.0") is call
    with pytest.raises(ValueError, match="atten_mask: missing with sparse_mode 2"):
        checked(schema, bare, "2.13.0")


def test_a_mask_of_ones_own_is_applied() -> None:
    x = problem(False)
    mask = torch.ones(40, 40, dtype=torch.bool).triu(1)
    call = forward_call(x.q, x.k, x.v, layout="BNSD", causal=False, scale=0.25, mask=mask)
    with vendor(recorded("2.13.0", FORWARD), recorded("2.13.0", GRADIENT)):
        causal = FusionKernel()(x.q, x.k, x.v, causal=True, scale=0.25)
        assert torch.equal(torch.ops.npu.npu_fusion_attention(**call)[0], causal)


def tensors(q: tuple[int, ...], kv: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.zeros(q, dtype=dtype), torch.zeros(kv, dtype=dtype), torch.zeros(kv, dtype=dtype)


BNSD, TND = tensors((1, 4, 8, 16), (1, 2, 8, 16)), tensors((8, 4, 16), (8, 2, 16))


@pytest.mark.parametrize(
    ("message", "qkv", "arguments"),
    [
        (
            "q: dtype torch.float64; allowed: bfloat16, float16, float32",
            tensors((1, 4, 8, 16), (1, 2, 8, 16), torch.float64),
            {},
        ),
        ("head_dim 776: this kernel takes up to 768", tensors((1, 4, 8, 776), (1, 2, 8, 776)), {}),
        ("q: 4 heads are not a multiple of k's 3", tensors((1, 4, 8, 16), (1, 3, 8, 16)), {}),
        ("q: 4 heads are not a multiple of k's 0", tensors((1, 4, 8, 16), (1, 0, 8, 16)), {}),
        ("k: batch of 2; q has 1", tensors((1, 4, 8, 16), (2, 2, 8, 16)), {}),
        (
            "k: torch.float16 on cpu, but q is torch.bfloat16",
            (BNSD[0], *tensors((1, 4, 8, 16), (1, 2, 8, 16), torch.float16)[1:]),
            {},
        ),
        ("q: 4 dimensions; layout TND has 3", BNSD, {"layout": "TND"}),
        ("layout: 'XYZ'; allowed: BNSD, BSND, TND", BNSD, {"layout": "XYZ"}),
        ("ends_q: layout TND needs the cumulative lengths", TND, {"layout": "TND"}),
        ("ends_kv: layout TND needs the cumulative lengths", TND, {"layout": "TND", "ends_q": [8]}),
        ("ends_q: [4, 2, 8] do not rise to the 8 tokens", TND, {"layout": "TND", "ends_q": [4, 2, 8]}),
        ("ends_q: [4, 7] do not rise to the 8 tokens", TND, {"layout": "TND", "ends_q": [4, 7]}),
        ("ends_kv: 1 sequences; ends_q has 2", TND, {"layout": "TND", "ends_q": [4, 8], "ends_kv": [8]}),
        ("ends_q: only layout TND has sequences end to end", BNSD, {"ends_q": [8]}),
        ("sparse_mode: 4; allowed with causal: 2", BNSD, {"causal": True, "sparse_mode": 4}),
        ("mask: not with causal", BNSD, {"causal": True, "mask": torch.zeros(8, 8, dtype=torch.bool)}),
        ("atten_mask: torch.float32; allowed: bool", BNSD, {"mask": torch.zeros(8, 8)}),
        (
            "atten_mask: [1, 8, 8]; allowed: [8, 8], [1, 1, 8, 8], [1, 4, 8, 8]",
            BNSD,
            {"mask": torch.zeros(1, 8, 8, dtype=torch.bool)},
        ),
        ("atten_mask: [8, 7]; allowed: [8, 8]", BNSD, {"mask": torch.zeros(8, 7, dtype=torch.bool)}),
        ("atten_mask: [1, 3, 8, 8]; allowed", BNSD, {"mask": torch.zeros(1, 3, 8, 8, dtype=torch.bool)}),
        (
            "atten_mask: with layout TND only the causal one",
            TND,
            {"layout": "TND", "ends_q": [8], "ends_kv": [8], "mask": torch.zeros(8, 8, dtype=torch.bool)},
        ),
    ],
)
def test_bad_input_is_named(message: str, qkv: tuple[Tensor, ...], arguments: Any) -> None:
    asked = {"layout": "BNSD", "causal": False, "scale": 0.25} | arguments
    schema = torch._C.parse_schema(recorded("2.13.0", FORWARD))
    with pytest.raises((ValueError, Unsupported), match=re.escape(message)):
        checked(schema, forward_call(*qkv, **asked), "2.13.0")


def test_statistics_of_another_kind_are_refused() -> None:
    call = forward_call(*BNSD, layout="BNSD", causal=False, scale=0.25)
    good = torch.zeros(1, 4, 8, 8)
    for bad in (good.double(), good[..., :1]):
        with pytest.raises(ValueError, match=r"softmax_sum: .*; expected float32, 8 values a row"):
            gradient_call(call, BNSD[0], BNSD[0], good, bad)


def test_options_and_facts() -> None:
    with pytest.raises(ValueError, match="layout"):
        FusionKernel().configure(layout="XYZ")
    with pytest.raises(ValueError, match="sparse_mode"):
        FusionKernel().configure(sparse_mode=4)
    facts = VendorBackwardKernel().launch_facts(Call.with_tensors(*BNSD[:2], causal=False))
    assert facts["backward_status"] == "never run on a device"
