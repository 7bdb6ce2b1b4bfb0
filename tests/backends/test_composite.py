"""The composite operators: the eager kernel's bits, and what torch.library promises about an operator."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_eager import LARGE, SMALL, check, problem

from backends.base import Kernel, Unsupported
from backends.fixes import FIXES
from backends.kernels.composite import backward_op, forward_op
from backends.kernels.composite_kernels import CompositeKernel, composite_kernels
from backends.kernels.eager_kernels import eager_kernels

KERNELS = composite_kernels()
EAGER = eager_kernels()


def outputs(kernel: Kernel, shape: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    x, _ = problem(shape, dtype)
    q, k, v = (t.clone().requires_grad_() for t in (x.q, x.k, x.v))
    o = kernel(q, k, v, causal=x.causal)
    lse = kernel.forward(x.q, x.k, x.v, causal=x.causal).lse
    assert lse is not None
    return [o.detach(), lse, *torch.autograd.grad(o, (q, k, v), x.do)]


@pytest.mark.parametrize("fix", FIXES)
def test_float32_equals_the_reference(fix: str) -> None:
    kernel = KERNELS[f"composite/{fix}"].configure(tile=64)
    for shape in (*SMALL, *LARGE):
        check(kernel, *problem(shape, torch.float32), roundoffs=40)


@pytest.mark.parametrize("fix", FIXES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bits_are_those_of_the_eager_kernel(fix: str, dtype: torch.dtype) -> None:
    shape = LARGE[0]
    seed = {"seed": 7} if FIXES[fix].stochastic else {}
    for options in ({"tile": 64, **seed}, {"tile": 0, **seed}):
        ours = outputs(KERNELS[f"composite/{fix}"].configure(**options), shape, dtype)
        theirs = outputs(EAGER[f"eager-fused/{fix}"].configure(**options), shape, dtype)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), options


@pytest.mark.parametrize("kernel", [KERNELS["composite/stock"], EAGER["eager-fused/stock"]])
def test_autocast_changes_nothing_inside(kernel: Kernel) -> None:
    plain = outputs(kernel, LARGE[0], torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        cast = outputs(kernel, LARGE[0], torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@pytest.mark.parametrize("fix", FIXES)
def test_fixes_change_the_bits(fix: str) -> None:
    """A fix that did nothing would pass every test above."""
    stock, fixed = (
        outputs(KERNELS[f"composite/{name}"], LARGE[0], torch.bfloat16) for name in ("stock", fix)
    )
    same = [torch.equal(a, b) for a, b in zip(stock, fixed, strict=True)]
    assert all(same) == (fix == "stock")


@pytest.mark.parametrize("fix", FIXES)
def test_torch_accepts_the_operators(fix: str) -> None:
    """Schema, fake shapes, autograd registration, AOT dispatch: torch's own checks."""
    x, ref = problem(SMALL[1], torch.bfloat16)
    q, k, v = (t.clone().requires_grad_() for t in (x.q, x.k, x.v))
    torch.library.opcheck(forward_op, (q, k, v, True, ref.scale, fix, 64, 2.0, 1e-3, 0))
    with torch.no_grad():
        saved = forward_op(q, k, v, True, ref.scale, fix, 64, 2.0, 1e-3, 0)
    args = (x.do, x.q, x.k, x.v, *saved, True, ref.scale, fix, 64)
    torch.library.opcheck(backward_op, args)


def test_one_call_is_one_node_of_a_compiled_graph() -> None:
    x, _ = problem(SMALL[1], torch.bfloat16)
    kernel = KERNELS["composite/stabilized"]
    nodes: list[str] = []

    def look(graph: torch.fx.GraphModule, _: object) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(
        lambda q, k, v: forward_op(q, k, v, True, 0.25, "stabilized", 64, 2.0, 1e-3, 0)[0],
        backend=look,
        fullgraph=True,
    )
    o = compiled(x.q, x.k, x.v)
    assert nodes[0] == "attnrepro.composite_forward.default"
    assert torch.equal(o, kernel.configure(tile=64)(x.q, x.k, x.v, causal=True, scale=0.25))


def test_the_npu_kernel_is_registered_once_pytorch_knows_npu() -> None:
    code = """
import torch
torch.utils.rename_privateuse1_backend("npu")  # as torch_npu does
from backends.kernels.composite import register_npu
has = torch._C._dispatch_has_kernel_for_dispatch_key
operators = ["attnrepro::composite_forward", "attnrepro::composite_backward"]
assert not any(has(name, "PrivateUse1") for name in operators)
register_npu()
assert all(has(name, "PrivateUse1") for name in operators)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_m_and_the_sum_are_those_of_the_shifted_softmax() -> None:
    x, ref = problem(LARGE[1], torch.float32)
    for fix in ("stock", "stabilized", "shift_const"):
        _, m, total, _ = KERNELS[f"composite/{fix}"].run(x.q, x.k, x.v, x.causal, None)
        assert (m.double() + total.double().log() - ref.lse).abs().max() < 1e-5
        moved = (m.double() - ref.row_max.squeeze(-1)).abs().max()
        assert (moved > 0.01) == (fix != "stock"), fix


@pytest.mark.parametrize(
    ("message", "q", "kv", "dtype"),
    [
        (
            "dtype float64: this kernel takes bfloat16, float16, float32",
            (1, 4, 8, 16),
            (1, 2, 8, 16),
            torch.float64,
        ),
        (
            "head_dim 776: this kernel takes up to 768",
            (1, 4, 8, 776),
            (1, 2, 8, 776),
            torch.bfloat16,
        ),
        ("q: 4 heads are not a multiple of k's 3", (1, 4, 8, 16), (1, 3, 8, 16), torch.bfloat16),
        (
            "q: expected [batch, heads, tokens, head_dim], got [8, 16]",
            (8, 16),
            (1, 3, 8, 16),
            torch.bfloat16,
        ),
    ],
)
def test_bad_input_is_named(message: str, q: Any, kv: Any, dtype: torch.dtype) -> None:
    k = torch.zeros(kv, dtype=dtype)
    with pytest.raises((ValueError, Unsupported), match=re.escape(message)):
        CompositeKernel("stock")(torch.zeros(q, dtype=dtype), k, k, causal=True)


def test_options_are_those_of_the_fix() -> None:
    assert CompositeKernel("stock").option_names == {"tile"}
    assert CompositeKernel("stabilized").option_names == {"tile", "beta", "tol"}
    assert CompositeKernel("stochastic").option_names == {"tile", "seed"}
    with pytest.raises(ValueError, match="mantissa_bits"):
        CompositeKernel("stock").configure(mantissa_bits=3)
