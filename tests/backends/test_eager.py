"""The eager kernels: against FP64, against a literal transcription bit for bit, and at their edges."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from backends.base import Call, Kernel, Unsupported
from backends.cpu import CpuBackend
from backends.fixes import FIXES, SHIFT_CONST
from backends.kernels.eager import Saved, Spec, eager_backward, eager_forward
from backends.kernels.eager_kernels import FusedKernel, eager_kernels
from backends.kernels.row_shift import row_shift
from bench.measure.inputs import Inputs, key_of, normal, to_storage
from bench.measure.metrics import leak_metrics
from bench.measure.numerics import philox_words, round_mantissa
from bench.measure.reference import Reference, attention_reference
from cases.bias.leak import PROBE_KEY
from cases.passes import forward_backward
from cases.sinks import SCALE, sink_inputs

# The ladder takes float32 alone: tests/cases/test_crash.py.
KERNELS = {n: kernel for n, kernel in eager_kernels().items() if not n.startswith("eager-ladder/")}
POLICIES = ("stored", "fused")
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# batch, kv heads, query heads a kv head, queries, keys, head_dim, causal
Shape = tuple[int, int, int, int, int, int, bool]
SMALL: list[Shape] = [
    (1, 1, 1, 1, 1, 16, False),
    (2, 2, 2, 5, 5, 16, True),
    (1, 2, 1, 133, 5, 16, True),
    (1, 1, 2, 5, 133, 256, False),
]
LARGE: list[Shape] = [
    (1, 1, 2, 127, 133, 40, True),
    (1, 1, 1, 133, 127, 16, True),
    (1, 1, 3, 5, 127, 40, True),
]


@cache
def problem(shape: Shape, dtype: torch.dtype) -> tuple[Inputs, Reference]:
    """Small logits; keys come in pairs of twins, so that most row maxima repeat."""
    batch, kv_heads, groups, queries, keys, dim, causal = shape
    rows, cols = (batch, kv_heads * groups, queries, dim), (batch, kv_heads, keys, dim)

    def noise(name: str, size: tuple[int, ...]) -> np.ndarray:
        return normal(key_of("eager", name, *size), size)

    q, k, v, do = 0.5 * noise("q", rows), noise("k", cols), noise("v", cols), noise("do", rows)
    k[:, :, 1::2] = k[:, :, : keys - 1 : 2]
    x = Inputs.quantized(dtype, q, k, v, do, causal=causal)
    return x, attention_reference(x)


def magnitudes(ref: Reference) -> dict[str, Tensor]:
    """What each result would be if every term were positive: the scale of its rounding errors."""
    o = ref.p @ ref.v.abs()
    delta = (ref.do.abs() * o).sum(-1, keepdim=True)
    ds = ref.p * (ref.do.abs() @ ref.v.abs().mT + delta)
    return {
        "o": o,
        "dq": ref.scale * (ds @ ref.k.abs()),
        "dk": ref._fold(ref.scale * (ds.mT @ ref.q.abs())),
        "dv": ref._fold(ref.p.mT @ ref.do.abs()),
    }


def results(kernel: Kernel, x: Inputs) -> dict[str, Tensor]:
    q, k, v = (t.clone().requires_grad_() for t in (x.q, x.k, x.v))
    o = kernel(q, k, v, causal=x.causal, scale=x.scale)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), x.do)
    return {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}


def check(kernel: Kernel, x: Inputs, ref: Reference, roundoffs: float) -> None:
    """Every value within `roundoffs` unit roundoffs of the sum of its terms' magnitudes."""
    like = {"o": x.q, "dq": x.q, "dk": x.k, "dv": x.v}
    scales = magnitudes(ref)
    for name, value in results(kernel, x).items():
        assert value.dtype == x.q.dtype
        assert value.shape == like[name].shape
        error = (value.double() - getattr(ref, name)).abs()
        excess = error - roundoffs * ROUNDOFF[x.q.dtype] * scales[name]
        at = np.unravel_index(int(excess.argmax()), excess.shape)
        where = f"{kernel.name} {name}{[int(i) for i in at]}"
        assert excess.max() <= 0, f"{where}: error {error[at]:.3e}, scale {scales[name][at]:.3e}"


@pytest.mark.parametrize("tile", [1, 3, 64, 0])
@pytest.mark.parametrize("fix", FIXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_float32_equals_the_reference_whatever_the_fix(policy: str, fix: str, tile: int) -> None:
    kernel = KERNELS[f"eager-{policy}/{fix}"].configure(tile=tile)
    for shape in SMALL + (LARGE if tile in (64, 0) else []):
        check(kernel, *problem(shape, torch.float32), roundoffs=40)


@pytest.mark.parametrize(
    ("dtype", "tile"),
    [
        (torch.bfloat16, 1),
        (torch.bfloat16, 3),
        (torch.bfloat16, 64),
        (torch.float16, 3),
        (torch.float16, 0),
    ],
)
@pytest.mark.parametrize("fix", FIXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_low_precision_is_within_a_few_roundoffs(
    policy: str, fix: str, dtype: torch.dtype, tile: int
) -> None:
    kernel = KERNELS[f"eager-{policy}/{fix}"].configure(tile=tile)
    # Stored rounds S and, once a tile, ℓ and Ō; stochastic rounding errs by up to an ulp.
    roundoffs = 4.0 if policy == "fused" else 8.0 if tile != 1 else 16.0
    for shape in SMALL + (LARGE if tile == 64 else []):
        check(kernel, *problem(shape, dtype), roundoffs=roundoffs)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_repeated_maximum_shift_fires_on_these_problems(policy: str) -> None:
    x, ref = problem(LARGE[0], torch.float32)
    for tile in (1, 64):
        spec = Spec(policy, FIXES["stabilized"], tile=tile)  # type: ignore[arg-type]
        out = eager_forward(x.q, x.k, x.v, x.causal, ref.scale, spec)
        assert out.fired.shape == (*x.q.shape[:3], math.ceil(133 / tile))
        assert bool(out.fired.any()) == (tile > 1)
        torch.testing.assert_close(out.lse.double(), ref.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fix", FIXES)
@pytest.mark.parametrize("tile", [3, 0])
def test_in_float32_stored_equals_fused(fix: str, tile: int) -> None:
    for shape in SMALL:
        x, _ = problem(shape, torch.float32)
        pair = [KERNELS[f"eager-{policy}/{fix}"].configure(tile=tile) for policy in POLICIES]
        first, second = (results(kernel, x) for kernel in pair)
        for name, value in first.items():
            torch.testing.assert_close(value, second[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", KERNELS)
def test_forward_gives_the_same_bits_as_the_call(name: str) -> None:
    x, ref = problem(LARGE[0], torch.bfloat16)
    kernel = KERNELS[name].configure(tile=64)
    out = kernel.forward(x.q, x.k, x.v, causal=x.causal)
    assert torch.equal(out.o, results(kernel, x)["o"])
    assert out.lse is not None
    assert out.lse.dtype == torch.float32
    assert out.lse.shape == x.q.shape[:3]
    torch.testing.assert_close(out.lse.double(), ref.lse, rtol=0, atol=0.03)


@pytest.mark.parametrize("policy", POLICIES)
def test_grouped_heads_equal_repeated_heads(policy: str) -> None:
    x, _ = problem((2, 2, 2, 5, 5, 16, True), torch.bfloat16)
    kernel = KERNELS[f"eager-{policy}/stock"]
    k, v = x.k.repeat_interleave(2, 1), x.v.repeat_interleave(2, 1)
    assert torch.equal(kernel(x.q, x.k, x.v, causal=True), kernel(x.q, k, v, causal=True))


def test_strided_tensors_and_gradients_are_taken() -> None:
    x, _ = problem(SMALL[1], torch.bfloat16)
    kernel = KERNELS["eager-fused/stock"]
    q, k, v, do = (t.mT.contiguous().mT for t in (x.q, x.k, x.v, x.do))
    strided = Inputs(q, k, v, do, causal=x.causal)
    assert not strided.do.is_contiguous()
    for name, value in results(kernel, strided).items():
        torch.testing.assert_close(value, results(kernel, x)[name], rtol=2**-6, atol=2**-6, msg=name)
    q = x.q.clone().requires_grad_()
    kernel(q, x.k, x.v, causal=True).sum().backward()  # an expanded upstream gradient
    ones = Inputs(x.q, x.k, x.v, torch.ones_like(x.do), True)
    assert torch.equal(q.grad, results(kernel, ones)["dq"])  # type: ignore[arg-type]


# ---- a literal transcription ------------------------------------------------------------------


class Oracle:
    """One head, two queries, two channels, tiles of two keys, element by element.

    Every contraction has two terms, and products of two BF16 values are exact in FP32, so there is
    one right answer whatever the order of a matrix product or its fused multiply-adds.
    """

    def __init__(self, policy: str, fix: str, x: Inputs, seed: int = 3):
        self.stored, self.fix, self.x, self.seed = policy == "stored", fix, x, seed
        self.q, self.k, self.v, self.do = (t.float() for t in (x.q, x.k, x.v, x.do))
        assert x.scale is not None
        self.scale = x.scale

    @staticmethod
    def r(t: Tensor) -> Tensor:
        return t.bfloat16().float()

    def r_output(self, t: Tensor, stream: int) -> Tensor:
        if self.fix != "stochastic":
            return self.r(t)
        words = philox_words(t.shape, self.seed, stream, t.device)
        return round_mantissa(t, 7, "stochastic", words)

    @staticmethod
    def dot(a: Tensor, b: Tensor) -> Tensor:
        """a [..., I, 2] · b [..., J, 2] → [..., I, J], in FP32."""
        a, b = a[..., :, None, :], b[..., None, :, :]
        return a[..., 0] * b[..., 0] + a[..., 1] * b[..., 1]

    def scores(self, tile: int) -> Tensor:
        s = self.scale * self.dot(self.q, self.k[:, :, 2 * tile : 2 * tile + 2])
        return self.r(s) if self.stored else s

    def shift(self, s: Tensor) -> Tensor:
        m = torch.maximum(s[..., 0], s[..., 1])
        if self.fix == "shift_const":
            m = m + SHIFT_CONST
        if "stabilized" in self.fix:
            repeated = (s[..., 0] - s[..., 1]).abs() <= 1e-3
            m = torch.where(repeated, torch.where(m > 0, 2 * m, 0 * m), m)
        return self.r(m) if self.stored else m

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """O and LSE, and O before rounding."""
        m = torch.full(self.q.shape[:3], -math.inf)
        acc, acc32 = torch.zeros_like(self.q), torch.zeros_like(self.q)
        total, total32, cast = torch.zeros_like(m), torch.zeros_like(m), torch.zeros_like(m)
        for tile in range(self.k.shape[2] // 2):
            s, v = self.scores(tile), self.v[:, :, 2 * tile : 2 * tile + 2]
            new = torch.maximum(m, self.shift(s))
            p, old = torch.exp(s - new[..., None]), torch.exp(m - new)
            pv = self.dot(self.r(p), v.mT)
            acc32 = old[..., None] * acc32 + pv
            total32 = old * total32 + (p[..., 0] + p[..., 1])
            cast = old * cast + (self.r(p)[..., 0] + self.r(p)[..., 1])
            if self.stored:
                acc = self.r_output(old[..., None] * acc + pv, tile + 1)
                total = self.r(old * total + (p[..., 0] + p[..., 1]))
            m = new
        if not self.stored:
            acc, total = acc32, total32
        consistent = "consistent_l" in self.fix
        normalizer = cast if consistent else total
        o = self.r_output(acc / normalizer[..., None], 0)
        lse = m + (total32 if consistent else total).log()
        return o, lse, acc32 / total32[..., None]

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        o, lse, exact = self.forward()
        if self.fix == "delta_fp32":
            o = o + self.r(exact - o)
        delta = (self.do * o)[..., 0] + (self.do * o)[..., 1]
        tiles = range(self.k.shape[2] // 2)
        p = [torch.exp(self.scores(t) - lse[..., None]) for t in tiles]
        dp = [self.dot(self.do, self.v[:, :, 2 * t : 2 * t + 2]) for t in tiles]
        if self.fix == "delta_dp":
            delta = torch.zeros_like(delta)
            for t in tiles:
                delta = delta + ((p[t] * dp[t])[..., 0] + (p[t] * dp[t])[..., 1])
        dq, dk, dv = torch.zeros_like(self.q), [], []
        for t in tiles:
            ds = self.r(p[t] * (dp[t] - delta[..., None]))
            dq = dq + self.scale * self.dot(ds, self.k[:, :, 2 * t : 2 * t + 2].mT)
            dk.append(self.scale * self.dot(ds.mT, self.q.mT))
            dv.append(self.dot(self.r(p[t]).mT, self.do.mT))
        return dq, torch.cat(dk, 2), torch.cat(dv, 2)


@pytest.mark.parametrize("fix", FIXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_bit_of_a_literal_transcription(policy: str, fix: str) -> None:
    def noise(name: str, *shape: int) -> np.ndarray:
        return normal(key_of("oracle", name), shape)

    # Scores on a coarse grid, so that maxima repeat within tiles and across them.
    q, k = (np.round(2 * noise(name, 200, 1, n, 2)) / 2 for name, n in (("q", 2), ("k", 6)))
    x = Inputs.quantized(torch.bfloat16, q, k, noise("v", 200, 1, 6, 2), noise("do", 200, 1, 2, 2), scale=0.7)
    spec = Spec(policy, FIXES[fix], tile=2, seed=3)  # type: ignore[arg-type]
    out = eager_forward(x.q, x.k, x.v, False, 0.7, spec)
    oracle = Oracle(policy, fix, x)
    o, lse, _ = oracle.forward()
    assert torch.equal(out.o.float(), o)
    assert torch.equal(out.lse, lse)
    assert bool(out.fired.any()) == ("stabilized" in fix)
    assert (out.residual is not None) == (fix == "delta_fp32")
    grads = eager_backward(x.q, x.k, x.v, out, x.do, False, 0.7, spec)
    for name, actual, expected in zip(("dq", "dk", "dv"), grads, oracle.backward(), strict=True):
        assert torch.equal(actual, expected.bfloat16()), name


# ---- the shift --------------------------------------------------------------------------------

INF = math.inf


@pytest.mark.parametrize(
    ("row", "shift", "fired"),
    [
        ([3.0, 1.0, -2.0], 3.0, False),
        ([3.0, 3.0, -2.0], 6.0, True),
        ([3.0, 3.0, 3.0], 6.0, True),
        ([-3.0, -3.0, -5.0], 0.0, True),
        ([-3.0, -4.0, -5.0], -3.0, False),
        ([0.0, 0.0, -1.0], 0.0, False),  # β·0 = 0: nothing to change
        ([3.0, 3.0 - 2.0**-10, -2.0], 6.0, True),  # 9.8e-4 below, within tol = 1e-3
        ([3.0, 3.0 - 2.0**-9, -2.0], 3.0, False),  # 2e-3 below
        ([-3.0, -3.0 - 2.0**-10, -4.0], 0.0, True),
        ([3.0, -INF, -INF], 3.0, False),
        ([3.0, 3.0, -INF], 6.0, True),
        ([-3.0, -INF, -INF], -3.0, False),
        ([-INF, -INF, -INF], -INF, False),
    ],
)
def test_repeated_maximum_rule(row: list[float], shift: float, fired: bool) -> None:
    s = torch.tensor(row).expand(2, 3, 1, 3)
    found, hit = row_shift(s, FIXES["stabilized"], beta=2.0, tol=1e-3)
    assert found.shape == hit.shape == (2, 3, 1, 1)
    assert found.unique().tolist() == [shift]
    assert hit.unique().tolist() == [fired]


def test_repeated_maximum_rule_takes_beta_and_tol() -> None:
    s = torch.tensor([[3.0, 2.5]])
    for beta, tol, shift in (
        (7.0, 0.5, 21.0),
        (2.0, 0.5, 6.0),
        (7.0, 0.4999, 3.0),
        (1.0, 1.0, 3.0),
    ):
        assert row_shift(s, FIXES["stabilized"], beta, tol)[0].item() == shift
    equal = torch.tensor([[3.0, 3.0]])
    assert row_shift(equal, FIXES["stabilized"], 2.0, tol=0.0)[1].item()


def test_rows_are_judged_one_by_one() -> None:
    s = torch.tensor([[[1.0, 1.0], [1.0, 0.0], [-1.0, -1.0]]])
    shift, fired = row_shift(s, FIXES["stabilized"], 2.0, 1e-3)
    assert shift.flatten().tolist() == [2.0, 1.0, 0.0]
    assert fired.flatten().tolist() == [True, False, True]


@pytest.mark.parametrize("fix", [f for f in FIXES.values() if f.shift != "repeated"])
def test_other_shifts_never_fire(fix: object) -> None:
    s = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [-INF, -INF]])
    shift, fired = row_shift(s, fix, 2.0, 1e-3)  # type: ignore[arg-type]
    constant = SHIFT_CONST if fix == FIXES["shift_const"] else 0.0
    assert shift.flatten().tolist() == [
        pytest.approx(1 + constant),
        pytest.approx(-1 + constant),
        -INF,
    ]
    assert not fired.any()
    assert not fired.dtype.is_floating_point


def test_nan_scores_propose_nan_and_never_fire() -> None:
    s = torch.tensor([[math.nan, 1.0, 1.0]])
    shift, fired = row_shift(s, FIXES["stabilized"], 2.0, 1e-3)
    assert shift.isnan().all()
    assert not fired.any()


# ---- masked rows and tiles --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fix", FIXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_fully_masked_row_gives_zero_and_no_nan(policy: str, fix: str, dtype: torch.dtype) -> None:
    x, ref = problem((2, 2, 2, 5, 5, 16, True), dtype)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[0] = mask[3] = False
    mask[4, 4] = False
    spec = Spec(policy, FIXES[fix], tile=2)  # type: ignore[arg-type]
    for causal in (False, True):
        out = eager_forward(x.q, x.k, x.v, causal, ref.scale, spec, mask)
        grads = eager_backward(x.q, x.k, x.v, out, x.do, causal, ref.scale, spec, mask)
        dead, alive = [0, 3], [1, 2, 4]
        assert (out.o[:, :, dead] == 0).all()
        assert (out.lse[:, :, dead] == -INF).all()
        assert (grads[0][:, :, dead] == 0).all()
        assert not out.fired[:, :, dead].any()
        assert out.o.isfinite().all()
        assert out.lse[:, :, alive].isfinite().all()
        assert (out.o[:, :, alive] != 0).any()
        for grad in grads:
            assert grad.isfinite().all()
        # Nothing of the dead rows reaches the keys: their upstream gradient does not matter.
        do = x.do.clone()
        do[:, :, dead] = 1000
        again = eager_backward(x.q, x.k, x.v, out, do, causal, ref.scale, spec, mask)
        assert torch.equal(again[1], grads[1])
        assert torch.equal(again[2], grads[2])


@pytest.mark.parametrize("fix", FIXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_masked_keys_are_as_if_they_were_not_there(policy: str, fix: str) -> None:
    x, ref = problem(SMALL[1], torch.float32)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[:, :3] = True
    spec = Spec(policy, FIXES[fix], tile=2)  # type: ignore[arg-type]
    full = eager_forward(x.q, x.k, x.v, False, ref.scale, spec, mask)
    short = eager_forward(x.q, x.k[:, :, :3], x.v[:, :, :3], False, ref.scale, spec)
    torch.testing.assert_close(full.o, short.o, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(full.lse, short.lse, rtol=1e-6, atol=1e-6)
    grads = eager_backward(x.q, x.k, x.v, full, x.do, False, ref.scale, spec, mask)
    assert (grads[1][:, :, 3:] == 0).all()
    assert (grads[2][:, :, 3:] == 0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fully_masked_tile_fires_nothing(policy: str) -> None:
    # Causal: for row i every tile beyond key i is masked. All keys alike, so all else repeats.
    x, ref = problem((1, 1, 1, 133, 127, 16, True), torch.bfloat16)
    k = x.k[:, :, :1].expand_as(x.k)
    spec = Spec(policy, FIXES["stabilized"], tile=4)  # type: ignore[arg-type]
    out = eager_forward(x.q, k, x.v, True, ref.scale, spec)
    rows, tiles = torch.arange(133)[:, None], torch.arange(32)[None]
    visible = torch.minimum(rows + 1, torch.tensor(127)) - 4 * tiles  # keys of the tile a row sees
    keys_in_tile = torch.minimum(127 - 4 * tiles, torch.tensor(4))
    expected = torch.minimum(visible, keys_in_tile) > 1
    assert torch.equal(out.fired[0, 0], expected)
    assert out.o.isfinite().all()
    assert out.lse.isfinite().all()


def test_a_fully_masked_tile_adds_nothing_to_a_small_normalizer() -> None:
    # Two maxima of 21, shifted to 42: ℓ = 2·e^-21 = 1.5e-9, where one clamp of 1e-10 would show.
    q, k = torch.full((1, 1, 1, 1), 21.0), torch.ones(1, 1, 16, 1)
    v = torch.arange(1.0, 17.0)[None, None, :, None]
    mask = torch.arange(16)[None] < 2
    spec = Spec("stored", FIXES["stabilized"], tile=2)
    masked = eager_forward(q, k, v, False, 1.0, spec, mask)
    alone = eager_forward(q, k[:, :, :2], v[:, :, :2], False, 1.0, spec)
    assert masked.fired.flatten().tolist() == [True] + [False] * 7
    assert alone.o.item() == pytest.approx(1.5)
    assert torch.equal(masked.o, alone.o)
    assert torch.equal(masked.lse, alone.lse)


# ---- bad numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_nan_in_means_nan_out(name: str) -> None:
    x, _ = problem((2, 2, 2, 5, 5, 16, False), torch.bfloat16)
    kernel = KERNELS[name].configure(tile=2)
    q = x.q.clone()
    q[0, 1, 2, 3] = math.nan
    out = kernel.forward(q, x.k, x.v, causal=False)
    assert out.lse is not None
    bad = torch.zeros(2, 4, 5, dtype=torch.bool)
    bad[0, 1, 2] = True
    assert torch.equal(out.o.isnan(), bad[..., None].expand_as(out.o))
    assert torch.equal(out.lse.isnan(), bad)
    for which in ("k", "v"):
        broken = {"k": x.k.clone(), "v": x.v.clone()}
        broken[which][1, 0, 4, 5] = math.nan
        out = kernel.forward(x.q, broken["k"], broken["v"], causal=False)
        expected = torch.zeros_like(out.o, dtype=torch.bool)
        expected[1, :2, :, slice(None) if which == "k" else 5] = True
        assert torch.equal(out.o.isnan(), expected), which


@pytest.mark.parametrize("name", KERNELS)
def test_nan_gradients_come_through(name: str) -> None:
    x, _ = problem((2, 2, 2, 5, 5, 16, False), torch.bfloat16)
    do = x.do.clone()
    do[0, 0, 1, 2] = math.nan
    grads = results(KERNELS[name], Inputs(x.q, x.k, x.v, do))
    assert grads["dq"][0, 0, 1].isnan().all()
    assert not grads["dq"][0, 0, 0].isnan().any()
    assert grads["dk"][0, 0].isnan().all()
    assert not grads["dk"][1].isnan().any()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hidden_nan_key_does_not_reach_earlier_rows(policy: str) -> None:
    x, _ = problem((2, 2, 2, 5, 5, 16, True), torch.bfloat16)
    k = x.k.clone()
    k[:, :, 4] = math.nan
    out = KERNELS[f"eager-{policy}/stabilized"].forward(x.q, k, x.v, causal=True)
    assert out.o[:, :, :4].isfinite().all()
    assert out.o[:, :, 4].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fix", [n for n, f in FIXES.items() if f.shift != "repeated"])
@pytest.mark.parametrize("policy", POLICIES)
def test_large_logits_pick_the_maximum(policy: str, fix: str, dtype: torch.dtype) -> None:
    # Scores of ±1e4, one clear maximum a row: O is that key's value, LSE the score.
    q = torch.tensor([100.0, -100.0, 64.0], dtype=dtype)[None, None, :, None]
    k = torch.tensor([-100.0, 1.0, 50.0, 100.0], dtype=dtype)[None, None, :, None]
    v = torch.tensor([1.5, -2.0, 3.0, -0.5], dtype=dtype)[None, None, :, None]
    kernel = KERNELS[f"eager-{policy}/{fix}"].configure(tile=3)
    q.requires_grad_()
    o = kernel(q, k, v, causal=False, scale=1.0)
    # Only the constant shift makes the one P̄ that counts something else than 1.
    slack = 2.0**-7 if fix == "shift_const" else 0.0
    assert o.flatten().tolist() == pytest.approx([-0.5, 1.5, -0.5], rel=slack, abs=0)
    lse = kernel.forward(q.detach(), k, v, causal=False, scale=1.0).lse
    assert lse is not None
    assert lse.flatten().tolist() == pytest.approx([1e4, 1e4, 6400], rel=2.0**-7)
    (dq,) = torch.autograd.grad(o.sum(), q)
    assert dq.isfinite().all()
    assert fix == "shift_const" or dq.abs().max() == 0


# ---- what the fixes are for -------------------------------------------------------------------


def leak_of(name: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    x = sink_inputs(
        "test/leak", 0, dtype, sinks=[0, 1], gap=12.0, row_jitter=0.5, value_sign="mixed", probe=PROBE_KEY
    )
    grads = forward_backward(KERNELS[name], CpuBackend(), x)
    leak = grads.dq[..., 0].double() / (SCALE * PROBE_KEY)
    return leak_metrics(leak, attention_reference(x), 1)


def test_delta_from_an_unrounded_o_lowers_the_leak_a_hundredfold() -> None:
    stock, fixed = leak_of("eager-fused/stock"), leak_of("eager-fused/delta_fp32")
    assert abs(stock["leak_mean"]) > 100 * abs(fixed["leak_mean"])
    assert stock["leak_rms"] > 10 * fixed["leak_rms"]
    assert abs(leak_of("eager-fused/delta_dp")["leak_mean"]) < abs(stock["leak_mean"]) / 100
    assert leak_of("eager-fused/stock", torch.float32)["leak_rms"] < stock["leak_rms"] / 1000


@pytest.mark.parametrize("policy", POLICIES)
def test_the_residual_restores_o(policy: str) -> None:
    x, ref = problem(LARGE[0], torch.bfloat16)
    spec = Spec(policy, FIXES["delta_fp32"], tile=64)  # type: ignore[arg-type]
    out = eager_forward(x.q, x.k, x.v, x.causal, ref.scale, spec)
    assert out.residual is not None
    assert out.residual.dtype == torch.bfloat16
    assert out.residual.shape == out.o.shape
    restored = out.o.double() + out.residual.double()
    # What is left is the cast of P̄ (and of S in `stored`), not the rounding of O.
    before, after = ((t - ref.o).abs().mean() for t in (out.o.double(), restored))
    assert after < before
    stock = eager_forward(x.q, x.k, x.v, x.causal, ref.scale, Spec(policy, FIXES["stock"], tile=64))  # type: ignore[arg-type]
    assert torch.equal(stock.o, out.o)
    assert stock.residual is None


@pytest.mark.parametrize("policy", POLICIES)
def test_the_backward_pass_reads_o_and_the_residual(policy: str) -> None:
    x, ref = problem(SMALL[1], torch.bfloat16)
    spec = Spec(policy, FIXES["delta_fp32"])  # type: ignore[arg-type]
    out = eager_forward(x.q, x.k, x.v, x.causal, ref.scale, spec)
    without = Saved(out.o, out.lse, None)
    args = (x.do, x.causal, ref.scale, spec)
    with_residual = eager_backward(x.q, x.k, x.v, out, *args)
    assert not torch.equal(eager_backward(x.q, x.k, x.v, without, *args)[0], with_residual[0])


def test_consistent_l_makes_the_fused_average_of_ones_one() -> None:
    x, _ = problem(LARGE[1], torch.bfloat16)
    ones = torch.ones_like(x.v)
    for fix, exact in (
        ("shift_const", False),
        ("consistent_l", True),
        ("stabilized+consistent_l", True),
    ):
        o = KERNELS[f"eager-fused/{fix}"].configure(tile=0)(x.q, x.k, ones, causal=True)
        assert bool((o == 1).all()) == exact, fix


# ---- options ----------------------------------------------------------------------------------


def test_stochastic_bits_are_counter_based() -> None:
    x, _ = problem(LARGE[0], torch.bfloat16)
    for policy in POLICIES:
        kernel = KERNELS[f"eager-{policy}/stochastic"]
        first, again = results(kernel, x), results(kernel, x)
        other = results(kernel.configure(seed=1), x)
        for name in ("o", "dq", "dk", "dv"):
            assert torch.equal(first[name], again[name]), name
        assert not torch.equal(first["o"], other["o"])
        stock = results(KERNELS[f"eager-{policy}/stock"], x)["o"]
        apart = (first["o"].double() - stock.double()).abs()
        assert (apart > 0).any()


def test_stochastic_outputs_are_neighbours_of_the_exact_ones() -> None:
    x, ref = problem(SMALL[1], torch.float32)
    kernel = KERNELS["eager-fused/stochastic"].configure(mantissa_bits=7)
    exact = eager_forward(
        x.q, x.k, x.v, x.causal, ref.scale, Spec("fused", FIXES["delta_fp32"], mantissa_bits=7)
    )
    assert exact.residual is not None
    o = torch.stack([kernel.configure(seed=s)(x.q, x.k, x.v, causal=True) for s in range(400)])
    choices = [values.unique().numel() for values in o.flatten(1).T]
    assert max(choices) == 2
    # Their mean is the O before rounding (known up to the BF16 rounding of its residual).
    unrounded = exact.o.double() + exact.residual.double()
    step = 2.0 ** (o[0].abs().double().log2().floor() - 7)
    assert ((o.double().mean(0) - unrounded).abs() / step).max() < 5 * 0.5 / math.sqrt(400)


@pytest.mark.parametrize("fix", FIXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_seven_bits_in_float32_store_only_bfloat16_values(policy: str, fix: str) -> None:
    x, ref = problem(SMALL[1], torch.float32)
    spec = Spec(policy, FIXES[fix], tile=2, mantissa_bits=7)  # type: ignore[arg-type]
    out = eager_forward(x.q, x.k, x.v, x.causal, ref.scale, spec)
    assert out.o.dtype == torch.float32
    for stored in (out.o, out.residual):
        if stored is not None:
            assert torch.equal(stored.bfloat16().float(), stored)
    plain = eager_forward(x.q, x.k, x.v, x.causal, ref.scale, Spec(policy, FIXES[fix], tile=2))  # type: ignore[arg-type]
    assert not torch.equal(plain.o.bfloat16().float(), plain.o)


@pytest.mark.parametrize("fix", FIXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_seven_bits_in_float32_are_the_bfloat16_kernel(policy: str, fix: str) -> None:
    x, _ = problem(LARGE[2], torch.bfloat16)
    wide = [t.float() for t in (x.q, x.k, x.v)]
    kernel = KERNELS[f"eager-{policy}/{fix}"].configure(tile=64)
    o = kernel(x.q, x.k, x.v, causal=True)
    assert torch.equal(kernel.configure(mantissa_bits=7)(*wide, causal=True), o.float())


@pytest.mark.parametrize("bits", [1, 3, 10, 22])
@pytest.mark.parametrize("policy", POLICIES)
def test_error_follows_the_mantissa_bits(policy: str, bits: int) -> None:
    x, ref = problem(SMALL[3], torch.float32)
    kernel = KERNELS[f"eager-{policy}/stock"].configure(mantissa_bits=bits)
    o = kernel(x.q, x.k, x.v, causal=False)
    assert torch.equal(round_mantissa(o, bits), o)
    worst = ((o.double() - ref.o).abs() / magnitudes(ref)["o"]).max()
    assert 2.0 ** -(bits + 1) / 64 < worst < 8 * 2.0 ** -(bits + 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_rounding_toward_zero_shrinks_o(policy: str) -> None:
    x, ref = problem(LARGE[0], torch.bfloat16)
    kernel = KERNELS[f"eager-{policy}/stock"].configure(tile=0)
    near, zero = (kernel.configure(rounding=r)(x.q, x.k, x.v, causal=True) for r in ("rne", "toward_zero"))
    assert (zero.abs() <= near.abs()).all()
    drift = [((o.double() - ref.o) * ref.o.sign()).mean() / ref.o.abs().mean() for o in (near, zero)]
    assert abs(drift[0]) < 2e-4
    assert drift[1] < -1e-3


def test_options_are_typed_and_named() -> None:
    kernel = KERNELS["eager-stored/stabilized"]
    changed = kernel.configure(beta=7.0, tile=64)
    assert (changed.options.beta, changed.options.tile, changed.options.tol) == (7.0, 64, 1e-3)
    assert kernel.options.beta == 2.0
    assert changed.spec.beta == 7.0
    for bad in (
        {"betta": 2.0},
        {"beta": 0.5},
        {"beta": math.nan},
        {"tile": -1},
        {"tile": 1.5},
        {"mantissa_bits": 0},
        {"mantissa_bits": 24},
        {"rounding": "up"},
        {"seed": -1},
    ):
        with pytest.raises(ValidationError, match=next(iter(bad))):
            kernel.configure(**bad)


@pytest.mark.parametrize("name", KERNELS)
def test_every_option_that_a_kernel_names_changes_its_bits(name: str) -> None:
    x, _ = problem(LARGE[0], torch.bfloat16)
    kernel = KERNELS[name]
    other = {"tile": 5, "beta": 4.0, "tol": 1.0, "mantissa_bits": 5, "rounding": "toward_zero", "seed": 9}
    assert kernel.option_names <= other.keys()
    base = kernel.forward(x.q, x.k, x.v, causal=True)
    for option in other:
        changed = kernel.configure(**{option: other[option]}).forward(x.q, x.k, x.v, causal=True)
        assert base.lse is not None
        assert changed.lse is not None
        same = torch.equal(changed.o, base.o) and torch.equal(changed.lse, base.lse)
        assert same == (option not in kernel.option_names), option


def test_launch_facts_record_the_tile() -> None:
    call = Call((1, 1, 8, 16), (1, 1, 8, 16), torch.bfloat16, torch.device("cpu"), causal=False)
    assert FusedKernel("stock").launch_facts(call)["tile_keys"] == 128
    assert FusedKernel("stock").configure(tile=0).launch_facts(call)["tile_keys"] == "whole"


# ---- arguments --------------------------------------------------------------------------------


def tensors(
    q: tuple[int, ...] = (1, 4, 3, 16),
    k: tuple[int, ...] = (1, 2, 5, 16),
    v: tuple[int, ...] = (1, 2, 5, 16),
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3,
) -> list[Tensor]:
    return [torch.zeros(s, dtype=d) for s, d in zip((q, k, v), dtypes, strict=True)]


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        (tensors(dtypes=(F32, BF16, F32)), ValueError, r"^k: torch\.bfloat16.*torch\.float32"),
        (tensors(dtypes=(BF16, BF16, F32)), ValueError, r"^v: torch\.float32"),
        (tensors(q=(4, 3, 16)), ValueError, r"^q: expected \[batch, heads, tokens, head_dim\]"),
        (tensors(k=(1, 1, 2, 5, 16)), ValueError, r"^k: expected .*\[1, 1, 2, 5, 16\]"),
        (tensors(v=(5, 16)), ValueError, r"^v: expected"),
        (tensors(q=(1, 3, 3, 16)), ValueError, r"^q: 3 heads .*2"),
        (tensors(q=(1, 1, 3, 16)), ValueError, r"^q: 1 heads"),
        (tensors(v=(1, 2, 6, 16)), ValueError, r"^v: shape \[1, 2, 6, 16\]"),
        (tensors(v=(1, 2, 5, 8)), ValueError, r"^v: shape"),
        (tensors(q=(2, 4, 3, 16)), ValueError, r"^k: batch"),
        (tensors(q=(1, 4, 3, 8)), ValueError, r"^k: batch and head_dim"),
        (tensors(k=(1, 2, 0, 16), v=(1, 2, 0, 16)), ValueError, r"^k: no keys"),
        (tensors(k=(1, 0, 5, 16), v=(1, 0, 5, 16)), ValueError, r"^q: 4 heads"),
        (tensors(*(((1, 2, 5, 257),) * 3)), Unsupported, r"^head_dim 257.*256"),
        (tensors(dtypes=(torch.float64,) * 3), Unsupported, r"^dtype float64: .*bfloat16"),
        (tensors(dtypes=(torch.int64,) * 3), Unsupported, r"^dtype int64"),
    ],
)
@pytest.mark.parametrize("name", ["eager-stored/stock", "eager-fused/stabilized", "sdpa-math/stock"])
def test_bad_arguments_are_refused_by_name(
    name: str, args: list[Tensor], error: type[Exception], match: str
) -> None:
    kernel = CpuBackend().kernels()[name]
    with pytest.raises(error, match=match):
        kernel(*args, causal=False)
    with pytest.raises(error, match=match):
        kernel.forward(*args, causal=False)


def test_too_many_mantissa_bits_for_the_dtype_are_refused() -> None:
    kernel = KERNELS["eager-fused/stock"].configure(mantissa_bits=8)
    with pytest.raises(ValueError, match=r"mantissa_bits: 8 .*bfloat16.*7"):
        kernel(*tensors(dtypes=(BF16,) * 3), causal=False)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", [(0, 4, 3, 16), (1, 4, 0, 16)])
def test_zero_size_batches_work(name: str, shape: tuple[int, ...]) -> None:
    q, k, v = (t.requires_grad_() for t in tensors(q=shape, k=(shape[0], 2, 5, 16), v=(shape[0], 2, 5, 16)))
    o = KERNELS[name](q, k, v, causal=True)
    assert o.shape == shape
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v)]
    assert (grads[1] == 0).all()


def test_to_storage_of_the_inputs_is_what_the_kernel_reads() -> None:
    # head_dim 1, one key: O is v, bit for bit, for every policy and fix.
    v = to_storage(normal(key_of("eager", "identity"), (1, 1, 1, 16)), torch.bfloat16)
    for name, kernel in KERNELS.items():
        if "shift_const" not in name and "stochastic" not in name:
            assert torch.equal(kernel(v, v, v, causal=False), v), name


def test_a_seed_is_the_first_bits_of_a_key() -> None:
    """63 in the ladder, 31 elsewhere: rows with random rounding are known by them."""
    key = 2**128 - 1
    for name, kernel in eager_kernels().items():
        bits = 63 if name.startswith("eager-ladder/") else 31
        other = kernel.reseeded(key)
        if kernel.draws:
            assert other.options.seed == 2**bits - 1
            assert other.configure(seed=0) == kernel
        else:
            assert other is kernel
    drawing = {kernel.fix for kernel in eager_kernels().values() if kernel.draws}
    assert drawing == {"stochastic", "stochastic_independent"}
