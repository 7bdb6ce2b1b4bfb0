"""The generator is locked: the same bits on x86, ARM, any numpy and any torch."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.measure.inputs import (
    Inputs,
    digest,
    key_of,
    normal,
    raw_words,
    signs,
    stack_seeds,
    tensor_bytes,
    to_storage,
    uniform,
)
from cases import CASES, load_case
from cases.bias.low_rank import stacked_tokens

# Digest of each case's inputs at its default parameters, two seeds. A change here means that old
# results can no longer be compared with new ones: raise the case's version, never edit silently.
GOLDEN: dict[torch.dtype, dict[str, str]] = {
    torch.bfloat16: {
        "bias/bf16_addition": "d7db1a992bdb6f21f1a4df999a2fdebde5224eee610e3e0c905ed3c9cc8baaec",
        "bias/tie_break": "2a82308af3a53a37ddbf23f835b225b9467f6923237943872581ff20cb7f2eac",
        "bias/normalizer": "9db501611ac9fa054d23f9552ae731a95f83c1eab93c067aea2b8dd24193a884",
        "bias/leak": "14f843b8dcb3c226a56dc71bc408ea272e24b4a94acaade946909d0f6ea801d7",
        "bias/shift_range": "deef420cfd7b45b3fc6a0f82d06b7f8051187fb0034cec99aea9cc66828c69aa",
        "bias/tile_size": "7e277379a1acfad3afa1e415343b54ca24d215d431d315f7866c90daf3ee079a",
        "bias/low_rank": "d05fd41ffd2f00a92170b3f797c5f7bf12043886911a49e9ce70a358904ce565",
        "crash/drift": "471f63259b9862613317d8e7262882f30f6aac481367e4626bcc8e759f6538fb",
        "determinism/run_to_run": "90d2783c5b71d8352e7403b4978bd9c1ee20d3f7657a79839e2a20a5107c9a2e",
        "determinism/batch_invariance": "1ccd064bd19e6564fb52c87fd02fe2783535ff79f4ca5c4075c369c7e4425f8d",
    },
    torch.float16: {
        "crash/drift": "d251201deb56ca572d6797972fd5059a324e691c0f36146ff8e26a599b7ee8fc",
        "bias/tie_break": "5d57330cfc0932573f0d5cd45c9e1884c94257aa5e4022e174281804ebb12223",
        "bias/bf16_addition": "3bb382acd4116a0ba4917cc81aef55da0cc786327b9f81dd9153b543f93372f1",
        "bias/shift_range": "489a8541ca6db2c0f6649290510fa7703b89063f7585dcaf3efcc97090472d89",
    },
    torch.float32: {
        "crash/drift": "69d5bfea4e25c90f539b1bbdac8457c3cf5028d2c632c915401dfcae2cce903f",
        "bias/tie_break": "cd104ba256613a8b05b3d24776f9498968697bf3eeb8fb3cdb826f6c586bf435",
        "bias/bf16_addition": "f75a951668aa3ff97e2a002b4249f900369ea7a760f9669b5237ad966c8e2e10",
        "bias/shift_range": "bd8d1a448eb0b5776055e373d0f22038231b5ec0c15a8e609d47fa50ccd2dfc4",
    },
}
KEY = key_of("bias/leak", 3, "q")


@pytest.mark.parametrize(
    ("dtype", "name", "golden"),
    [(dtype, name, golden) for dtype in GOLDEN for name, golden in GOLDEN[dtype].items()],
)
def test_golden_digests_of_the_cases(dtype: torch.dtype, name: str, golden: str) -> None:
    case = load_case(name)
    assert case.problem(case.Params(), dtype, 2).digest == golden


@pytest.mark.parametrize("name", CASES)
def test_every_case_made_of_tensors_has_a_golden_digest(name: str) -> None:
    if name.startswith(("bias/", "determinism/", "crash/drift")):
        assert name in GOLDEN[torch.bfloat16]


def test_golden_tokens_of_low_rank() -> None:
    case = load_case("bias/low_rank")
    golden = "d896b8f67d135d627b6e4541faa1006d7be0585001f904cbccd531e87f9001e0"
    assert digest(stacked_tokens(case.problem(case.Params(), torch.bfloat16, 2))[1]) == golden


def test_golden_streams() -> None:
    assert KEY == 39173485887584310643936353237146462878
    assert [int(w) for w in raw_words(KEY, 2)] == [0x55C86B7F68A65FAE, 0x265988864FFAD82B]
    assert (uniform(KEY, (6,)) * 2**24).tolist() == [5621867, 2513288, 3190915, 6989992, 7650111, 12437883]
    assert (normal(KEY, (6,)) * 2**24).tolist() == [
        -16807278,
        -1031840,
        -22515852,
        -19085252,
        -6721310,
        5290569,
    ]
    assert signs(KEY, (8,)).tolist() == [1, 1, 1, 1, 1, -1, 1, -1]
    block = np.ascontiguousarray(normal(KEY, (4096,)), dtype="<f8").tobytes()
    golden = "ff11e6f500dda414bf8648fb4ba42e1e4b042c4047d7edc5b26ceee44a5f4885"
    assert hashlib.sha256(block).hexdigest() == golden


def philox4x64(counter: int, key: int) -> list[int]:
    """Philox4x64-10 of Salmon et al. in Python integers: one block of four words."""
    mask = 2**64 - 1
    c = [counter >> (64 * i) & mask for i in range(4)]
    k0, k1 = key & mask, key >> 64
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [p1 >> 64 ^ c[1] ^ k0, p1 & mask, p0 >> 64 ^ c[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return c


def test_raw_words_are_philox_blocks_from_counter_one() -> None:
    # Random123's known answer first, so that the oracle is not one of our own making.
    assert philox4x64(0, 0) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]
    blocks = [word for counter in (1, 2, 3) for word in philox4x64(counter, KEY)]
    assert [int(w) for w in raw_words(KEY, 10)] == blocks[:10]


def test_normal_from_python_integers() -> None:
    """The sum of twelve 24-bit uniforms: element i of n uses words i, n+i, …, 5n+i, two of each."""
    n = 5
    words = [int(w) for w in raw_words(KEY, 6 * n)]
    for i, value in enumerate(normal(KEY, (n,)).tolist()):
        parts = [words[j * n + i] for j in range(6)]
        total = sum((w >> 40) + (w >> 16 & 0xFFFFFF) for w in parts)
        assert value * 2**24 == total - 6 * 2**24


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**128 - 1))
def test_values_lie_on_an_exact_grid(key: int) -> None:
    for x, low, high in ((normal(key, (500,)), -6, 6), (uniform(key, (500,)), 0, 1)):
        scaled = x * 2.0**24
        assert (scaled == np.floor(scaled)).all()
        assert x.min() >= low
        assert x.max() < high
    assert set(np.abs(signs(key, (50,)))) == {1.0}


def test_moments() -> None:
    n = 200_000
    x = normal(key_of("moments"), (n,))
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    # The sum of twelve uniforms has a kurtosis of 3 − 1.2/12; a normal one 3.
    assert abs((x**4).mean() - 2.9) < 5 * math.sqrt(96 / n)
    u = uniform(key_of("moments"), (n,))
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * n)
    assert abs(u.var() - 1 / 12) < 0.001
    s = signs(key_of("moments"), (n,))
    assert abs(s.mean()) < 5 / math.sqrt(n)


def test_streams_are_apart() -> None:
    names: list[tuple[str | int, ...]] = [
        ("a", 0, "q"),
        ("a", 1, "q"),
        ("a", 0, "k"),
        ("b", 0, "q"),
        ("a", 10, "q"),
        ("a", 0),
    ]
    keys = [key_of(*parts) for parts in names]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**128 for key in keys)
    assert key_of("a", 0, "q") == keys[0]
    samples = np.stack([normal(key, (20_000,)) for key in keys])
    correlation = np.corrcoef(samples) - np.eye(len(keys))
    assert np.abs(correlation).max() < 5 / math.sqrt(20_000)


def test_shapes() -> None:
    flat = normal(KEY, (24,))
    assert np.array_equal(normal(KEY, (2, 3, 4)).ravel(), flat)
    for make in (normal, uniform, signs):
        assert make(KEY, (2, 3)).shape == (2, 3)
        assert make(KEY, (2, 3)).dtype == np.float64
        assert make(KEY, (0, 3)).shape == (0, 3)


@pytest.mark.parametrize("name", GOLDEN[torch.bfloat16])
def test_a_seed_gives_its_own_values_every_time(name: str) -> None:
    case = load_case(name)
    first, second = (case.inputs(case.Params(), torch.bfloat16, seed) for seed in (0, 1))
    assert not torch.equal(first.v, second.v)
    again = case.inputs(case.Params(), torch.bfloat16, 0)
    assert again.digest() == first.digest()


# ---- storage and digests ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_to_storage_rounds_to_the_nearest_value(dtype: torch.dtype) -> None:
    x = normal(KEY, (2000,))
    stored = to_storage(x, dtype)
    assert stored.dtype == dtype
    error = np.abs(stored.double().numpy() - x)
    half_ulp = torch.finfo(dtype).eps / 2 * 2.0 ** np.floor(np.log2(np.abs(x)))
    assert (error <= half_ulp).all()
    assert dtype == torch.float32 or (error > 0).any()


def test_to_storage_rounds_once() -> None:
    # By way of FP32 the first would be a tie that goes to 1.
    x = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8])
    assert to_storage(x, torch.bfloat16).tolist() == [1 + 2.0**-7, 1.0]


def problem(dtype: torch.dtype = torch.bfloat16) -> Inputs:
    arrays = [normal(key_of("digest", name), (2, 1, 4, 4)) for name in "qkvd"]
    return Inputs.quantized(dtype, *arrays, scale=0.5)


def test_digest_changes_with_every_field() -> None:
    x = problem()
    changed = [
        x,
        problem(torch.float16),
        replace(x, causal=True),
        replace(x, scale=0.25),
        replace(x, scale=None),
        replace(x, q=x.k, k=x.q),
        replace(x, v=x.v.view(1, 2, 4, 4)),
        replace(x, v=x.v.view(torch.float16)),  # the same bytes under another dtype
        *(replace(x, **{name: getattr(x, name).flip(0)}) for name in ("q", "k", "v", "do")),
    ]
    digests = [y.digest() for y in changed]
    assert len(set(digests)) == len(digests)
    assert problem().digest() == digests[0]


def test_digest_does_not_see_strides() -> None:
    x = problem()
    strided = x.q.mT.contiguous().mT
    assert strided.stride() != x.q.stride()
    assert replace(x, q=strided).digest() == x.digest()
    assert digest(strided) == digest(x.q)


def test_digest_is_sha256_of_the_bytes() -> None:
    x = torch.tensor([1.0, -2.0, 0.5])
    assert digest(x) == hashlib.sha256(np.array([1, -2, 0.5], dtype="<f4").tobytes()).hexdigest()
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_digest_does_not_see_which_nan(dtype: torch.dtype) -> None:
    # A run that ends in NaN gave another digest each time: the sign came from where SIMD loops ended.
    positive = torch.tensor([1.0, math.nan], dtype=dtype)
    stored = positive.view(torch.uint8).clone()
    stored[-1] |= 0x80
    negative = stored.view(dtype)
    assert tensor_bytes(positive) != tensor_bytes(negative)
    assert digest(positive) == digest(negative) != digest(torch.ones(2, dtype=dtype))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.tensor([1.0], dtype=torch.bfloat16), "803f"),
        (torch.tensor([-2.5], dtype=torch.bfloat16), "20c0"),
        (torch.tensor([1.0], dtype=torch.float16), "003c"),
        (torch.tensor([[1.0, -2.0]]), "0000803f000000c0"),
        (torch.tensor([1.0], dtype=torch.float64), "000000000000f03f"),
        (torch.tensor([0x01020304], dtype=torch.int32), "04030201"),
        (torch.tensor([True, False]), "0100"),
        (torch.tensor(1.0, dtype=torch.bfloat16), "803f"),
        (torch.zeros(0), ""),
        (torch.ones(1, requires_grad=True), "0000803f"),
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16).T, "803f404000408040"),
    ],
)
def test_tensor_bytes_are_contiguous_and_little_endian(x: torch.Tensor, expected: str) -> None:
    assert tensor_bytes(x).hex() == expected


def test_stack_seeds_joins_along_the_batch() -> None:
    first = problem()
    second = replace(first, q=-first.q, v=first.v * 2)
    both = stack_seeds([first, second])
    assert both.q.shape == (4, 1, 4, 4)
    assert torch.equal(both.q[:2], first.q)
    assert torch.equal(both.q[2:], second.q)
    assert torch.equal(both.v[2:], second.v)
    assert torch.equal(both.do, torch.cat([first.do, first.do]))
    assert (both.scale, both.causal) == (0.5, False)
