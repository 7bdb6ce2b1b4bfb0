"""Tier B: the real torch_npu. Over stand-ins for CANN's libraries (.ci/ascend-torch-npu) it has one device
that computes nothing: schemas, shapes, autograd, facts, events and memory are its own, numbers are not."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from backends import ascend
from backends.base import Backend

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))
from npu_double import FIXTURE, VERSIONS

if torch.version.cuda is not None:
    pytest.skip("torch_npu cannot be loaded beside a CUDA build of torch", allow_module_level=True)
torch_npu = pytest.importorskip(
    "torch_npu",
    exc_type=ImportError,
    reason="torch_npu does not load here; .ci/ascend-torch-npu runs these over stand-ins for CANN",
)
if not torch.npu.is_available():
    pytest.skip("torch_npu sees no NPU", allow_module_level=True)

ROOT = Path(__file__).parents[2]
VERSION = torch_npu.__version__
STAND_IN = not ascend.computes()
KERNELS = ascend.AscendBackend().kernels()
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


class Recorder(TorchDispatchMode):
    """Operators that reach a device, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = function._schema.arguments
        defaults = {argument.name: argument.default_value for argument in arguments}
        given = dict(zip(defaults, args, strict=False)) | (kwargs or {})
        self.calls[str(function)] = defaults | given
        return function(*args, **(kwargs or {}))


def qkv(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    shapes = ((2, 4, 128, 64), (2, 2, 128, 64), (2, 2, 128, 64))
    return [torch.empty(s, dtype=dtype, device="npu", requires_grad=True) for s in shapes]


def runner(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "runner.py", *arguments]
    env = os.environ | environment
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)


# ------------------------------------------------------------------------------------- schemas


@pytest.mark.skipif(VERSION not in VERSIONS, reason=f"no schemas recorded of torch_npu {VERSION}")
def test_live_schemas_are_the_recorded_ones() -> None:
    recorded = VERSIONS[VERSION]["schemas"]
    assert len(recorded) == 8
    for operator, overloads in recorded.items():
        for overload, schema in overloads.items():
            live = getattr(getattr(torch.ops.npu, operator), overload)._schema
            assert str(live) == schema


def test_the_function_of_the_documents_is_the_operator_we_call() -> None:
    with FakeTensorMode(), Recorder() as recorder:
        q = torch.empty(1, 4, 128, 64, dtype=torch.bfloat16, device="npu")
        torch_npu.npu_fusion_attention(q, q, q, 4, "BNSD")
    assert "npu.npu_fusion_attention.default" in recorder.calls


# ------------------------------------------------------------------------ shapes and autograd


@pytest.mark.skipif(VERSION != "2.13.0", reason="fake outputs are recorded of torch_npu 2.13.0")
def test_fake_outputs_are_the_recorded_ones() -> None:
    cases = FIXTURE["fake_tensor_2.13.0"]["cases"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(2, 4, 128, 64, dtype=torch.bfloat16, device="npu")
        mask = torch.ones(2048, 2048, dtype=torch.bool, device="npu")
        common = {"head_num": 4, "scale": 0.125}
        operator = torch.ops.npu.npu_fusion_attention
        bsnd = q.transpose(1, 2).contiguous()
        got = {
            "npu_fusion_attention": operator(q, q, q, input_layout="BNSD", **common),
            "npu_fusion_attention, causal": operator(
                q, q, q, input_layout="BNSD", atten_mask=mask, sparse_mode=2, **common
            ),
            "npu_fusion_attention, BSND": operator(bsnd, bsnd, bsnd, input_layout="BSND", **common),
        }
    for name, outputs in got.items():
        for live, recorded in zip(outputs, cases[name]["outputs"], strict=True):
            if isinstance(recorded, dict):
                described = {
                    "shape": list(live.shape),
                    "dtype": str(live.dtype),
                    "device": str(live.device),
                }
                assert described == recorded, name
            else:
                assert live == recorded, name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "TND"])
def test_the_vendors_kernel_forward_and_backward(layout: str, causal: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
        q, k, v = qkv()
        o, m, total = KERNELS["npu-fusion/stock"].configure(layout=layout).run(q, k, v, causal, None)  # type: ignore[attr-defined]
        assert (o.shape, o.dtype) == (q.shape, q.dtype)
        assert m.shape == total.shape == q.shape[:3]
        assert m.dtype == total.dtype == torch.float32
        grads = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    forward = recorder.calls["npu.npu_fusion_attention.default"]
    backward = recorder.calls["npu.npu_fusion_attention_grad.default"]
    for call in (forward, backward):
        assert call["input_layout"] == layout
        assert (call["atten_mask"] is not None) == causal
        assert call["sparse_mode"] == (2 if causal else 0)
    assert backward["scale_value"] == forward["scale"] == 64**-0.5


def test_our_forward_pass_feeds_the_vendors_gradient() -> None:
    kernel = KERNELS["composite/stabilized+vendor-backward"]
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
        q, k, v = qkv()
        grads = torch.autograd.grad(kernel(q, k, v, causal=True), (q, k, v), torch.ones_like(q))
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert "npu.npu_fusion_attention.default" not in recorder.calls
    call = recorder.calls["npu.npu_fusion_attention_grad.default"]
    assert call["softmax_max"].shape == (2, 4, 128, 8)
    assert call["attention_in"].shape == q.shape


@pytest.mark.parametrize("name", [name for name in KERNELS if name.startswith("composite/")])
def test_composite_kernels_on_fake_npu_tensors(name: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = qkv()
        o = KERNELS[name](q, k, v, causal=True)
        grads = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    assert o.device.type == "npu"
    assert [g.shape for g in (o, *grads)] == [q.shape, q.shape, k.shape, v.shape]


def test_composite_operators_have_an_npu_kernel_of_operators_that_npus_have() -> None:
    """What torch_npu has no kernel of runs on the host, right but slow: copysign, for `stochastic`."""
    from backends.fixes import FIXES
    from backends.kernels import composite

    for operator in ("composite_forward", "composite_backward"):
        assert has_kernel(f"attnrepro::{operator}", "PrivateUse1")
    on_host: dict[str, set[str]] = {}
    for fix in FIXES:
        with Recorder() as recorder:
            q, k = torch.randn(1, 2, 8, 16).bfloat16(), torch.randn(1, 1, 8, 16).bfloat16()
            saved = composite._forward(q, k, k, True, 0.25, fix, 4, 2.0, 1e-3, 0)
            composite._backward(q, q, k, k, *saved, True, 0.25, fix, 4)
        assert len(recorder.calls) > 20
        for call in recorder.calls:
            library, name, overload = call.split(".")
            full = f"{library}::{name}" + ("" if overload == "default" else f".{overload}")
            keys = ("PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
            if library == "aten" and not any(has_kernel(full, key) for key in keys):
                on_host.setdefault(fix, set()).add(full)
    assert on_host == {"stochastic": {"aten::copysign.Tensor"}}


# ------------------------------------------------------------------------------ the backend


def test_facts() -> None:
    facts = ascend.create().facts()
    assert re.fullmatch(r"Ascend\w+(-\d)?", facts.identity["accelerator"])
    assert facts.identity["torch_npu"] == VERSION
    knobs = facts.identity["knobs"]
    assert (knobs["deterministic_level"], knobs["matmul_hf32"], knobs["conv_hf32"]) == (
        1,
        False,
        False,
    )
    assert {
        "HCCL_DETERMINISTIC",
        "LCCL_DETERMINISTIC",
        "ATB_MATMUL_SHUFFLE_K_ENABLE",
    } <= knobs.keys()


@pytest.mark.parametrize("soc", ["Ascend910B1", "Ascend910B4"])
@pytest.mark.skipif(not STAND_IN, reason="the device has its own name")
def test_the_soc_is_recognised(soc: str) -> None:
    code = (
        "import bench, torch, torch_npu; from backends import ascend; print(ascend.create().facts().identity)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"STUB_SOC": soc},
        capture_output=True,
        text=True,
        check=True,
    )
    identity = ast.literal_eval(done.stdout.splitlines()[-1])
    assert identity["accelerator"] == soc
    assert identity["soc_version"] == {"1": 220, "4": 224}[soc[-1]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["list"], f"no: torch_npu {VERSION} cannot be loaded beside a CUDA build of torch"),
        (["run", "configs/quick.yaml", "--backend", "cpu", "--dry-run"], "bias/"),
    ],
)
def test_beside_a_cuda_build_of_torch_it_is_never_imported(arguments: list[str], expected: str) -> None:
    """Importing it there ends the process; the torch of this test is a CPU build that says otherwise."""
    code = (
        "import sys, bench, runner, torch\n"
        "torch.version.cuda = '13.0'\n"
        f"sys.argv = ['runner.py', *{arguments!r}]\n"
        "try:\n    runner.main()\n"
        "finally:\n    assert 'torch_npu' not in sys.modules, 'torch_npu was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_determinism_is_set_and_put_back() -> None:
    backend = ascend.create()
    assert isinstance(backend, Backend)
    matmul, conv = torch.npu.matmul, torch.npu.conv
    before = matmul.allow_hf32, conv.allow_hf32
    matmul.allow_hf32 = conv.allow_hf32 = True
    try:
        with backend.deterministic():
            assert torch.npu._get_deterministic_level() == 1
            assert (matmul.allow_hf32, conv.allow_hf32) == (False, False)
        assert torch.npu._get_deterministic_level() == 0
        assert matmul.allow_hf32
        assert conv.allow_hf32
    finally:
        matmul.allow_hf32, conv.allow_hf32 = before


def test_events_and_memory() -> None:
    backend = ascend.create()
    times = backend.time_ms(lambda: None, rounds=3)
    assert len(times) == 3
    assert all(time >= 0 for time in times)
    kept = []
    size = backend.memory_of(lambda: kept.append(torch.empty(2**20, dtype=torch.int8, device="npu")))
    assert 2**20 <= size < 2**22
    assert backend.peak_memory() >= size


def test_what_training_asks_of_torch_holds_for_npus() -> None:
    """Seeds, autocast with its dtype named, the device of torch.accelerator, hccl for DDP."""
    torch.manual_seed(7)
    assert torch.npu.initial_seed() == 7
    assert torch.get_autocast_dtype("npu") == torch.float16  # torch_npu's own choice
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert torch.get_autocast_dtype("npu") == torch.bfloat16
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert accelerator == torch.device("npu")
    assert torch.distributed.get_default_backend_for_device(accelerator) == "hccl"
    assert torch.distributed.is_backend_available("hccl")


def test_under_torchrun_npus_meet_through_hccl() -> None:
    """The package is loaded before PyTorch is asked for its accelerator."""
    code = """
from bench.run import distributed
import torch
met = []
torch.distributed.init_process_group = met.append
distributed.join()
print(met)
"""
    launched = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | launched, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == ["['cpu:gloo,npu:hccl']"], done.stderr


# ------------------------------------------------------------------- what must never happen


@pytest.mark.skipif(not STAND_IN, reason="this is a device")
def test_nothing_measured_on_a_stand_in_is_shown_or_stored(tmp_path: Path) -> None:
    listed = json.loads(runner("list", "--json").stdout)
    (reason,) = (b["reason"] for b in listed["backends"] if b["name"] == "ascend")
    assert reason.startswith("the NPU computes small sums wrongly")
    assert all(kernel["backend"] != "ascend" for kernel in listed["kernels"])
    config = tmp_path / "c.yaml"
    config.write_text(
        "# x\nversion: 1\nname: c\nbackends: [ascend]\nkernels: ['*']\nseeds: 1\n"
        "cases:\n  - case: bias/shift_range\n"
    )
    done = runner("run", str(config), "--results", str(tmp_path / "results"))
    assert done.returncode == 2
    assert "backend 'ascend' is not available here: the NPU computes small sums" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "results").exists()


@pytest.mark.skipif(not STAND_IN, reason="this is a device")
def test_without_a_device_and_without_cann_the_rest_works() -> None:
    reasons = {
        "torch_npu .* sees no NPU": {"STUB_DEVICES": "0"},
        r"torch_npu .* is installed but does not load: lib\w+\.so": {"LD_LIBRARY_PATH": ""},
    }
    for reason, environment in reasons.items():
        listed = runner("list", **environment)
        assert listed.returncode == 0, listed.stderr
        assert re.search(f"ascend +no: {reason}", listed.stdout)
        assert re.search("cpu +yes", listed.stdout)
        assert "eager-fused/stock" in listed.stdout
