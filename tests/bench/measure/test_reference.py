"""The measuring stick, measured: against float64 autograd, and its own invariants."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.measure.inputs import Inputs, key_of, normal
from bench.measure.reference import attention_reference, causal_mask

TOLERANCE = 1e-12


def problem(
    shape: tuple[int, int, int, int, int, int],
    causal: bool,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
) -> Inputs:
    """Random inputs; shape is (batch, kv heads, query heads a kv head, queries, keys, head_dim)."""
    batch, kv_heads, groups, queries, keys, dim = shape
    rows, cols = (batch, kv_heads * groups, queries, dim), (batch, kv_heads, keys, dim)
    arrays = [
        normal(key_of("reference", name, *size), size)
        for name, size in (("q", rows), ("k", cols), ("v", cols), ("do", rows))
    ]
    return Inputs.quantized(dtype, *arrays, causal=causal, scale=scale)


def autograd_attention(x: Inputs) -> dict[str, Tensor]:
    """The same quantities from autograd, heads in a loop, no shared code."""
    q, k, v = (t.double().requires_grad_() for t in (x.q, x.k, x.v))
    scale = x.q.shape[-1] ** -0.5 if x.scale is None else x.scale
    groups = q.shape[1] // k.shape[1]
    outputs, lses = [], []
    for head in range(q.shape[1]):
        s = torch.einsum("btd,bsd->bts", q[:, head], k[:, head // groups]) * scale
        if x.causal:
            i, j = torch.arange(s.shape[1])[:, None], torch.arange(s.shape[2])[None]
            s = torch.where(j <= i, s, torch.tensor(-math.inf, dtype=torch.float64))
        outputs.append(torch.softmax(s, -1) @ v[:, head // groups])
        lses.append(torch.logsumexp(s, -1))
    o = torch.stack(outputs, 1)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), x.do.double())
    lse = torch.stack(lses, 1)
    return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 1, 1, 7, 7, 16),
    (1, 2, 3, 5, 9, 8),  # GQA, more keys than queries
    (2, 2, 2, 9, 4, 5),  # fewer keys
    (1, 1, 4, 33, 33, 64),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_equals_autograd(
    shape: tuple[int, int, int, int, int, int], causal: bool, scale: float | None
) -> None:
    x = problem(shape, causal, scale=scale)
    ref = attention_reference(x)
    for name, expected in autograd_attention(x).items():
        actual = getattr(ref, name)
        assert actual.dtype == torch.float64
        assert actual.shape == expected.shape, name
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_takes_the_quantised_values(dtype: torch.dtype) -> None:
    x = problem((1, 1, 2, 6, 6, 8), True, dtype)
    ref = attention_reference(x)
    assert torch.equal(ref.q, x.q.double())
    assert torch.equal(ref.v, x.v.double().repeat_interleave(2, 1))
    torch.testing.assert_close(ref.o, autograd_attention(x)["o"], rtol=TOLERANCE, atol=TOLERANCE)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(
        st.integers(1, 2),
        st.integers(1, 2),
        st.integers(1, 3),
        st.integers(1, 7),
        st.integers(1, 7),
        st.integers(1, 6),
    ),
    st.booleans(),
)
def test_invariants(shape: tuple[int, int, int, int, int, int], causal: bool) -> None:
    ref = attention_reference(problem(shape, causal))
    batch, kv_heads, groups, queries, keys, dim = shape
    rows = (batch, kv_heads * groups, queries)
    assert (ref.p.sum(-1) - 1).abs().max() < 1e-14
    assert (ref.p >= 0).all()
    assert ref.ds.sum(-1).abs().max() < 1e-13
    assert ref.lse.shape == ref.delta.shape == rows
    assert ref.row_max.shape == (*rows, 1)
    assert ref.dk.shape == ref.dv.shape == (batch, kv_heads, keys, dim)
    torch.testing.assert_close(ref.delta, (ref.p * (ref.do @ ref.v.mT)).sum(-1))
    torch.testing.assert_close(ref.p, (ref.scores - ref.lse[..., None]).exp())
    expected = (ref.scores - ref.row_max).exp() @ ref.v
    torch.testing.assert_close(ref.unnormalized_o, expected)
    if causal:
        hidden = ~causal_mask(queries, keys, ref.p.device)
        assert (ref.p[..., hidden] == 0).all()
        assert (ref.ds[..., hidden] == 0).all()


def test_causal_mask_is_top_left() -> None:
    device = torch.device("cpu")
    wide = causal_mask(2, 4, device).long().tolist()
    assert wide == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert causal_mask(3, 2, device).tolist() == [[True, False], [True, True], [True, True]]


def test_known_answer() -> None:
    # Scores ln 1 and ln 3: P = (1/4, 3/4).
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [math.log(3)]]]], dtype=torch.float64)
    v, do = torch.tensor([[[[8.0], [-4.0]]]]), torch.tensor([[[[2.0]]]])
    ref = attention_reference(Inputs(q, k, v, do, scale=1.0))
    assert ref.p.flatten().tolist() == pytest.approx([0.25, 0.75], rel=1e-15)
    assert ref.o.item() == pytest.approx(-1)
    assert ref.lse.item() == pytest.approx(math.log(4))
    assert ref.delta.item() == pytest.approx(-2)
    assert ref.ds.flatten().tolist() == pytest.approx([4.5, -4.5])  # P·(dP − δ), dP = (16, −8)
    assert ref.dv.flatten().tolist() == pytest.approx([0.5, 1.5])
    assert ref.dq.item() == pytest.approx(-4.5 * math.log(3))
    assert ref.dk.flatten().tolist() == pytest.approx([4.5, -4.5])


def test_large_scores_stay_finite() -> None:
    x = problem((1, 1, 1, 4, 6, 8), True, scale=1e4)
    ref = attention_reference(x)
    assert ref.scores[ref.scores.isfinite()].abs().max() > 1e4
    for name in ("o", "lse", "dq", "dk", "dv", "unnormalized_o"):
        assert getattr(ref, name).isfinite().all(), name
