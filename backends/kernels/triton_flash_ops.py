"""Host side of the Triton attention kernels: checks, launches, torch.library operators, autograd.

Device code and the notation are in `triton_flash.py`.  Importing this file needs Triton; running it
needs an NVIDIA GPU of capability 8.0 or newer, an Ascend NPU with triton-ascend, or Triton's
interpreter, for tests.

    o = triton_attention(q, k, v, causal=True, fix="stabilized")        # differentiable
    o, lse = triton_attention_forward(q, k, v, causal=True)             # forward only
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.fixes import FIXES
from backends.kernels import triton_flash
from backends.kernels.triton_flash import dkdv_kernel, dq_kernel, forward_kernel
from backends.kernels.triton_tiles import ASCEND, LaunchShapes, Tile, default_shapes, pack, unpack

with contextlib.suppress(ImportError):  # triton-ascend has none: there is no TMA
    from triton.tools.tensor_descriptor import TensorDescriptor

HEAD_DIMS = (16, 32, 64, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_CAPABILITY = (8, 0)
TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32
}  # fmt: skip
LAYOUTS = 4096  # of tensors, remembered
FP_FUSION = (
    True  # a product and a sum become one rounding; set, as it decides bits and Triton changes the default
)
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def forward_switches(fix: str, dtype: torch.dtype) -> dict[str, int | bool]:
    """The forward kernel's compile-time switches for a fix; the backward ones are in `_launch_dq`."""
    what = FIXES[fix]
    return {
        "SHIFT": {"row_max": 0, "repeated": 1, "const": 2}[what.shift],
        "CONSISTENT_L": what.normalizer == "cast_p",
        "RESIDUAL": what.delta == "residual",
        "ROUND_BITS": DROPPED_BITS[dtype] if what.stochastic else 0,
    }


@lru_cache
def capability_of(device: torch.device) -> tuple[int, int]:
    if device.type == "cpu":  # Triton's interpreter: any launch shape runs
        return MIN_CAPABILITY
    if device.type == "npu":
        return ASCEND
    return torch.cuda.get_device_capability(device)


def launch_facts(
    head_dim: int, dtype: torch.dtype, device: torch.device, shapes: LaunchShapes | None = None
) -> dict:
    """Pinned launch shapes and versions, as recorded with every result row."""
    shapes = shapes or default_shapes(head_dim, dtype, capability_of(device))
    versions = {"triton": triton.__version__, "torch": torch.__version__}
    return {**versions, "tma": _use_tma(device), "fp_fusion": FP_FUSION, **asdict(shapes)}


# ---------------------------------------------------------------------------------------- checks


@lru_cache
def _interpreted() -> bool:
    knobs = getattr(triton, "knobs", None)  # triton-ascend has none
    return knobs is not None and knobs.runtime.interpret


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, scale: float, fix: str, beta: float, tol: float, seed: int
) -> None:  # fmt: skip
    """ValueError with one line that names the argument, what it is, and what is allowed."""
    if fix not in FIXES:
        raise ValueError(f"fix: {fix!r}; allowed: {', '.join(FIXES)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name}: {x.dim()} dimensions; expected 4, [batch, heads, tokens, D]")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name}: dtype {x.dtype}; allowed: bfloat16, float16, float32")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name}: {x.dtype} on {x.device}, but q is {q.dtype} on {q.device}; "
                "q, k and v must share dtype and device"
            )
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(f"q: head_dim {q.shape[3]}; allowed: {', '.join(map(str, HEAD_DIMS))}")
    if k.shape != v.shape:
        raise ValueError(f"v: shape {list(v.shape)}; expected k's, {list(k.shape)}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k: shape {list(k.shape)}; expected q's batch and head_dim, q is {list(q.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: {k.shape[1]} heads; q's {q.shape[1]} heads must be a multiple of them")
    if k.shape[2] == 0:
        raise ValueError("k: 0 tokens; at least 1 is needed, softmax over nothing is undefined")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale: {scale}; allowed: finite and > 0")
    if not (math.isfinite(beta) and beta >= 1):
        raise ValueError(f"beta: {beta}; allowed: finite and >= 1")
    if not 0 <= tol < 0.1:
        raise ValueError(f"tol: {tol}; allowed: 0 <= tol < 0.1 (units of the scaled logits)")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed: {seed}; allowed: 0 <= seed < 2^63")


def check_device(q: Tensor) -> None:
    """Raised at launch, not while tracing: fake tensors have no usable device."""
    if _interpreted() or q.device.type == "npu":
        return
    if q.device.type != "cuda":
        here = "" if torch.cuda.is_available() else " (this machine offers none)"
        raise ValueError(f"q: on {q.device}; allowed: a CUDA device{here}")
    capability = torch.cuda.get_device_capability(q.device)
    if capability < MIN_CAPABILITY or torch.version.hip:
        raise ValueError(
            f"q: on {torch.cuda.get_device_name(q.device)}, capability "
            f"{capability[0]}.{capability[1]}; allowed: NVIDIA, 8.0 (sm80) or newer"
        )


# --------------------------------------------------------------------------------------- launches


_thread = threading.local()


@contextlib.contextmanager
def _launching_on(device: torch.device) -> Iterator[None]:
    """Triton launches on the current device, whatever device its arguments live on.

    It also encodes tensor descriptors through the driver, which fails in a thread that has no device
    context yet: a backward pass runs in a thread of autograd's, and memory from PyTorch's cache needs
    none. So every thread's first launch is preceded by a call that binds one.
    """
    if device.type != "cuda":  # Triton's interpreter
        yield
        return
    with torch.cuda.device(device):
        bound = _thread.__dict__.setdefault("bound", set())
        if device not in bound:
            torch.zeros((), device=device)
            bound.add(device)
        yield


def _addressable(x: Tensor) -> Tensor:
    """x, or a contiguous copy if the kernels can't address its layout.

    Descriptors need a dense last dimension, and a 16-byte aligned start and strides; a bare pointer
    needs all dense.
    """
    if not triton_flash.TUPLES.value:
        return x.contiguous()
    if _layout_fits(x.shape, x.stride(), x.element_size()) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=LAYOUTS)
def _layout_fits(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    step = 16 // itemsize
    outer = [s for s, n in zip(strides[:3], shape[:3], strict=True) if n > 1]
    return strides[3] == 1 and all(s > 0 and s % step == 0 for s in outer)


def _use_tma(device: torch.device) -> bool:
    """Tensor descriptors on sm90 and sm100; pointers and strides elsewhere.

    sm120 has the hardware too; untested there, it takes the plain path.
    """
    return capability_of(device)[0] in (9, 10)


def _pointer(x: Tensor):
    """x as (pointer, stride_b, stride_h, stride_t), or itself, dense, where Triton takes no tuples."""
    if not triton_flash.TUPLES.value:
        return x
    # A dimension of size 1 may carry any stride: give it one that is surely aligned.
    b, h, t = (x.stride(i) if x.shape[i] > 1 else x.shape[3] for i in range(3))
    return x, b, h, t


def _argument(x: Tensor, block: int):
    """x as the tiled kernels take it: a descriptor of [1, 1, block, D] tiles where there is TMA."""
    if not _use_tma(x.device):
        return _pointer(x)
    key = (x.dtype, x.shape, x.stride(), block)
    if made := _again(key, x):
        return made
    block_shape = [1, 1, block, triton.next_power_of_2(x.shape[3])]
    return _descriptor(key, x, list(x.shape), [*_pointer(x)[1:], 1], block_shape)


_fields: dict[tuple, dict] = {}  # of descriptors, by what they depend on but for the address


def _descriptor(key: tuple, x: Tensor, shape: list, strides: list, block_shape: list):
    """A tensor descriptor, checked by Triton; what was checked is kept for `_again`."""
    made = TensorDescriptor(x, shape, strides, block_shape)
    if len(_fields) >= LAYOUTS:
        _fields.clear()
    _fields[key] = {name: value for name, value in vars(made).items() if name != "base"}
    return made


def _again(key: tuple, x: Tensor):
    """The descriptor of another tensor like an earlier one, or None. Triton's checks take longer than
    all else that the host does for an argument, and look at nothing else but the aligned address."""
    fields = _fields.get(key)
    if fields is None:
        return None
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.__dict__.update(fields, base=x)
    return made


def _heads(x: Tensor) -> int:
    """Heads that the kernels count: with a bare pointer all sequences of the batch are heads of one."""
    return x.shape[1] if triton_flash.TUPLES.value else x.shape[0] * x.shape[1]


def _row_argument(x: Tensor, block: int):
    """Per-row values [B, H, T] as dkdv_kernel takes them: a 2-D descriptor, or the tensor."""
    if not _use_tma(x.device):
        return x
    if block < 32:
        raise ValueError(f"shapes: dkdv.block_m {block}; allowed: >= 32, TMA writes 128-byte lines")
    key = (x.dtype, x.shape, block)
    if made := _again(key, x):
        return made
    rows, length = x.shape[0] * x.shape[1], x.shape[2]
    return _descriptor(key, x, [rows, length], [length, 1], [1, block])


def _options(tile: Tile, x: Tensor) -> dict:
    """Compile-time arguments that every tiled kernel shares."""
    registers = {} if x.device.type == "npu" else {"maxnreg": tile.max_registers or None}
    return registers | {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "HEAD_DIM": x.shape[3],
        "DTYPE": TRITON_DTYPES[x.dtype], "PRECISION": "ieee", "TMA": _use_tma(x.device),
        "IN_REGISTERS": tile.in_registers, "num_warps": tile.num_warps,
        "num_stages": tile.num_stages, "enable_fp_fusion": FP_FUSION,
    }  # fmt: skip


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, fix: str, beta: float, tol: float,
    seed: int, shapes: LaunchShapes, trace: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(o, lse, residual, fired); the last two are empty unless the fix, or trace, asks for them."""
    check_device(q)
    batch, heads, len_q, _ = q.shape
    q, k, v = map(_addressable, (q, k, v))
    switches = forward_switches(fix, q.dtype)
    tile = shapes.forward
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    residual = torch.empty_like(o) if switches["RESIDUAL"] else o.new_empty(0)
    tiles = triton.cdiv(k.shape[2], tile.block_n) if trace else 0
    fired = torch.zeros((*q.shape[:3], tiles), dtype=torch.int8, device=q.device)
    if o.numel() == 0:
        return o, lse, residual, fired
    o_argument = _argument(o, tile.block_m)
    with _launching_on(q.device):
        forward_kernel[(triton.cdiv(len_q, tile.block_m) * batch * heads,)](
            _argument(q, tile.block_m), _argument(k, tile.block_n), _argument(v, tile.block_n),
            o_argument, _argument(residual, tile.block_m) if switches["RESIDUAL"] else o_argument,
            lse, fired, _heads(q), heads // k.shape[1], len_q, k.shape[2], scale, beta, tol, seed,
            CAUSAL=causal, TRACE=trace, **switches, **_options(tile, q),
        )  # fmt: skip
    return o, lse, residual, fired


def _launch_dq(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, residual: Tensor,
    causal: bool, scale: float, fix: str, tile: Tile,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, lse in log2 units, delta); the last two fp32 [B, Hq, Tq padded to whole tiles]."""
    has_residual = FIXES[fix].delta == "residual"
    batch, heads, len_q, _ = q.shape
    padded_q = triton.cdiv(len_q, tile.block_m) * tile.block_m
    lse_log2, delta = (lse.new_empty(batch, heads, padded_q) for _ in range(2))
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dq_kernel[(padded_q // tile.block_m * batch * heads,)](
        _argument(q, tile.block_m), _argument(k, tile.block_n), _argument(v, tile.block_n),
        _argument(do, tile.block_m), _pointer(o), _pointer(residual if has_residual else o),
        _argument(dq, tile.block_m), lse, lse_log2, delta,
        _heads(q), heads // k.shape[1], len_q, k.shape[2], padded_q, scale, CAUSAL=causal,
        RESIDUAL=has_residual, DELTA_DP=FIXES[fix].delta == "dp", **_options(tile, q),
    )  # fmt: skip
    return dq, lse_log2, delta


def _launch_dkdv(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse_log2: Tensor, delta: Tensor,
    causal: bool, scale: float, tile: Tile,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, kv_heads, len_k, _ = k.shape
    heads, len_q = q.shape[1:3]
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    dkdv_kernel[(triton.cdiv(len_k, tile.block_n) * batch * kv_heads,)](
        _argument(q, tile.block_m), _argument(k, tile.block_n), _argument(v, tile.block_n),
        _argument(do, tile.block_m), _argument(dk, tile.block_n), _argument(dv, tile.block_n),
        _row_argument(lse_log2, tile.block_m), _row_argument(delta, tile.block_m),
        _heads(q), heads // kv_heads, len_q, len_k, delta.shape[2], scale,
        CAUSAL=causal, **_options(tile, q),
    )  # fmt: skip
    return dk, dv


def _launch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, residual: Tensor,
    causal: bool, scale: float, fix: str, shapes: LaunchShapes,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_device(q)
    if q.numel() == 0:
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        return dq, dk, dv
    do, q, k, v = map(_addressable, (do, q, k, v))
    with _launching_on(q.device):
        dq, lse_log2, delta = _launch_dq(
            do, q, k, v, o, lse, residual, causal, scale, fix, shapes.dq
        )  # fmt: skip
        return dq, *_launch_dkdv(do, q, k, v, lse_log2, delta, causal, scale, shapes.dkdv)


# ---------------------------------------------------------------------- torch.library and autograd
def _shapes(packed: list[int], q: Tensor, fix: str) -> LaunchShapes:
    """The launch shapes in `packed`, or the pinned default for q if it is empty."""
    chip, stochastic = capability_of(q.device), FIXES[fix].stochastic
    return unpack(packed) or default_shapes(q.shape[3], q.dtype, chip, stochastic)


@torch.library.custom_op("attnrepro::triton_forward", mutates_args=())
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, fix: str, beta: float, tol: float,
    seed: int, shapes: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _launch_forward(q, k, v, causal, scale, fix, beta, tol, seed, _shapes(shapes, q, fix))[:3]


@_forward_op.register_fake
def _(q, k, v, causal, scale, fix, beta, tol, seed, shapes):
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    residual = torch.empty_like(o) if FIXES[fix].delta == "residual" else o.new_empty(0)
    return o, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device), residual


@torch.library.custom_op("attnrepro::triton_backward", mutates_args=())
def _backward_op(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, residual: Tensor,
    causal: bool, scale: float, fix: str, shapes: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _launch_backward(
        do, q, k, v, o, lse, residual, causal, scale, fix, _shapes(shapes, q, fix)
    )  # fmt: skip


@_backward_op.register_fake
def _(do, q, k, v, o, lse, residual, causal, scale, fix, shapes):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.scale, ctx.fix, _, _, _, ctx.shapes = inputs
    o, lse, residual = output
    ctx.save_for_backward(q, k, v, o, lse, residual)
    ctx.mark_non_differentiable(lse, residual)
    ctx.set_materialize_grads(False)  # or backward first fills zeros for lse and residual


def _backward(ctx, do, _dlse, _dresidual):
    grads = _backward_op(do, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.fix, ctx.shapes)
    return *grads, None, None, None, None, None, None, None


_forward_op.register_autograd(_backward, setup_context=_setup_context)


class TritonAttention(torch.autograd.Function):
    """The two launches without the operators around them, which cost the host as much as a launch."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale, fix, beta, tol, seed, packed):
        shapes = _shapes(packed, q, fix)
        o, lse, residual, _ = _launch_forward(
            q, k, v, causal, scale, fix, beta, tol, seed, shapes
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, o, lse, residual)
        ctx.call, ctx.shapes, ctx.packed = (causal, scale, fix), shapes, packed
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse, residual = ctx.saved_tensors
        causal, scale, fix = ctx.call
        arguments = (do, q, k, v, o, lse, residual, causal, scale, fix)
        if _plain(do) and not torch.is_grad_enabled():
            grads = _launch_backward(*arguments, ctx.shapes)
        else:  # traced, batched, or with create_graph: the operator refuses a second derivative
            grads = _backward_op(*arguments, ctx.packed)
        return *grads, None, None, None, None, None, None, None


def _plain(*tensors: Tensor) -> bool:
    """True where nobody traces or intercepts: no compiling, tracing, dispatch mode, torch.func, subclass."""
    watched = (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))
    )
    return not watched and all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)


# ------------------------------------------------------------------------------------- public API


def _checked_scale(q, k, v, scale, fix, beta, tol, seed) -> float:
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.dim() == 4 and q.shape[-1] else 1.0
    check_inputs(q, k, v, scale, fix, beta, tol, seed)
    if q.device.type != "cuda":
        check_device(q)
    return float(scale)


def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None,
    fix: str = "stock", beta: float = 2.0, tol: float = 1e-3, seed: int = 0,
    shapes: LaunchShapes | None = None,
) -> Tensor:  # fmt: skip
    """Attention output [B, Hq, Tq, D] in q's dtype; differentiable in q, k, v.

    q [B, Hq, Tq, D], k and v [B, Hkv, Tk, D]; bfloat16, float16 or float32, any strides;
    Hq % Hkv == 0.  `scale` defaults to D^-0.5.  `causal` is aligned top-left (query i sees keys
    0..i).  `beta`, `tol` (units of the scaled logits) act with `stabilized`, `seed` with
    `stochastic`.  Raises ValueError for anything else, naming the argument.
    """
    scale = _checked_scale(q, k, v, scale, fix, beta, tol, seed)
    arguments = (q, k, v, causal, scale, fix, beta, tol, seed, pack(shapes))
    if _plain(q, k, v):
        return TritonAttention.apply(*arguments)
    return _forward_op(*arguments)[0]


def triton_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None,
    fix: str = "stock", beta: float = 2.0, tol: float = 1e-3, seed: int = 0,
    shapes: LaunchShapes | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, lse): as `triton_attention`, and lse fp32 [B, Hq, Tq] in natural-log units."""
    scale = _checked_scale(q, k, v, scale, fix, beta, tol, seed)
    return _forward_op(q, k, v, causal, scale, fix, beta, tol, seed, pack(shapes))[:2]


def shifted_tiles(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None,
    beta: float = 2.0, tol: float = 1e-3, shapes: LaunchShapes | None = None,
) -> Tensor:  # fmt: skip
    """Which (row, key tile) took `stabilized`'s shift: int8 [B, Hq, Tq, cdiv(Tk, block_n)]."""
    scale = _checked_scale(q, k, v, scale, "stabilized", beta, tol, 0)
    shapes = shapes or default_shapes(q.shape[3], q.dtype, capability_of(q.device))
    args = (q, k, v, causal, scale, "stabilized", beta, tol, 0, shapes)
    return _launch_forward(*args, trace=True)[3]
