"""Tier C: the Triton source through triton-ascend and bishengir-compile, for every 910B, without one.

Every stage of the compiler runs but the last: `hivmc`, which makes machine code, is CANN's. A stand-in
copies what it is given. The stages before it plan on-chip memory, and refuse what does not fit.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("ascendnpuir") is None:
    pytest.skip(
        "triton-ascend and bishengir-compile are not installed; .ci/ascend-triton runs these",
        allow_module_level=True,
    )

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.ascend import compiler
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from backends.fixes import FIXES
from backends.kernels import triton_flash
from backends.kernels import triton_flash_ops as ops
from backends.kernels.triton_tiles import ASCEND, Tile, default_shapes

CHIPS = ("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4")
BISHENG = Path(importlib.util.find_spec("ascendnpuir").origin).parent / "bin" / "bishengir-compile"  # type: ignore[union-attr,arg-type]
OPTIONS = [  # as triton-ascend's own last stage passes them for these chips
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
]
HIVMC = """#!/bin/sh
test "$1" = --version && exec echo "hivmc 0.0.0"
while test $# -gt 0; do
  case "$1" in -o) out="$2"; shift;; -*) ;; *) in="$1";; esac
  shift
done
cp "$in" "$out"
"""
KERNELS = {
    "forward": triton_flash.forward_kernel,
    "dq": triton_flash.dq_kernel,
    "dkdv": triton_flash.dkdv_kernel,
}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
INTEGERS = {"heads", "group", "len_q", "len_k", "padded_q", "seed"}


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PATH with the stand-in for hivmc in it."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "hivmc").write_text(HIVMC)
    (folder / "hivmc").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def switches(name: str, fix: str, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time switches of a pass under a fix, as the launches set them."""
    if name == "forward":
        return {**ops.forward_switches(fix, dtype), "TRACE": False}
    return {"RESIDUAL": fix == "delta_fp32", "DELTA_DP": fix == "delta_dp"}


@cache
def linalg(name: str, fix: str, head_dim: int, dtype: torch.dtype, causal: bool, tile: Tile) -> str:
    """The kernel as linalg IR, the form that triton-ascend hands to bishengir-compile."""
    kernel = KERNELS[name]
    constants = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "HEAD_DIM": head_dim,
        "CAUSAL": causal,
        "DTYPE": ops.TRITON_DTYPES[dtype],
        "PRECISION": "ieee",
        "TMA": False,
        "IN_REGISTERS": False,
        **switches(name, fix, dtype),
    }
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {}
    for argument in kernel.arg_names:
        if argument in INTEGERS:
            signature[argument] = "i32"
        elif argument in ("scale", "beta", "tol"):
            signature[argument] = "fp32"
        elif argument == "fired_ptr":
            signature[argument] = "*i8"
        elif argument.endswith("_ptr") or argument in ("lse_log2", "delta"):
            signature[argument] = "*fp32"
        elif argument not in constants:
            signature[argument] = f"*{TYPES[dtype]}"
    target = GPUTarget("npu", "Ascend910B2", 0)  # the front end makes the same of every 910B
    backend = compiler.AscendBackend(target)
    options = backend.parse_options({})
    source = ASTSource(fn=kernel, signature=signature, constants=constants)
    context = ir.context()
    ir.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), {}, context)
    metadata = {"target": target, **options.__dict__}
    module = compiler.make_ttir(module, metadata, options)
    text = compiler.ttir_to_linalg(module, metadata, options, named_ops=True)
    return str(compiler._parse_linalg_metadata(text, metadata)[0])


def bisheng(text: str, chip: str, path: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "kernel.mlir").write_text(text)
    command = [BISHENG, folder / "kernel.mlir", f"--target={chip}", *OPTIONS, *more]
    return subprocess.run(
        [*command, "-o", folder / "kernel.out"],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )


def check_compiles(
    name: str,
    fix: str,
    head_dim: int,
    dtype: torch.dtype,
    chip: str,
    path: str,
    folder: Path,
    causal: bool = True,
) -> None:
    tile = getattr(default_shapes(head_dim, dtype, ASCEND, FIXES[fix].stochastic), name)
    done = bisheng(linalg(name, fix, head_dim, dtype, causal, tile), chip, path, folder)
    where = f"{name} {fix} D={head_dim} {dtype} {chip}"
    assert done.returncode == 0, f"{where}: {(done.stdout + done.stderr)[-2000:]}"
    assert "verflow" not in done.stderr, f"{where}: fits only with optimisations given up"
    final = (folder / "kernel.out").read_text()
    assert "hivm.func_core_type<AIC>" in final  # the cube unit multiplies
    assert "hivm.func_core_type<AIV>" in final  # the vector unit does the rest


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("fix", FIXES)
def test_every_fix_compiles_for_every_chip(fix: str, chip: str, path: str, tmp_path: Path) -> None:
    check_compiles("forward", fix, 128, torch.bfloat16, chip, path, tmp_path)


@pytest.mark.parametrize("fix", ["stock", "delta_fp32", "delta_dp"])
@pytest.mark.parametrize("chip", CHIPS)
def test_every_backward_pass_compiles(chip: str, fix: str, path: str, tmp_path: Path) -> None:
    check_compiles("dq", fix, 128, torch.bfloat16, chip, path, tmp_path)
    if fix == "stock":
        check_compiles("dkdv", fix, 128, torch.bfloat16, chip, path, tmp_path)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", ops.HEAD_DIMS)
def test_every_head_dim_and_dtype_compiles(
    head_dim: int, dtype: torch.dtype, path: str, tmp_path: Path
) -> None:
    """On the chip with the least memory, under the fix that needs the most on chip."""
    for name, fix in (
        ("forward", "stabilized+consistent_l"),
        ("forward", "stochastic"),
        ("dq", "delta_fp32"),
        ("dkdv", "stock"),
    ):
        check_compiles(name, fix, head_dim, dtype, "Ascend910B4", path, tmp_path)


def test_without_a_causal_mask(path: str, tmp_path: Path) -> None:
    for name in KERNELS:
        check_compiles(name, "stock", 64, torch.bfloat16, "Ascend910B2", path, tmp_path, causal=False)


def test_the_compiler_refuses_tiles_that_do_not_fit(path: str, tmp_path: Path) -> None:
    """Or passing the tests above would say nothing about on-chip memory."""
    tile = Tile(128, 128, 4, 1)
    text = linalg("forward", "stock", 128, torch.bfloat16, True, tile)
    done = bisheng(text, "Ascend910B2", path, tmp_path)
    assert done.returncode != 0
    assert re.search(r"ub overflow", done.stderr + done.stdout, re.IGNORECASE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_to_half_precision_are_nearest_even(dtype: torch.dtype, path: str, tmp_path: Path) -> None:
    short = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    for name, fix in (("forward", "delta_fp32"), ("dq", "stock"), ("dkdv", "stock")):
        tile = getattr(default_shapes(64, dtype, ASCEND), name)
        text = linalg(name, fix, 64, dtype, True, tile)
        done = bisheng(text, "Ascend910B2", path, tmp_path, "--mlir-print-ir-after-all")
        casts = re.findall(
            rf"hfusion\.cast \{{[^}}]*round_mode<(\w+)>\}} ins\([^:]+: tensor<[\dx]+xf32>\) "
            rf"outs\([^:]+: tensor<[\dx]+x{short}>\)",
            done.stdout + done.stderr,
        )
        assert len(casts) >= 2, name
        assert set(casts) == {"rint"}, name


def test_the_source_is_the_one_that_cuda_runs() -> None:
    assert triton.__version__.startswith("3.2")
    assert not triton_flash.TUPLES.value
    assert tl.constexpr is not None
    assert shutil.which("hivmc") is None, "CANN is here: let triton-ascend itself compile"
