"""The CUDA backend: what can be checked without a GPU, and on one where there is one."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from backends import cuda
from backends.base import Call, Unsupported
from backends.fixes import FIXES
from backends.kernels.flash_attn import PACKAGES, flash_attn_kernels
from backends.kernels.triton_kernels import TritonKernel, triton_kernels
from backends.kernels.triton_tiles import PINNED, default_shapes
from bench.measure.inputs import digest
from bench.measure.numerics import philox_words
from bench.run.registry import load_backend
from cases.algorithms import strict

HAS_GPU = cuda.unavailable_reason() is None
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason=str(cuda.unavailable_reason()))


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_the_reason_is_clear() -> None:
    reason = cuda.unavailable_reason()
    assert reason in (
        "this torch is built without CUDA",
        "torch sees no CUDA device (driver, or CUDA_VISIBLE_DEVICES)",
    )


@pytest.mark.parametrize(
    ("hip", "version", "available", "capability", "expected"),
    [
        ("6.0", "13.0", True, (9, 0), "ROCm"),
        (None, None, False, (9, 0), "built without CUDA"),
        (None, "13.0", False, (9, 0), "no CUDA device"),
        (None, "13.0", True, (7, 5), "Tesla T4 has capability 7.5; 8.0 (sm80) or newer is needed"),
        (None, "13.0", True, (8, 0), None),
        (None, "13.0", True, (12, 0), None),
    ],
)
def test_every_reason(
    monkeypatch: pytest.MonkeyPatch,
    hip: str | None,
    version: str | None,
    available: bool,
    capability: tuple[int, int],
    expected: str | None,
) -> None:
    monkeypatch.setattr(torch, "version", SimpleNamespace(hip=hip, cuda=version))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    reason = cuda.unavailable_reason()
    assert reason is None if expected is None else expected in str(reason)


def test_flash_attn_packages_are_listed_and_refuse_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # as where none is there
    monkeypatch.setitem(PACKAGES, "2", ("flash_attn", "no-such-distribution"))
    x = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
    kernels = flash_attn_kernels()
    assert list(kernels) == [f"flash-attn-{generation}/stock" for generation in "234"]
    for kernel in kernels.values():
        with pytest.raises(Unsupported, match="is not installed"):
            kernel(x, x, x, causal=False)
    facts = kernels["flash-attn-2/stock"].launch_facts(Call.with_tensors(x, x, causal=False))
    assert facts["library"] == "no-such-distribution not installed"


def test_triton_kernels_take_the_options_of_their_fix() -> None:
    assert set(TritonKernel("stock").option_names) == {"block_n", "autotune"}
    assert set(TritonKernel("stabilized").option_names) == {"block_n", "autotune", "beta", "tol"}
    assert set(TritonKernel("stochastic").option_names) == {"block_n", "autotune", "seed"}
    changed = TritonKernel("stabilized").configure(beta=7.0, block_n=32)
    assert (changed.options.beta, changed.options.block_n) == (7.0, 32)
    with pytest.raises(ValueError, match="block_n"):
        TritonKernel("stock").configure(block_n=17)
    with pytest.raises(ValueError, match="tile"):
        TritonKernel("stock").configure(tile=64)


def test_triton_launch_facts_are_those_of_the_call() -> None:
    pytest.importorskip("triton")
    x = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    kernel = TritonKernel("stochastic").configure(seed=3, block_n=16)
    facts = kernel.launch_facts(Call.with_tensors(x, x, causal=True))
    assert (facts["forward_block_m"], facts["forward_block_n"]) == (64, 16)
    assert kernel.configure(seed=4).launch_facts(Call.with_tensors(x, x, causal=True)) == facts
    assert kernel.launch_facts(Call.with_tensors(x.float(), x.float(), causal=True))["forward_block_m"] == 32
    with pytest.raises(Unsupported, match="head_dim 17"):
        kernel.launch_facts(Call.with_tensors(x[..., :17], x[..., :17], causal=True))


def test_triton_kernels_are_offered_for_every_fix_where_triton_is_installed() -> None:
    expected = [f"triton/{fix}" for fix in FIXES] if importlib.util.find_spec("triton") else []
    assert list(triton_kernels()) == expected


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128, 256])
def test_every_chip_and_head_dim_has_pinned_tiles(capability: tuple[int, int], head_dim: int) -> None:
    family = PINNED[{(9, 0): "sm90", (10, 0): "sm100"}.get(capability, "sm80")]
    tightest = min(limit for limit in family if limit >= head_dim)
    assert default_shapes(head_dim, torch.bfloat16, capability) == family[tightest]
    assert default_shapes(head_dim, torch.float32, capability).forward.block_m == 32


@needs_gpu
def test_autotuning_records_its_winner_and_gives_the_same_function() -> None:
    q, k, v = (torch.randn(1, 2, 512, 64, device="cuda").bfloat16() for _ in range(3))
    pinned, tuned = TritonKernel("stock"), TritonKernel("stock").configure(autotune=True)
    o, other = (kernel(q, k, v, causal=True) for kernel in (pinned, tuned))
    assert (o.float() - other.float()).abs().max() < 0.02
    assert tuned.launch_facts(Call.with_tensors(q, k, causal=True))["forward_block_m"] in (64, 128)


@needs_gpu
def test_on_a_gpu_every_kernel_is_right() -> None:
    from bench.measure.inputs import Inputs, key_of, normal
    from bench.measure.reference import attention_reference
    from cases.passes import forward_backward, forward_only

    backend = cuda.create()
    shape = (2, 4, 192, 64)
    x = Inputs.quantized(
        torch.bfloat16, *(normal(key_of("cuda", name), shape) for name in "qkvd"), causal=True
    )
    ref = attention_reference(x)
    for name, kernel in backend.kernels().items():
        if torch.bfloat16 not in kernel.dtypes:
            continue  # eager-ladder: FP32, coarse on purpose
        with backend.deterministic():
            try:
                grads = forward_backward(kernel, backend, x)
                o, digests = forward_only(kernel, backend, x)
            except Unsupported:
                assert name.startswith("flash-attn")
                continue
        for got, exact in (
            (grads.o, ref.o),
            (grads.dq, ref.dq),
            (grads.dk, ref.dk),
            (grads.dv, ref.dv),
        ):
            error = (got.double() - exact).abs().max() / exact.abs().max()
            assert error < 0.03, name
        if name.startswith(("triton", "eager")):
            assert torch.equal(o, grads.o), name
        assert ("lse" in digests) == name.startswith(("triton", "flex", "eager")), name


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 127])
def test_flex_takes_few_queries_with_grouped_heads(tokens: int) -> None:
    q = torch.randn(4, 4, tokens, 64, device="cuda").bfloat16().requires_grad_()
    k, v = (torch.randn(4, 2, tokens, 64, device="cuda").bfloat16() for _ in range(2))
    kernels = cuda.create().kernels()
    o, other = (kernels[name](q, k, v, causal=True) for name in ("flex/stock", "triton/stock"))
    (dq,), (other_dq,) = (torch.autograd.grad(x.float().sum(), q) for x in (o, other))
    assert (o.float() - other.float()).abs().max() < 0.02
    assert (dq.float() - other_dq.float()).abs().max() < 0.05


@needs_gpu
def test_out_of_memory_is_a_row_and_the_run_goes_on() -> None:
    from bench.run.plan import Unit
    from bench.run.unit import run_unit

    backend = cuda.create()
    size = {"batch": 1, "heads": 64, "kv_heads": 64, "head_dim": 16, "rounds": 3}
    rows = [
        run_unit(
            Unit(
                case="speed/attention",
                case_version=1,
                backend="cuda",
                kernel=kernel,
                dtype="bfloat16",
                seeds=1,
                params={**size, "tokens": tokens},
                options={},
            ),
            backend.kernels()[kernel],
            backend,
        )
        for kernel, tokens in (("sdpa-math/stock", 32768), ("triton/stock", 1024))
    ]
    assert rows[0].status == "error"
    assert "out of memory" in str(rows[0].reason)
    assert rows[1].status == "ok", rows[1].reason


@needs_gpu
@pytest.mark.parametrize("name", ["sdpa-flash/stock", "sdpa-efficient/stock"])
def test_pytorchs_kernels_repeat_their_gradients_bit_for_bit(name: str) -> None:
    """Many key blocks: the backward pass that adds by atomics differs from run to run here."""
    backend = load_backend("cuda")
    kernel = backend.kernels()[name]
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(4, 12, 2048, 64, generator=generator, device="cuda").bfloat16() for _ in range(4)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    digests = set()
    with backend.deterministic(), strict(kernel):
        for _ in range(20):
            grads = torch.autograd.grad(kernel(q, k, v, causal=True), (q, k, v), do)
            digests.add(digest(torch.cat([g.float().flatten() for g in grads]).cpu()))
    assert len(digests) == 1


@needs_gpu
def test_random_words_are_the_cpus() -> None:
    for count, seed, stream in ((1000, 5, 0), (2**24 + 3, 2**63 - 1, 2**31 + 1), (33, 7, 1)):
        words = philox_words((count,), seed, stream, torch.device("cuda"))
        assert torch.equal(words.cpu(), philox_words((count,), seed, stream, torch.device("cpu")))
