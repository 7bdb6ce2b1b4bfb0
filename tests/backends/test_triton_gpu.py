"""The Triton attention kernels on a GPU: error against FP64, determinism, autograd, refusals.

Every bound is relative to PyTorch's own kernel on the same inputs, measured in the same test.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("needs an NVIDIA GPU of capability 8.0 or newer", allow_module_level=True)

from backends.fixes import FIXES
from backends.kernels.eager import Spec, eager_forward
from backends.kernels.triton_flash_ops import (
    HEAD_DIMS,
    _forward_op,
    _launch_forward,
    shifted_tiles,
    triton_attention,
    triton_attention_forward,
)
from backends.kernels.triton_tiles import LaunchShapes, Tile, default_shapes, pack

REPEATS = int(os.environ.get("ATTNREPRO_REPEATS", "1000"))
# Rounding to either side at random doubles the variance of O's rounding error; a constant shift
# makes it one-sided. Both are controls, not contenders.
NAMES = ("o", "dq", "dk", "dv")
ALLOWED = {"stochastic": 2.5, "shift_const": 2.5}


def make_qkv(shape_q, shape_kv, dtype=torch.bfloat16, seed=0, gain=1.0):
    """q, k, v, do with N(0, 1) entries (q times gain), rounded to dtype."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (shape_q, shape_kv, shape_kv, shape_q)
    q, k, v, do = (torch.randn(s, generator=generator).cuda() for s in shapes)
    return tuple(x.to(dtype) for x in (q * gain, k, v, do))


def attention_fp64(q, k, v, causal, scale):
    """FP64 attention with the top-left causal mask; the measuring stick. Differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = scale * (q @ k.transpose(-1, -2))
    if causal:
        visible = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        s = s.masked_fill(~visible, -torch.inf)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def outputs_and_grads(attention, q, k, v, do):
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    o = attention(q, k, v)
    return dict(zip(NAMES, (o, *torch.autograd.grad(o, (q, k, v), do)), strict=True))


def reference(q, k, v, do, causal):
    scale = q.shape[-1] ** -0.5
    q, k, v, do = (x.double() for x in (q, k, v, do))
    return outputs_and_grads(lambda *a: attention_fp64(*a, causal, scale)[0], q, k, v, do)


def pytorch_fused(q, k, v, do, causal):
    """PyTorch's flash kernel, or memory-efficient where flash refuses (causal with Tq != Tk)."""
    flash = not causal or q.shape[2] == k.shape[2]
    backend = SDPBackend.FLASH_ATTENTION if flash else SDPBackend.EFFICIENT_ATTENTION
    group = q.shape[1] // k.shape[1]

    def attention(q, k, v):
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return outputs_and_grads(attention, q, k, v, do)


def rms(x):
    return x.double().square().mean().sqrt().item()


def assert_no_worse(got, theirs, exact, allowed, label):
    for name, x in got.items():
        error, bound = x.double() - exact[name], theirs[name].double() - exact[name]
        # With one key O = V and dS = 0 exactly, but not where a control rounds O or P otherwise.
        floor = (1e-6 if allowed < 2 else 2e-3) * max(rms(exact[name]), rms(exact["o"]))
        if rms(error) <= allowed * rms(bound) + floor and torch.isfinite(x).all():
            continue
        flat = torch.nan_to_num(error.abs(), nan=torch.inf).argmax().item()
        where = [int(i) for i in torch.unravel_index(torch.tensor(flat), x.shape)]
        here, there = x.flatten()[flat].item(), exact[name].flatten()[flat].item()
        pytest.fail(
            f"{label} {name}: rms error {rms(error):.3e}, PyTorch's {rms(bound):.3e}; "
            f"worst at {where}: {here:.6e}, exact {there:.6e}"
        )


SHAPES = {  # (B, Hq, Hkv, Tq, Tk, D)
    "one": (2, 2, 2, 1, 1, 64),
    "127": (2, 3, 3, 127, 127, 64),
    "133": (1, 2, 2, 133, 133, 128),
    "1024": (2, 4, 4, 1024, 1024, 128),
    "4097": (1, 2, 2, 4097, 4097, 64),
    "gqa8": (2, 16, 2, 260, 260, 128),
    "long_keys": (1, 2, 2, 100, 333, 64),
    "long_queries": (1, 2, 1, 333, 100, 128),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_error_no_worse_than_pytorch(shape, causal):
    batch, heads, kv_heads, len_q, len_k, head_dim = shape
    q, k, v, do = make_qkv((batch, heads, len_q, head_dim), (batch, kv_heads, len_k, head_dim))
    exact = reference(q, k, v, do, causal)
    theirs = pytorch_fused(q, k, v, do, causal)
    for fix in FIXES:
        got = outputs_and_grads(lambda *a, fix=fix: triton_attention(*a, causal=causal, fix=fix), q, k, v, do)
        assert_no_worse(got, theirs, exact, ALLOWED.get(fix, 1.5), fix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim, dtype):
    q, k, v, do = make_qkv((1, 4, 200, head_dim), (1, 2, 200, head_dim), dtype)
    exact = reference(q, k, v, do, True)
    got = outputs_and_grads(lambda *a: triton_attention(*a, causal=True), q, k, v, do)
    assert_no_worse(got, pytorch_fused(q, k, v, do, True), exact, 1.5, f"D={head_dim}")


def test_fp32_inputs():
    q, k, v, do = make_qkv((1, 2, 150, 64), (1, 2, 150, 64), torch.float32)
    exact = reference(q, k, v, do, True)
    got = outputs_and_grads(lambda *a: triton_attention(*a, causal=True), q, k, v, do)
    for name, x in got.items():
        assert rms(x - exact[name]) < 2e-6 * rms(exact[name]), name


@pytest.mark.parametrize("fix", FIXES)
def test_large_logits(fix):
    q, k, v, do = make_qkv((1, 2, 300, 64), (1, 2, 300, 64), gain=30.0)
    exact = reference(q, k, v, do, True)
    got = outputs_and_grads(lambda *a: triton_attention(*a, causal=True, fix=fix), q, k, v, do)
    if fix.startswith("stabilized"):  # beta * m overflows exp once m > 88: 0/0, by the rule itself
        hot = shifted_tiles(q, k, v, causal=True).any(-1)
        assert torch.isfinite(got["o"][~hot]).all()
    else:
        assert_no_worse(got, pytorch_fused(q, k, v, do, True), exact, ALLOWED.get(fix, 1.5), fix)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lse(causal):
    q, k, v, _ = make_qkv((2, 4, 257, 64), (2, 2, 257, 64))
    exact = attention_fp64(q.double(), k.double(), v.double(), causal, 0.125)[1]
    for fix in FIXES:
        lse = triton_attention_forward(q, k, v, causal=causal, fix=fix)[1]
        assert lse.dtype == torch.float32
        assert (lse - exact).abs().max() < 5e-6, fix


def test_nan_and_inf_inputs_give_nan():
    q, k, v, do = make_qkv((1, 1, 200, 64), (1, 1, 200, 64))
    q[0, 0, 7, 3] = torch.nan
    k[0, 0, 150, :] = -torch.inf
    got = outputs_and_grads(lambda *a: triton_attention(*a, causal=True), q, k, v, do)
    assert got["o"][0, 0, 7].isnan().all()
    assert not got["o"][0, 0, :7].isnan().any()
    assert not got["o"][0, 0, 8:150].isnan().any()
    assert got["o"][0, 0, 150:].isnan().any()  # a row of mixed signs: inf and -inf meet
    assert got["dq"][0, 0, 7].isnan().all()
    assert got["dk"].isnan().any()


@pytest.mark.parametrize("layout", ["BTHD", "sliced", "odd_stride", "reversed_dims", "expanded"])
def test_any_strides(layout):
    def relaid(x):
        if layout == "BTHD":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "sliced":
            return torch.stack([x, x], 3).flatten(3)[..., : x.shape[3]]
        if layout == "odd_stride":
            return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]
        if layout == "reversed_dims":
            return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        return x[:, :1].expand_as(x)

    q, k, v, do = (relaid(x) for x in make_qkv((2, 2, 190, 64), (2, 2, 190, 64)))
    dense = outputs_and_grads(
        lambda *a: triton_attention(*(x.contiguous() for x in a), causal=True), q, k, v, do
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = triton_attention(*leaves, causal=True)
    strided = dict(zip(NAMES, (o, *torch.autograd.grad(o, leaves, do)), strict=True))
    for name, x in strided.items():
        assert torch.equal(x, dense[name]), name


def test_repeats_are_bitwise_equal():
    q, k, v, do = make_qkv((2, 4, 200, 64), (2, 2, 200, 64))
    for fix in FIXES:
        run = lambda fix=fix: outputs_and_grads(  # noqa: E731
            lambda *a: triton_attention(*a, causal=True, fix=fix), q, k, v, do
        )
        first = run()
        for _ in range(REPEATS if fix == "stock" else REPEATS // 20):
            again = run()
            for name, x in again.items():
                assert torch.equal(x, first[name]), (fix, name)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_repeats_are_bitwise_equal_at_speed(head_dim):
    """The shapes of the speed runs, where tiles race if anything does."""
    q, k, v, do = make_qkv((2, 16, 2048, head_dim), (2, 16, 2048, head_dim))
    run = lambda: outputs_and_grads(  # noqa: E731
        lambda *a: triton_attention(*a, causal=True, fix="stabilized"), q, k, v, do
    )
    first = run()
    for _ in range(max(REPEATS // 50, 3)):
        for name, x in run().items():
            assert torch.equal(x, first[name]), name


def tied_inputs(batch=2, tokens=256, head_dim=64, repeats=2, gap=12.0, jitter=0.5, seed=0):
    """Rows whose maximum repeats: keys 0..repeats-1 tie at about `gap` over the others.

    Channel 0 is left 0 in q and k for the leak probe. bf16, one head.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    q, k = 0.5 * normal(batch, 1, tokens, head_dim), 0.5 * normal(batch, 1, tokens, head_dim)
    q[..., :8], k[..., :8], k[..., :repeats, :] = 0, 0, 0
    k[..., :repeats, 1] = 4
    q[..., 1] = (gap + jitter * normal(batch, 1, tokens)) * head_dim**0.5 / 4
    sign = torch.where(normal(batch, 1, 1, head_dim) > 0, 1.0, -1.0)
    v = sign * (2.3 + 0.3 * normal(batch, 1, tokens, head_dim))
    do = sign * 1e-2 + 1e-3 * normal(batch, 1, tokens, head_dim)
    return tuple(x.bfloat16().cuda() for x in (q, k, v, do))


def leak(fix, causal=False, **kwargs):
    """(mean, rms) over rows of dq[..., 0] / scale, with q[..., 0] = 0 and k[..., 0] = 1.

    It is rowsum(dS), exactly 0 without rounding: the error of delta, plus that of rounding dS.
    """
    q, k, v, do = tied_inputs(**kwargs)
    k[..., 0] = 1
    got = outputs_and_grads(lambda *a: triton_attention(*a, causal=causal, fix=fix), q, k, v, do)
    row_sums = got["dq"][..., 0].double() * q.shape[-1] ** 0.5
    return row_sums.mean().item(), rms(row_sums)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_leak_falls_a_hundredfold(causal):
    """Two equal maxima 16 over the rest: O's rounding makes delta err, to one side in every row.

    Smaller gaps leave more to the rounding of P and dS, which neither fix changes.
    """
    leaks = {fix: leak(fix, causal, gap=16.0) for fix in FIXES}
    print({fix: f"mean {mean:.1e}, rms {size:.1e}" for fix, (mean, size) in leaks.items()})
    stock_mean, stock_rms = leaks["stock"]
    assert abs(stock_mean) > 0.5 * stock_rms  # coherent
    for fix in ("delta_fp32", "delta_dp"):
        assert abs(leaks[fix][0]) * 100 < abs(stock_mean)
        assert leaks[fix][1] * 100 < stock_rms


def test_shifted_tiles_follow_the_rule():
    q, k, v, _ = tied_inputs(repeats=2, gap=12, jitter=0.5)
    shapes = LaunchShapes(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))
    for causal in (False, True):
        fired = shifted_tiles(q, k, v, causal=causal, shapes=shapes)
        s = 0.125 * (q.double() @ k.double().transpose(-1, -2))
        if causal:
            s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), -torch.inf)
        tiles = s.unflatten(-1, (-1, 64))
        top = tiles.amax(-1, keepdim=True)
        expected = ((tiles >= top - 1e-3) & (top > -torch.inf)).sum(-1) > 1
        # a pair whose distance is within fp32 rounding of tol may fall on either side
        edge = ((tiles - (top - 1e-3)).abs() < 1e-5).any(-1)
        assert expected.any()
        assert not edge.all()
        assert torch.equal(fired.bool()[~edge], expected[~edge])
        spec = Spec("fused", FIXES["stabilized"], tile=64)
        eager = eager_forward(q, k, v, causal, 0.125, spec).fired
        assert torch.equal(fired.bool()[~edge], eager[~edge])


def test_torch_compile_and_opcheck():
    q, k, v, do = make_qkv((1, 4, 160, 64), (1, 2, 160, 64))
    compiled = torch.compile(lambda *a: 2 * triton_attention(*a, causal=True), fullgraph=True)
    eager = outputs_and_grads(lambda *a: 2 * triton_attention(*a, causal=True), q, k, v, do)
    for name, x in outputs_and_grads(compiled, q, k, v, do).items():
        assert torch.equal(x, eager[name]), name
    shapes = default_shapes(64, q.dtype, torch.cuda.get_device_capability())
    args = (q.requires_grad_(), k, v, True, 0.125, "delta_fp32", 2.0, 1e-3, 0, pack(shapes))
    torch.library.opcheck(_forward_op, args)


def test_stochastic_rounding_depends_on_the_seed_alone():
    q, k, v, _ = make_qkv((1, 2, 300, 64), (1, 2, 300, 64))
    first, again, other = (
        triton_attention(q, k, v, causal=True, fix="stochastic", seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    stock, _, residual, _ = _launch_forward(
        q, k, v, True, 0.125, "delta_fp32", 2.0, 1e-3, 0, default_shapes(64, q.dtype, (9, 0))
    )
    unrounded = stock.double() + residual.double()
    mean = (
        sum(
            triton_attention(q, k, v, causal=True, fix="stochastic", seed=seed).double() for seed in range(64)
        )
        / 64
    )
    # one rounding at random: variance ulp^2 / 6; the mean of 64: a fifth of RNE's ulp / sqrt(12)
    assert rms(mean - unrounded) < 0.25 * rms(stock - unrounded)


def test_empty_batch():
    q, k, v, do = make_qkv((0, 4, 32, 64), (0, 2, 32, 64))
    got = outputs_and_grads(lambda *a: triton_attention(*a, causal=True), q, k, v, do)
    assert got["o"].shape == q.shape
    assert got["dk"].shape == k.shape


FRESH_THREAD = """
import torch
from backends.kernels.triton_flash_ops import _launch_backward, _launch_forward, triton_attention
from backends.kernels.triton_tiles import default_shapes

x = [torch.randn(1, 2, 64, 64, device="cuda").bfloat16() for _ in range(3)]
shapes = default_shapes(64, torch.bfloat16, torch.cuda.get_device_capability())
o, lse, residual, _ = _launch_forward(*x, True, 0.125, "stock", 2.0, 1e-3, 0, shapes)
_launch_backward(o, *x, o, lse, residual, True, 0.125, "stock", shapes)  # compiled and loaded here
leaves = [t.requires_grad_() for t in x]
torch.autograd.grad(triton_attention(*leaves, causal=True), leaves, o)
torch.cuda.synchronize()
print("done")
"""


def test_backward_in_a_thread_without_a_device_context():
    """Where the main thread loaded the kernels, the first thing that autograd's thread does on the
    device may be to encode our tensor descriptors; in a process of its own, as a thread keeps what it
    was given."""
    command = [sys.executable, "-c", FRESH_THREAD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "done", done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_a_device_that_is_not_current():
    q, k, v, do = make_qkv((1, 2, 150, 64), (1, 2, 150, 64))
    here = outputs_and_grads(lambda *a: triton_attention(*a, causal=True), q, k, v, do)
    moved = (x.to("cuda:1") for x in (q, k, v, do))
    there = outputs_and_grads(lambda *a: triton_attention(*a, causal=True), *moved)
    for name, x in there.items():
        assert torch.equal(x.cpu(), here[name].cpu()), name
