"""The Triton attention kernels without a GPU: interpreted in FP32, and compiled for four chips.

Triton decides when it is imported whether kernels are interpreted, so the interpreter runs in a
process of its own: this file, run as a script with TRITON_INTERPRET=1, prints one JSON line.
bf16 is not interpreted: Triton's interpreter multiplies bf16 tiles as raw bits (up to 3.8).
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from backends.kernels import triton_flash as kernels  # noqa: E402
from backends.kernels import triton_flash_ops as ops  # noqa: E402
from backends.kernels.triton_tiles import PINNED, default_shapes, pack, unpack  # noqa: E402

# ----------------------------------------------------------------------------------- interpreter

SHAPES = {  # (B, Hq, Hkv, Tq, Tk, D)
    "one": (1, 1, 1, 1, 1, 16),
    "odd": (2, 2, 2, 37, 37, 16),
    "gqa": (1, 4, 1, 40, 33, 32),
    "long_queries": (1, 2, 1, 70, 33, 96),
    "batches": (3, 4, 2, 37, 45, 16),
}


def attention_fp64(q, k, v, causal, scale):
    """FP64 attention with the top-left causal mask, differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = scale * (q @ k.transpose(-1, -2))
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def relative_errors(shape, causal, fix, tma, tuples=True):
    """Largest error over largest value, for o, lse, dq, dk, dv."""
    batch, heads, kv_heads, len_q, len_k, head_dim = shape
    generator = torch.Generator().manual_seed(7)
    q, do = (torch.randn(batch, heads, len_q, head_dim, generator=generator) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, len_k, head_dim, generator=generator) for _ in range(2))
    k[:, :, 1::3] = k[:, :, :1]  # repeated maxima, within tiles and across them
    ops._use_tma = lambda _device: tma
    kernels.TUPLES = tl.constexpr(tuples)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = ops.triton_attention(*leaves, causal=causal, fix=fix)
    got = [o, ops.triton_attention_forward(q, k, v, causal=causal, fix=fix)[1]]
    got += torch.autograd.grad(o, leaves, do)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, lse = attention_fp64(*leaves, causal, head_dim**-0.5)
    exact = [o, lse, *torch.autograd.grad(o, leaves, do.double())]
    return {
        name: float((x - y).abs().max() / y.abs().max().clamp_min(0.1))
        for name, x, y in zip(("o", "lse", "dq", "dk", "dv"), got, exact, strict=True)
    }


def rule_mismatches(causal, beta):
    """(rows x tiles where the kernel's shift and the eager rule differ, tiles that shifted)."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, 90, 32, generator=generator) for _ in range(3))
    k[:, :, 5::7] = k[:, :, :1]
    q[:, :, 50:] -= 4 * k[:, :, :1] / k[:, :, :1].norm(dim=-1, keepdim=True)  # negative maxima
    fired = ops.shifted_tiles(q, k, v, causal=causal, beta=beta).bool()
    block = default_shapes(32, q.dtype, (8, 0)).forward.block_n
    s = (q.double() @ k.double().transpose(-1, -2)) * 32**-0.5
    if causal:
        s = s.masked_fill(~torch.ones(90, 90, dtype=torch.bool).tril(), -torch.inf)
    s = torch.nn.functional.pad(s, (0, -90 % block), value=-torch.inf).unflatten(-1, (-1, block))
    top = s.amax(-1, keepdim=True)
    expected = ((s >= top - 1e-3) & (top > -torch.inf)).sum(-1) > 1
    return int((fired != expected).sum()), int(fired.sum())


def infinite_keys_error(fix):
    """Largest error of o where the first key tiles score -inf in every row, and only those."""
    generator = torch.Generator().manual_seed(5)
    q = torch.rand(1, 1, 40, 16, generator=generator) + 0.5
    k, v = (torch.randn(1, 1, 80, 16, generator=generator) for _ in range(2))
    k[:, :, :40] = -torch.inf
    o, lse = ops.triton_attention_forward(q, k, v, causal=False, fix=fix)
    exact, exact_lse = attention_fp64(q.double(), k.double(), v.double(), False, 0.25)
    return float((o - exact).abs().max()), float((lse - exact_lse).abs().max())


def stochastic_mismatches():
    """Elements where the kernel's rounding differs from numpy's, over three seeds."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, generator=generator) * 10
    x[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    wrong = 0
    for seed in (0, 1, 2**33 + 5):
        for bits in (16, 13):
            got = torch.empty_like(x)
            round_kernel[(1,)](x, got, seed, 512, bits)
            index = np.arange(512, dtype=np.uint32)
            words = philox_lane0(index, seed) & np.uint32((1 << bits) - 1)
            pattern = x.numpy().view(np.uint32)
            finite = (pattern & 0x7F800000) != 0x7F800000
            kept = (pattern + words) & np.uint32(0xFFFFFFFF << bits & 0xFFFFFFFF)
            expected = np.where(finite, kept, pattern)
            wrong += int((got.numpy().view(np.uint32) != expected).sum())
    return wrong


@triton.jit(do_not_specialize=["seed"])
def round_kernel(x_ptr, out_ptr, seed, SIZE: tl.constexpr, ROUND_BITS: tl.constexpr):
    index = tl.arange(0, SIZE)
    x = tl.load(x_ptr + index)
    tl.store(out_ptr + index, kernels._round_stochastic(x, index, seed, ROUND_BITS))


def philox_lane0(counter, key):
    """First word of Philox4x32-10 (Salmon et al. 2011) with counter (counter, 0, 0, 0)."""
    c = [counter.astype(np.uint64)] + [np.zeros_like(counter, dtype=np.uint64)] * 3
    k0, k1 = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        product0, product1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (product1 >> np.uint64(32)) ^ c[1] ^ k0,
            product1 & low,
            (product0 >> np.uint64(32)) ^ c[3] ^ k1,
            product0 & low,
        ]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c[0].astype(np.uint32)


def interpret_everything():
    results = {"stochastic": stochastic_mismatches()}
    for fix in ("stock", "stabilized", "consistent_l"):
        results[f"infinite-{fix}"] = infinite_keys_error(fix)
    for causal in (False, True):
        for beta in (1.0, 2.0):
            results[f"rule-{causal}-{beta}"] = rule_mismatches(causal, beta)
        for fix in ops.FIXES:
            results[f"{fix}-odd-{causal}"] = relative_errors(SHAPES["odd"], causal, fix, False)
        for name in ("one", "gqa", "long_queries"):
            results[f"stock-{name}-{causal}"] = relative_errors(SHAPES[name], causal, "stock", False)
        results[f"delta_dp-gqa-{causal}"] = relative_errors(SHAPES["gqa"], causal, "delta_dp", False)
        # the descriptor path of sm90, interpreted
        results[f"tma-gqa-{causal}"] = relative_errors(SHAPES["gqa"], causal, "delta_fp32", True)
        # the bare pointers of triton-ascend, interpreted
        results[f"dense-batches-{causal}"] = relative_errors(
            SHAPES["batches"], causal, "delta_fp32", False, tuples=False
        )
    return results


if __name__ == "__main__":
    print(json.dumps(interpret_everything()))
    sys.exit()


@pytest.fixture(scope="module")
def interpreted():
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton before 3.7 cannot interpret loops under numpy 2.4 and newer")
    run = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


CASES = [f"{fix}-odd-{causal}" for fix in ops.FIXES for causal in (False, True)] + [
    f"{case}-{causal}"
    for case in (
        "stock-one",
        "stock-gqa",
        "stock-long_queries",
        "delta_dp-gqa",
        "tma-gqa",
        "dense-batches",
    )
    for causal in (False, True)
]


@pytest.mark.parametrize("case", CASES)
def test_interpreted_matches_fp64(interpreted, case):
    for name, error in interpreted[case].items():
        assert error < 5e-6, (case, name)


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("causal", [False, True])
def test_interpreted_shift_follows_the_rule(interpreted, causal, beta):
    wrong, fired = interpreted[f"rule-{causal}-{beta}"]
    assert wrong == 0
    assert fired > 10


@pytest.mark.parametrize("fix", ["stock", "stabilized", "consistent_l"])
def test_interpreted_key_tiles_of_minus_infinity_weigh_nothing(interpreted, fix):
    for error in interpreted[f"infinite-{fix}"]:
        assert error < 5e-6


def test_interpreted_stochastic_rounding_matches_numpy(interpreted):
    assert interpreted["stochastic"] == 0


# -------------------------------------------------------------------------- ahead-of-time compile

SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a block
MATRIX_INSTRUCTION = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
TENSORS = {  # the tensor arguments of each kernel, and which side's tile they come in
    "forward": {"q": "m", "k": "n", "v": "n", "o": "m", "residual": "m"},
    "dq": {"q": "m", "k": "n", "v": "n", "do": "m", "o": "m", "residual": "m", "dq_out": "m"},
    "dkdv": {"q": "m", "k": "n", "v": "n", "do": "m", "dk_out": "n", "dv_out": "n"},
}
PLAIN = {("dq", "o"), ("dq", "residual")}  # pointers and strides, even where there is TMA
KERNELS = {
    "forward": kernels.forward_kernel,
    "dq": kernels.dq_kernel,
    "dkdv": kernels.dkdv_kernel,
}
SCALARS = {"scale": "fp32", "beta": "fp32", "tol": "fp32", "seed": "i64"}


def compile_ahead(name, capability, head_dim, tile, type_name="bf16", **constants):
    """Compile one kernel as a launch on that chip would, with `group` = 1 and aligned strides."""
    kernel, tma = KERNELS[name], capability in (90, 100)
    rows = {"m": tile.block_m, "n": tile.block_n}
    padded = triton.next_power_of_2(head_dim)
    constants |= {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "HEAD_DIM": head_dim,
        "TMA": tma,
        "DTYPE": {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[type_name],
        "PRECISION": "ieee",
        "IN_REGISTERS": tile.in_registers,
        "group": 1,
    }
    signature, attributes = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        aligned = [["tt.divisibility", 16]]
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in TENSORS[name] and tma and (name, argument) not in PLAIN:
            shape = f"[1, 1, {rows[TENSORS[name][argument]]}, {padded}]"
            signature[argument] = f"tensordesc<{type_name}{shape}>"
        elif argument in TENSORS[name]:
            signature[argument] = (f"*{type_name}", "i64", "i64", "i64")
            attributes |= {(i, j): aligned for j in range(4)}
        elif name == "dkdv" and argument in ("lse_log2", "delta"):
            signature[argument] = f"tensordesc<fp32[1, {tile.block_m}]>" if tma else "*fp32"
        elif argument.endswith("_ptr"):
            signature[argument] = "*i8" if argument == "fired_ptr" else "*fp32"
        else:
            signature[argument] = SCALARS.get(argument, "i32")
        if signature[argument] in ("*fp32", "*i8", "i32"):
            attributes[(i,)] = aligned
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": ops.FP_FUSION}
    if tile.max_registers:
        options["maxnreg"] = tile.max_registers
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(compiled):
    """(registers a thread, bytes of stack a thread: spills) from the machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return tuple(map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups()))


def test_fusion_of_products_and_sums_is_set_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's default decides bits and may change: ours is set, and is what measured the results so far."""
    from triton.backends.nvidia.compiler import CUDABackend

    x = torch.empty(1, 1, 16, 64)
    tile = ops.default_shapes(64, torch.float32, (9, 0)).forward
    assert ops._options(tile, x)["enable_fp_fusion"] is True
    assert ops.launch_facts(64, torch.float32, x.device)["fp_fusion"] is True
    target = GPUTarget("cuda", 90, 32)
    assert CUDABackend(target).parse_options({}).enable_fp_fusion is True
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    assert CUDABackend(target).parse_options({}).enable_fp_fusion is False
    assert CUDABackend(target).parse_options(ops._options(tile, x)).enable_fp_fusion is True


def check_compiled(name, capability, head_dim, tile, spill_limit=0, **constants):
    compiled = compile_ahead(name, capability, head_dim, tile, **constants)
    shared = compiled.metadata.shared
    registers, stack = resources(compiled)
    switches = {key: value for key, value in constants.items() if value}
    print(f"sm{capability} {name} D={head_dim} {switches}: {shared} B, {registers} reg, {stack} B")
    assert shared <= SHARED_LIMIT[capability]
    assert MATRIX_INSTRUCTION[capability] in compiled.asm["ptx"]
    assert registers <= 255
    assert stack <= spill_limit


FORWARD = {
    "SHIFT": 0,
    "CONSISTENT_L": False,
    "RESIDUAL": False,
    "ROUND_BITS": 0,
    "TRACE": False,
    "CAUSAL": True,
}
BACKWARD = {"CAUSAL": True, "RESIDUAL": False, "DELTA_DP": False}
aot = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process")


@aot
@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("fix", ops.FIXES)
def test_every_fix_compiles(fix, capability):
    switches = {**FORWARD, **ops.forward_switches(fix, torch.bfloat16)}
    shapes = default_shapes(64, torch.bfloat16, divmod(capability, 10))
    check_compiled("forward", capability, 64, shapes.forward, **switches)


@aot
@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_pass_compiles(head_dim, capability):
    shapes = default_shapes(head_dim, torch.bfloat16, divmod(capability, 10))
    # At 256 a few values spill (sm90: 112 bytes a thread), and still it is the fastest tile there.
    spill_limit = 128 if head_dim == 256 else 0
    check_compiled("forward", capability, head_dim, shapes.forward, **FORWARD)
    check_compiled("dq", capability, head_dim, shapes.dq, spill_limit, **BACKWARD)
    check_compiled("dkdv", capability, head_dim, shapes.dkdv, spill_limit, CAUSAL=True)


@aot
@pytest.mark.parametrize("capability", [89, 90])
def test_odd_cases_compile(capability):
    """head_dim padded to a power of two, the smallest one, fp16, full masks, other deltas."""
    chip = divmod(capability, 10)
    for head_dim, type_name in ((96, "bf16"), (16, "fp16")):
        shapes = default_shapes(head_dim, torch.bfloat16, chip)
        full = {**FORWARD, "CAUSAL": False}
        check_compiled("forward", capability, head_dim, shapes.forward, type_name=type_name, **full)
    shapes = default_shapes(64, torch.bfloat16, chip)
    for switch in ("RESIDUAL", "DELTA_DP"):
        check_compiled("dq", capability, 64, shapes.dq, **{**BACKWARD, switch: True})


# ------------------------------------------------------------------------------------- bad input


def tensors(q=(1, 4, 8, 64), kv=(1, 2, 8, 64), dtype=torch.bfloat16):
    return torch.zeros(q, dtype=dtype), torch.zeros(kv, dtype=dtype), torch.zeros(kv, dtype=dtype)


@pytest.mark.parametrize(
    ("message", "arguments", "options"),
    [
        ("q: on cpu; allowed: a CUDA device", tensors(), {}),
        ("fix: 'stok'; allowed: stock, ", tensors(), {"fix": "stok"}),
        ("q: 3 dimensions", (torch.zeros(1, 2, 3), *tensors()[1:]), {}),
        ("q: dtype torch.float64; allowed: bfloat16", tensors(dtype=torch.float64), {}),
        ("k: torch.float16 on cpu, but", (tensors()[0], *tensors(dtype=torch.float16)[1:]), {}),
        ("q: head_dim 80; allowed: 16, 32", tensors((1, 4, 8, 80), (1, 2, 8, 80)), {}),
        ("q: head_dim 512; allowed", tensors((1, 4, 8, 512), (1, 2, 8, 512)), {}),
        ("k: 3 heads; q's 4 heads must be a multiple", tensors(kv=(1, 3, 8, 64)), {}),
        ("k: shape [2, 2, 8, 64]; expected q's batch", tensors(kv=(2, 2, 8, 64)), {}),
        ("k: 0 tokens", tensors(kv=(1, 2, 0, 64)), {}),
        ("scale: -1.0; allowed: finite and > 0", tensors(), {"scale": -1.0}),
        ("beta: 0.5; allowed: finite and >= 1", tensors(), {"beta": 0.5}),
        ("tol: 1.0; allowed: 0 <= tol < 0.1", tensors(), {"tol": 1.0}),
        ("seed: -1; allowed", tensors(), {"seed": -1}),
    ],
)
def test_bad_input_is_named(message, arguments, options):
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.triton_attention(*arguments, causal=True, **options)


def test_config_survives_the_operator():
    for family in PINNED.values():
        for shapes in family.values():
            assert unpack(pack(shapes)) == shapes


def unlike():
    """Tensors that differ in one thing each: dtype, shape, strides."""
    parent = torch.zeros(2, 3, 40, 4, 64, dtype=torch.bfloat16)
    return [
        parent[:, 1].transpose(1, 2),  # a slice of a fused QKV
        torch.zeros(2, 4, 40, 64, dtype=torch.bfloat16),
        torch.zeros(2, 4, 40, 64, dtype=torch.float16),
        torch.zeros(1, 4, 40, 64, dtype=torch.bfloat16),
        torch.zeros(2, 4, 48, 64, dtype=torch.bfloat16),
        torch.zeros(2, 4, 40, 64),
    ]


def test_a_descriptor_made_again_is_the_one_that_triton_checked(monkeypatch):
    monkeypatch.setattr(ops, "_use_tma", lambda _device: True)
    monkeypatch.setattr(ops, "_fields", {})
    for _ in range(2):  # made, then made again
        for block in (64, 128):
            for x in unlike():
                found = ops._argument(x, block)
                fresh = ops.TensorDescriptor(x, list(x.shape), [*ops._pointer(x)[1:], 1], [1, 1, block, 64])
                assert {**vars(found), "base": 0} == {**vars(fresh), "base": 0}
                assert found.base is x
    assert len(ops._fields) == 2 * len(unlike())
    assert not any("base" in fields for fields in ops._fields.values())  # no memory kept alive


def test_a_row_descriptor_made_again_has_the_rows_of_its_tensor(monkeypatch):
    monkeypatch.setattr(ops, "_use_tma", lambda _device: True)
    monkeypatch.setattr(ops, "_fields", {})
    for _ in range(2):
        for heads, length, block in ((4, 128, 64), (4, 192, 64), (8, 128, 64), (4, 128, 32)):
            made = ops._row_argument(torch.zeros(2, heads, length), block)
            assert (made.shape, made.strides) == ([2 * heads, length], [length, 1])
            assert made.block_shape == [1, block]
    assert len(ops._fields) == 4
    with pytest.raises(ValueError, match=r"dkdv\.block_m 16"):
        ops._row_argument(torch.zeros(2, 4, 128), 16)


def test_layouts_that_no_descriptor_takes_are_copied():
    odd_rows = torch.zeros(2, 4, 40, 65, dtype=torch.bfloat16)[..., :64]  # 130 bytes from row to row
    assert odd_rows.data_ptr() % 16 == 0
    for _ in range(2):
        assert ops._addressable(odd_rows).is_contiguous()
    shifted = torch.zeros(2 * 4 * 40 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 4, 40, 64)
    assert ops._addressable(shifted).data_ptr() % 16 == 0
    fine = torch.zeros(2, 40, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert ops._addressable(fine) is fine


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_what_is_traced_goes_through_the_operator():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, seen = torch.zeros(2, 1, 4, 16), []

    def look(y):
        seen.append(ops._plain(y))
        return y

    assert ops._plain(x, torch.nn.Parameter(x))
    torch.func.vmap(look)(x)
    torch.jit.trace(look, x, check_trace=False)
    with FakeTensorMode() as mode:
        look(x)
    look(mode.from_tensor(x))
    assert seen == [False, False, False, False]
    assert not torch.compile(lambda y: y + ops._plain(y), backend="eager")(torch.zeros(1)).any()


def test_a_second_derivative_is_refused_and_not_left_out(monkeypatch):
    """Without a GPU the launches give shapes alone."""
    empty = torch.zeros(0)

    def forward(q, *_rest):
        return torch.ones_like(q), torch.zeros(q.shape[:3]), empty, empty

    def backward(do, q, k, v, *_rest, **_shapes):
        return torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)

    monkeypatch.setattr(ops, "_launch_forward", forward)
    monkeypatch.setattr(ops, "_launch_backward", backward)
    monkeypatch.setattr(ops, "check_device", lambda q: None)
    leaves = [torch.randn(1, 2, 8, 16).requires_grad_() for _ in range(3)]
    loss = ops.triton_attention(*leaves, causal=True).sum()
    assert all((g == 1).all() for g in torch.autograd.grad(loss, leaves, retain_graph=True))
    dq = torch.autograd.grad(loss, leaves, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="triton_backward"):
        dq.square().sum().backward()
