"""Rounding, Philox, ulp: against exact rational arithmetic, published answers and torch's own casts."""

from __future__ import annotations

import json
import math
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.measure import numerics
from bench.measure.numerics import (
    FORMATS,
    Format,
    Rounding,
    philox4x32,
    philox_words,
    round_float64,
    round_mantissa,
    round_to_format,
    tie_distance,
    ulp,
)

BF16, FP16, FP32 = (FORMATS[d] for d in (torch.bfloat16, torch.float16, torch.float32))
CPU = torch.device("cpu")
TABLE: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "expected_bias.json").read_text()
)["cases"]
any_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def float32(bits: Tensor) -> Tensor:
    """FP32 values of int64 bit patterns in [0, 2^32)."""
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Equal bit for bit (so −0 is not 0), or both NaN."""
    return (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())


def neighbourhoods(patterns: Tensor, drop: int) -> Tensor:
    """FP32 bits of each pattern, its midpoints to both neighbours, and ±1 FP32 ulp around these."""
    half = 1 << (drop - 1)
    offsets = torch.tensor([o + d for o in (-half, 0, half) for d in (-1, 0, 1)])
    return float32(((patterns << drop)[:, None] + offsets).flatten() & 0xFFFFFFFF)


def quantum(x: Fraction, bits: int, emin: int) -> Fraction:
    """Spacing of the grid with `bits` mantissa bits at x, from integer arithmetic alone."""
    if x == 0:
        return Fraction(2) ** (emin - bits)
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    return Fraction(2) ** (max(exponent, emin) - bits)


def nearest(x: Fraction, fmt: Format) -> float:
    """x rounded once to `fmt`, ties to even (what `round` of a Fraction does), overflow to ±Inf."""
    step = quantum(x, fmt.mantissa_bits, fmt.emin)
    rounded = round(x / step) * step
    if abs(rounded) > Fraction(fmt.max_value):
        return math.copysign(math.inf, x)
    return float(rounded)


def rounded(x: float, bits: int, rounding: Rounding = "rne") -> float:
    return float(round_mantissa(torch.tensor([x], dtype=torch.float32), bits, rounding))


# ---- round_mantissa ---------------------------------------------------------------------------


def test_seven_bits_equal_the_bfloat16_cast_around_every_bfloat16_value() -> None:
    x = neighbourhoods(torch.arange(1 << 16), drop=16)
    assert same_bits(round_mantissa(x, 7), x.bfloat16().float()).all()
    assert x.isnan().any()
    assert x.isinf().any()


def test_ten_bits_equal_the_float16_cast_where_float16_is_normal() -> None:
    # Positive FP32 exponents of FP16's normals, 2^-14 to 2^15, with 10 bits of mantissa.
    patterns = torch.arange((127 - 14) << 10, (127 + 16) << 10)
    x = neighbourhoods(patterns, drop=13)
    x = x[(x >= 2.0**-14) & (x < 65520)]
    assert x.numel() > 250_000
    for signed in (x, -x):
        assert same_bits(round_mantissa(signed, 10), signed.half().float()).all()


def test_twenty_three_bits_change_nothing() -> None:
    bits = torch.arange(0, 1 << 32, 65_521)
    x = float32(bits)
    result = round_mantissa(x, 23)
    assert torch.equal(result.view(torch.int32), x.view(torch.int32))
    assert result.data_ptr() != x.data_ptr()


@settings(max_examples=400, deadline=None)
@given(any_float32, st.integers(1, 22))
@example(2.0**-149, 1)
@example(2.0**-127, 3)
@example(1.5, 1)
@example(-(2.0**127) * (2 - 2.0**-23), 22)
@example(-0.0, 7)
def test_nearest_even_is_the_rational_nearest_value(x: float, bits: int) -> None:
    expected = nearest(Fraction(x), Format(bits, -126, FP32.max_value))
    result = rounded(x, bits)
    assert result == expected
    assert math.copysign(1, result) == math.copysign(1, x)


@settings(max_examples=400, deadline=None)
@given(any_float32, st.integers(1, 22))
@example(2.0**-149, 1)
@example(2.0**127 * (2 - 2.0**-23), 7)
def test_toward_zero_is_the_grid_value_below(x: float, bits: int) -> None:
    result = rounded(x, bits, "toward_zero")
    exact, step = Fraction(x), quantum(Fraction(x), bits, -126)
    assert abs(result) <= abs(x)
    assert (Fraction(result) / step).denominator == 1, "not on the grid"
    assert abs(exact - Fraction(result)) < step
    assert math.copysign(1, result) == math.copysign(1, x)


@settings(max_examples=200, deadline=None)
@given(any_float32, st.integers(1, 22), st.integers(0, 2**32 - 1))
@example(2.0**-149, 7, 2**32 - 1)
@example(-2.0, 7, 2**32 - 1)
def test_stochastic_is_one_of_the_two_neighbours(x: float, bits: int, word: int) -> None:
    value = torch.tensor([x], dtype=torch.float32)
    result = round_mantissa(value, bits, "stochastic", torch.tensor([word]))
    down = Fraction(rounded(x, bits, "toward_zero"))
    if down == Fraction(x):
        assert float(result) == x, "a grid value must stay"
        return
    up = down + math.copysign(1, x) * quantum(Fraction(x), bits, -126)
    up_value = float(up) if abs(up) <= Fraction(FP32.max_value) else math.copysign(math.inf, x)
    assert float(result) in (float(down), up_value)


@pytest.mark.parametrize("bits", [7, 10, 12])
@pytest.mark.parametrize("tail", [0, 1, 12345, 0x7FFF])
def test_stochastic_rounds_up_for_exactly_the_discarded_share_of_words(bits: int, tail: int) -> None:
    # All low parts of the random word once: `tail` of 2^drop must round up, no more and no fewer.
    words = torch.arange(1 << (23 - bits))
    tail &= len(words) - 1
    x = float32(torch.tensor([0x40490000 & ~(len(words) - 1) | tail])).expand(len(words))
    result = round_mantissa(x.contiguous(), bits, "stochastic", words)
    down = round_mantissa(x.contiguous(), bits, "toward_zero")
    assert int((result != down).sum()) == tail
    assert result.double().mean() == x[0].double()


def test_stochastic_mean_is_unbiased_with_philox_words() -> None:
    count, x = 1 << 16, 1.2345678
    value = torch.full((count,), x)
    words = philox_words((count,), seed=5, stream=1, device=CPU)
    result = round_mantissa(value, 7, "stochastic", words).double()
    low, step = 1.234375, 2.0**-7
    assert set(result.tolist()) == {low, low + step}
    share = (float(value[0]) - low) / step
    tolerance = 5 * step * math.sqrt(share * (1 - share) / count)
    assert abs(float(result.mean()) - float(value[0])) < tolerance


def test_stochastic_bits_depend_on_seed_and_stream_alone() -> None:
    x = torch.linspace(-3, 3, 4099)

    def draw(seed: int, stream: int) -> Tensor:
        return round_mantissa(x, 7, "stochastic", philox_words(x.shape, seed, stream, CPU))

    assert torch.equal(draw(1, 2), draw(1, 2))
    for other in (draw(2, 2), draw(1, 3), draw(1 + 2**32, 2)):
        assert 0.2 < float((draw(1, 2) != other).double().mean()) < 0.6


@pytest.mark.parametrize("rounding", ["rne", "stochastic", "toward_zero"])
def test_special_values_pass_through(rounding: Rounding) -> None:
    payload = float32(torch.tensor([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]))
    x = torch.cat([torch.tensor([0.0, -0.0, math.inf, -math.inf]), payload])
    words = torch.full(x.shape, 2**32 - 1)
    result = round_mantissa(x, 7, rounding, words)
    assert torch.equal(result.view(torch.int32), x.view(torch.int32))


def test_rounding_up_carries_into_the_exponent() -> None:
    below_two, largest = 2 - 2.0**-23, 2.0**127 * (2 - 2.0**-23)
    x = torch.tensor([below_two, -below_two, largest, -largest, 2.0**-126 - 2.0**-149])
    up = torch.tensor([2.0, -2.0, math.inf, -math.inf, 2.0**-126])
    assert torch.equal(round_mantissa(x, 7), up)
    all_ones = torch.full(x.shape, 2**32 - 1)
    assert torch.equal(round_mantissa(x, 7, "stochastic", all_ones), up)
    down = round_mantissa(x, 7, "stochastic", all_ones * 0)
    assert torch.equal(down, round_mantissa(x, 7, "toward_zero"))
    assert float(down[2]) == BF16.max_value
    assert float(down[0]) == 2 - 2.0**-7


def test_views_and_shapes_survive() -> None:
    x = torch.linspace(-2, 2, 24).reshape(4, 6)
    assert torch.equal(round_mantissa(x.T, 7), x.bfloat16().float().T)
    assert round_mantissa(torch.tensor(1.001), 7).shape == ()
    assert round_mantissa(torch.zeros(0, 3), 7).shape == (0, 3)


def test_bad_arguments_are_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match="float64"):
        round_mantissa(x.double(), 7)
    for bits in (0, 24):
        with pytest.raises(ValueError, match=f"got {bits}"):
            round_mantissa(x, bits)
    with pytest.raises(ValueError, match="random_words"):
        round_mantissa(x, 7, "stochastic")
    with pytest.raises(ValueError, match="upward"):
        round_mantissa(x, 7, "upward")  # type: ignore[arg-type]


# ---- round_float64 ----------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(
    st.one_of(
        st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300),
        st.floats(-70000, 70000),
        st.floats(-(2.0**-13), 2.0**-13),
    ),
    st.sampled_from([BF16, FP16, FP32]),
)
@example(1 + 2.0**-8 + 2.0**-40, BF16)  # through FP32 this would be a tie, and wrong
@example(1 + 2.0**-24 + 2.0**-52, FP32)
@example(2.0**-25, FP16)
@example(2.0**-25 + 2.0**-70, FP16)
@example(65519.999999999, FP16)
@example(65520.0, FP16)
@example(5e-324, FP32)
def test_float64_rounds_once_to_the_rational_nearest_value(x: float, fmt: Format) -> None:
    result = float(round_float64(np.array([x]), fmt)[0])
    assert result == nearest(Fraction(x), fmt)
    assert math.copysign(1, result) == math.copysign(1, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float64_equals_the_torch_cast_of_float32_values(dtype: torch.dtype) -> None:
    # Values of FP32, so that a cast by way of FP32 rounds once too. Includes subnormals and overflow.
    patterns = torch.arange(0, 1 << 16, 3)
    x = torch.cat([neighbourhoods(patterns, drop=16), torch.linspace(-1e-4, 1e-4, 20_001)])
    x = torch.cat([x, torch.linspace(-1e-6, 1e-6, 20_001), torch.linspace(65000, 66000, 10_001)])
    x = x[~x.isnan()]
    ours = torch.from_numpy(round_float64(x.double().numpy(), FORMATS[dtype])).float()
    assert same_bits(ours, x.to(dtype).float()).all()
    same = x.double().to(dtype).float()
    assert same_bits(ours, same).all()


def test_float64_equals_the_torch_cast_to_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**63), 2**63 - 1, (50_000,), generator=generator)
    wide = bits.view(torch.float64)
    x = torch.cat([wide[wide.abs() < 1e300], torch.randn(50_000, generator=generator).double()])
    scaled = torch.cat([x, x * 2.0**-140, x * 2.0**-20])
    scaled = scaled[scaled.isfinite() & (scaled.abs() < 1e300)]
    ours = torch.from_numpy(round_float64(scaled.numpy(), FP32)).float()
    assert same_bits(ours, scaled.float()).all()


@pytest.mark.parametrize(
    ("fmt", "x", "expected"),
    [
        (FP16, 2.0**-24, 2.0**-24),  # smallest subnormal
        (FP16, 2.0**-25, 0.0),  # tie to even
        (FP16, 3 * 2.0**-25, 2.0**-23),  # tie to even, upward
        (FP16, 1023.5 * 2.0**-24, 2.0**-14),  # a subnormal becomes normal
        (FP16, 65504.0, 65504.0),
        (FP16, 65520.0, math.inf),  # half way to 2^16
        (BF16, 2.0**-133, 2.0**-133),
        (BF16, 2.0**-134, 0.0),
        (BF16, 3 * 2.0**-134, 2.0**-132),
        (BF16, 1 + 2.0**-8, 1.0),
        (BF16, 1 + 3 * 2.0**-8, 1 + 2.0**-6),
        (BF16, float(np.float32(FP32.max_value)), math.inf),
        (FP32, 2.0**-150, 0.0),
        (FP32, 1 + 2.0**-24, 1.0),
    ],
)
def test_float64_known_answers(fmt: Format, x: float, expected: float) -> None:
    both = round_float64(np.array([x, -x]), fmt)
    assert both.tolist() == [expected, -expected]
    assert np.signbit(both).tolist() == [False, True]


def test_float64_special_values_pass_through() -> None:
    x = np.array([0.0, -0.0, math.inf, -math.inf, math.nan])
    result = round_float64(x, BF16)
    assert result.tolist()[:4] == x.tolist()[:4]
    assert math.isnan(result[4])
    assert np.signbit(result[:4]).tolist() == [False, True, False, True]


# ---- the paper's sums -------------------------------------------------------------------------


@pytest.mark.parametrize("row", TABLE, ids=[f"{c['a']}+{c['b']}+{c['r']:.3g}" for c in TABLE])
def test_the_papers_sums(row: dict[str, Any]) -> None:
    total = (row["a"] + row["b"]) + row["r"]
    assert total == row["sum_f64"] == float.fromhex(row["sum_f64_hex"])
    single = np.float32(total)
    assert hex(single.view(np.uint32)) == row["sum_f32_bits"]

    value = float(round_float64(np.array([total]), BF16)[0])
    assert value == row["bf16_value"]
    (pattern,) = struct.unpack(">I", struct.pack(">f", value))
    assert pattern & 0xFFFF == 0
    assert hex(pattern >> 16) == row["bf16_bits"]
    # FP32 holds these sums well enough: rounding it once more gives the same BF16 value.
    from_single = round_mantissa(torch.tensor([float(single)]), 7)
    assert float(from_single) == value

    low, high = row["bf16_neighbours"]
    assert low < total < high
    assert value in (low, high)
    assert high - low == float(ulp(torch.tensor([total], dtype=torch.float64), BF16))
    exact = torch.tensor([total, float(single)], dtype=torch.float64)
    ties = (tie_distance(exact, BF16) == 0).tolist()
    assert ties == [row["tie"], row["tie_after_f32_rounding"]]
    assert (abs(value) > abs(total)) == row["rounded_away_from_zero"]
    rational = Fraction(row["a"]) + Fraction(row["b"]) + Fraction(row["r"])
    assert (rational == Fraction(total)) == row["sum_f64_is_exact"]
    assert float(Fraction(value) - rational) == row["error"]


def test_the_table_has_both_signs_and_both_directions() -> None:
    assert len(TABLE) == 10
    assert {(row["a"] < 0, row["rounded_away_from_zero"]) for row in TABLE} == {
        (negative, away) for negative in (True, False) for away in (True, False)
    }


# ---- Philox -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox4x32_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
    assert [int(w) for w in philox4x32((c0, c1, c2, c3), key)] == list(expected)


def test_philox_words_are_lane_zero_at_counter_index_and_stream() -> None:
    # Crosses a chunk's end four times; both halves of the seed make the key.
    count, stream, seed = 2**16 + 3, 2**31 + 1, 0x299F31D0_A4093822
    words = philox_words((count,), seed, stream, CPU)
    index = torch.arange(count)
    zero = torch.zeros_like(index)
    lane = philox4x32((index, zero + stream, zero, zero), (0xA4093822, 0x299F31D0))[0]
    assert torch.equal(words, lane)
    assert words.dtype == torch.int64
    assert int(words.min()) >= 0
    assert int(words.max()) < 2**32


def test_what_other_devices_run_gives_the_words_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**33 + 5])
    key = [torch.tensor(n) for n in (0xA4093822, 0x299F31D0, 7)]
    zero = torch.zeros_like(index)
    counter = (index & 0xFFFFFFFF, zero + 7, index >> 32, zero)
    lane = philox4x32(counter, (0xA4093822, 0x299F31D0))[0]
    assert torch.equal(numerics._lane0(index, *key), lane)
    # Chunks too: as a traced function takes them.
    monkeypatch.setattr(numerics, "_PHILOX_CHUNK_DEVICE", 1000)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    traced = philox_words((2500,), 5, 2**32 + 3, CPU)
    monkeypatch.undo()
    assert torch.equal(traced, philox_words((2500,), 5, 3, CPU))


def test_stochastic_rounding_can_be_compiled() -> None:
    x = torch.linspace(1, 2, 500)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return round_mantissa(x, 3, "stochastic", philox_words(x.shape, 5, 1, x.device))

    assert torch.equal(torch.compile(rounded, backend="eager")(x), rounded(x))


def test_philox_words_off_the_cpu_are_made_in_larger_chunks() -> None:
    count = 2**17 + 3
    assert philox_words((count,), 3, 1, torch.device("meta")).shape == (count,)


def test_philox_words_depend_on_the_linear_index_alone() -> None:
    flat = philox_words((60,), 3, 1, CPU)
    assert torch.equal(philox_words((3, 4, 5), 3, 1, CPU).flatten(), flat)
    assert torch.equal(philox_words((7,), 3, 1, CPU), flat[:7])
    assert int(philox_words((), 0, 0, CPU)) == 0x6627E8D5
    assert philox_words((0, 4), 3, 1, CPU).shape == (0, 4)


def test_philox_bits_are_balanced() -> None:
    words = philox_words((1 << 14,), 11, 0, CPU)
    for bit in range(32):
        ones = int(((words >> bit) & 1).sum())
        assert abs(ones - 2**13) < 5 * math.sqrt(2**14) / 2, f"bit {bit}"


# ---- ulp and ties -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "x", "exponent"),
    [
        (BF16, 1.0, -7),
        (BF16, 1.9999, -7),
        (BF16, 2.0, -6),
        (BF16, 0.99999, -8),
        (BF16, -4.703125, -5),
        (BF16, 0.0, -133),
        (BF16, 2.0**-126, -133),
        (BF16, 2.0**-130, -133),
        (BF16, 2.0**-125, -132),
        (BF16, 3e38, 120),
        (FP16, 1.0, -10),
        (FP16, 2.0**-14, -24),
        (FP16, 1e-7, -24),
        (FP16, -65504.0, 5),
        (FP32, 1.0, -23),
        (FP32, 2.0**-149, -149),
    ],
)
def test_ulp_known_answers(fmt: Format, x: float, exponent: int) -> None:
    result = ulp(torch.tensor([x, -x], dtype=torch.float64), fmt)
    assert result.tolist() == [2.0**exponent] * 2
    assert result.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ulp_is_the_gap_to_the_next_value(dtype: torch.dtype) -> None:
    largest = int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(torch.int16))
    values = torch.arange(largest + 1, dtype=torch.int16).view(dtype).double()
    assert torch.equal(ulp(values[:-1], FORMATS[dtype]), values.diff())


def test_tie_distance_known_answers() -> None:
    x = torch.tensor(
        [
            1.0,
            1 + 2.0**-8,
            1 + 2.0**-9,
            1 + 3 * 2.0**-9,
            1 + 2.0**-8 + 2.0**-30,
            -4.703125,
            2.0**-134,
        ],
        dtype=torch.float64,
    )
    expected = [0.5, 0.0, 0.25, 0.25, 2.0**-23, 0.0, 0.0]
    assert tie_distance(x, BF16).tolist() == expected
    assert torch.equal(tie_distance(-x, BF16), tie_distance(x, BF16))


# ---- round_to_format: exponent range of the format, not of FP32 ---------------------------------


def fp16_neighbourhoods() -> torch.Tensor:
    """Every finite FP16 value, the midpoints above and what lies just beside them, in FP32."""
    patterns = torch.arange(0, 0x7C00, dtype=torch.int32).to(torch.int16)
    values = patterns.view(torch.float16).float()
    middle = values[:-1] + (values[1:] - values[:-1]) / 2
    below, above = torch.nextafter(middle, values[:-1]), torch.nextafter(middle, values[1:])
    every = torch.cat([values, middle, below, above])
    return torch.cat([every, -every])


def test_round_to_format_equals_the_fp16_cast_everywhere() -> None:
    x = fp16_neighbourhoods()
    assert torch.equal(round_to_format(x, FP16, "rne"), x.half().float())
    beyond = torch.tensor([65519.0, 65520.0, 70000.0, 1e38, float("inf"), float("nan")])
    assert torch.equal(round_to_format(beyond, FP16, "rne")[:5], beyond.half().float()[:5])
    assert round_to_format(beyond, FP16, "rne")[5].isnan()


def test_toward_zero_never_grows_in_fp16() -> None:
    x = torch.cat([fp16_neighbourhoods(), torch.tensor([1.9 * 2.0**-24, 70000.0, -1e38])])
    rounded = round_to_format(x, FP16, "toward_zero")
    assert torch.equal(rounded, rounded.half().float()), "on the grid"
    assert (rounded.abs() <= x.abs()).all()
    assert (x.abs() - rounded.abs() < ulp(x.double().clamp(-65504, 65504), FP16))[:-2].all()
    assert rounded[-3:].tolist() == [2.0**-24, 65504.0, -65504.0]


def test_stochastic_rounding_is_unbiased_among_fp16_subnormals() -> None:
    x = torch.full((1 << 16,), 1.3 * 2.0**-24)
    words = philox_words(x.shape, 3, 0, x.device)
    steps = round_to_format(x, FP16, "stochastic", words) * 2.0**24
    assert set(steps.tolist()) == {1.0, 2.0}
    assert abs(float(steps.mean()) - 1.3) < 5 * (0.21 / x.numel()) ** 0.5


def test_round_to_format_of_bf16_is_round_mantissa() -> None:
    x = torch.tensor([1.00390625, 3e-41, -1e38, 3.4e38, 0.1])
    for rounding in ("rne", "toward_zero"):
        expected = round_mantissa(x, 7, rounding)
        if rounding == "toward_zero":
            expected = expected.clamp(-FORMATS[torch.bfloat16].max_value, FORMATS[torch.bfloat16].max_value)
        assert torch.equal(round_to_format(x, FORMATS[torch.bfloat16], rounding), expected)
