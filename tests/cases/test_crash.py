"""The crash cases: the rule that calls an explosion, the data, the kernels of the ladder, a tiny run."""

from __future__ import annotations

import hashlib
import math
import threading
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from backends.base import Call, Unsupported
from backends.cpu import CpuBackend
from backends.kernels import eager_ladder as ladder
from bench.measure.inputs import Inputs, key_of, normal, tensor_bytes
from bench.measure.metrics import signed_coherence
from bench.measure.numerics import philox_words, round_mantissa
from cases import load_case
from cases.base import Measurement
from cases.bias.leak import PROBE_KEY
from cases.crash.documents import documents
from cases.crash.language import LENGTH, VOCABULARY, Xorshift32, tokens
from cases.crash.training.attention import StepAttention, leak_of, reseeded
from cases.crash.training.detector import MARGIN, PATIENCE, Detector, detect
from cases.crash.training.log import TrainingLog
from cases.crash.training.loop import Watch, train
from cases.crash.training.model import Size, fresh_model, initial_weights
from cases.crash.training.norms import norms_by_squaring, spectral_norms
from cases.crash.training.probe import probe_channels
from cases.crash.training.recipe import Recipe
from cases.crash.training.signals import coherence_by_head, largest, signals
from cases.crash.training.text_trainer import TextTrainer, batch_offsets
from cases.passes import forward_backward

CPU = CpuBackend()
KERNELS = {n: kernel for n, kernel in CPU.kernels().items() if n.startswith("eager-ladder/")}
CASE = load_case("crash/ladder")
TINY: dict[str, Any] = {"steps": 24, "layers": 2, "width": 16, "context": 16, "batch": 2}
INF, NAN = math.inf, math.nan

# ---- the detector -----------------------------------------------------------------------------


def noise(steps: int, size: float) -> np.ndarray:
    return size * normal(key_of("detector", steps), (steps,))


def warm_up(steps: int = 600) -> np.ndarray:
    """A loss that falls from 4 to 1.5 with noise."""
    return 1.5 + 2.5 * np.exp(-np.arange(steps) / 60) + noise(steps, 0.1)


def calm(loss: np.ndarray) -> list[float]:
    return [0.5] * len(loss)


def test_falling_noisy_loss_is_stable() -> None:
    found = detect(warm_up(), calm(warm_up()))
    assert (found.exploded, found.spikes, found.rule) == (False, 0, "")
    assert found.best == pytest.approx(1.5, abs=0.15)


def test_warm_up_that_first_rises_is_no_explosion() -> None:
    loss = warm_up()
    loss[:30] += np.linspace(0, 0.9, 30)
    assert not detect(loss, calm(loss)).exploded


def test_a_jump_that_stays_is_an_explosion_at_its_first_log() -> None:
    loss = warm_up()
    loss[400:] += 4
    found = detect(loss, calm(loss))
    # EMA(0.9) of a step of 4 is 1 above after three logs: 4·(1 − 0.9³) = 1.08.
    assert found.rule == "loss"
    assert found.crash is not None
    assert 401 <= found.crash <= 403
    assert found.spikes == 0
    assert found.logs == found.crash + PATIENCE, "nothing is read after the explosion"


def test_a_spike_that_comes_back_is_a_spike() -> None:
    loss = warm_up()
    loss[400:405] += 6
    found = detect(loss, calm(loss))
    assert (found.exploded, found.spikes) == (False, 1)
    loss[500:505] += 6
    assert detect(loss, calm(loss)).spikes == 2


def test_a_spike_before_an_explosion_is_still_counted() -> None:
    loss = warm_up()
    loss[300:305] += 6
    loss[500:] += 5
    found = detect(loss, calm(loss))
    assert (found.exploded, found.spikes) == (True, 1)
    assert found.crash is not None
    assert found.crash >= 500


def test_an_excursion_that_the_end_cuts_off_is_a_spike() -> None:
    loss = warm_up()
    loss[-PATIENCE:] += 5
    found = detect(loss, calm(loss))
    assert (found.exploded, found.spikes) == (False, 1)


def test_a_slow_rise_is_found_when_it_passes_the_margin() -> None:
    loss = np.concatenate([np.full(200, 2.0), np.linspace(2.0, 4.0, 400)])
    found = detect(loss, calm(loss))
    assert found.rule == "loss"
    assert found.crash is not None
    assert loss[found.crash] == pytest.approx(2 + MARGIN, abs=0.06)
    below = np.concatenate([np.full(200, 2.0), np.linspace(2.0, 2.95, 400)])
    assert not detect(below, calm(below)).exploded


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["loss", "norm"])
def test_non_finite_is_an_explosion_at_once(bad: float, where: str) -> None:
    loss, norm = warm_up(), calm(warm_up())
    (loss if where == "loss" else norm)[123] = bad
    found = detect(loss, norm)
    assert (found.crash, found.rule, found.logs) == (123, "nonfinite", 124)
    assert detect([bad], [1.0]).crash == 0


def test_gradient_norm_a_thousand_times_its_median() -> None:
    loss, norm = warm_up(), calm(warm_up())
    norm[300] = 499.0
    assert not detect(loss, norm).exploded
    norm[310] = 501.0
    found = detect(loss, norm)
    assert (found.crash, found.rule) == (310, "gradient")
    assert not detect(loss[:10], [1e-9] * 5 + [1.0] * 5).exploded, "too few to know what is usual"


def test_the_explosion_of_a_loss_that_then_turns_nan_begins_where_the_loss_left() -> None:
    loss = warm_up()
    loss[400:] += 5
    loss[410] = NAN
    found = detect(loss, calm(loss))
    assert found.rule == "nonfinite"
    assert found.crash is not None
    assert found.crash < 405
    assert found.spikes == 0


def test_an_exploded_detector_stays_so() -> None:
    found = Detector()
    assert found.update(NAN, 1.0)
    assert found.update(1.0, 1.0)
    assert (found.crash, found.logs) == (0, 2)


# ---- data and weights: the same bits on every machine -----------------------------------------


def test_xorshift_is_marsaglias() -> None:
    draw = Xorshift32(1)
    assert [draw.word() for _ in range(3)] == [270369, 67634689, 2647435461]
    assert all(0 <= Xorshift32(s).below(7) < 7 for s in range(1, 50))
    with pytest.raises(ValueError, match="seed: 0"):
        Xorshift32(0)


def test_the_text_is_these_bytes() -> None:
    text = tokens()
    assert (text.shape, text.dtype) == ((LENGTH,), torch.int64)
    assert (int(text.min()), int(text.max())) == (0, VOCABULARY - 1)
    found = hashlib.sha256(bytes(text.tolist())).hexdigest()
    assert found == "4b7c42c4a14e1c331aed70aed88388da14658e7be8612db90645b2b083384087"


@pytest.mark.parametrize(
    ("vocabulary", "sha256"),
    [
        (1024, "1964b78994dfeb2ad3d72c82a397f29433a5759570b1b8b4b9e70fe5ae1662c4"),
        (8192, "b4a4a860d74bd096604bd590c90185189e1ff6fed84280e8b86619712c26a2d0"),
    ],
)
def test_the_larger_text_is_these_bytes(vocabulary: int, sha256: str) -> None:
    text = documents(vocabulary)
    assert (text.shape, text.dtype) == ((4096 * 4096,), torch.int32)
    assert (int(text.min()), int(text.max())) == (0, vocabulary - 1)
    assert hashlib.sha256(tensor_bytes(text)).hexdigest() == sha256


def test_copies_repeat_what_stands_before_them() -> None:
    text = documents(1024, 400).reshape(4096, 400)
    opens, closes, checked = 1022, 1023, 0
    for line in text[:50].tolist():
        starts = [i for i, token in enumerate(line) if token == opens and closes in line[i + 1 :]]
        for start in starts:
            # A copied span may hold brackets itself: its end is 4 to 15 tokens on, at a bracket.
            ends = [e for e in range(start + 5, min(start + 17, 400)) if line[e] == closes]
            before = line[max(0, start - 72) : start]
            spans = [line[start + 1 : end] for end in ends]
            checked += any(
                before[i : i + len(span)] == span
                for span in spans
                for i in range(len(before) - len(span) + 1)
            )
    assert checked > 300


def test_initial_weights_and_batches_are_these_bytes() -> None:
    h = hashlib.sha256()
    for name, values in initial_weights("crash/ladder", Size(), 0):
        h.update(name.encode() + tensor_bytes(values))
    assert h.hexdigest() == "fdda63370741d5791c5c4ece039119c52b416737251812e78f7812749ddd5f58"
    offsets = batch_offsets("crash/ladder", 0, 100, 4, LENGTH - 128)
    assert int(offsets.min()) >= 0
    assert int(offsets.max()) < LENGTH - 128
    assert (
        hashlib.sha256(tensor_bytes(offsets)).hexdigest()
        == "7e1d07d3dfe7fc7d942107098d7e3d238c10e4e37617236936e69c25b29c50d9"
    )


def test_a_longer_run_begins_with_the_same_batches() -> None:
    short, long = (batch_offsets("x", 1, steps, 4, 1000) for steps in (10, 20))
    assert torch.equal(short, long[:10])
    assert not torch.equal(short, batch_offsets("x", 2, 10, 4, 1000))


def test_seeds_differ_and_the_digest_covers_every_input() -> None:
    digests = {
        CASE.problem(CASE.Params(**{**TINY, **change}), torch.float32, 1).digest
        for change in ({}, {"seed": 1}, {"steps": 25}, {"width": 24}, {"batch": 3}, {"layers": 1})
    }
    assert len(digests) == 6


def test_the_model_is_causal() -> None:
    model = fresh_model("x", Size(), 0)

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return KERNELS["eager-ladder/stock"](q, k, v, causal=True)

    ids = tokens()[:64].reshape(1, 64)
    changed = ids.clone()
    changed[0, 40] = (ids[0, 40] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(ids, attention), model(changed, attention)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


# ---- the kernels of the ladder ----------------------------------------------------------------

M = 2
SCALE = 16**-0.5


@cache
def problem() -> Inputs:
    shape = (2, 1, 24, 16)
    q, k, v, do = (normal(key_of("ladder", name), shape) for name in ("q", "k", "v", "do"))
    return Inputs.quantized(torch.float32, q, k, v, do, causal=True, scale=SCALE)


def by_hand(fix: str) -> dict[str, Tensor]:
    """The formulas of fixes.py, written out for one tile: FP32, P̄, Ō and O in M bits."""
    x = problem()
    s = (SCALE * (x.q @ x.k.mT)).masked_fill(torch.ones(24, 24).triu(1).bool(), -INF)
    p_bar = torch.exp(s - s.amax(-1, keepdim=True))
    total = p_bar.sum(-1, keepdim=True)
    acc = round_mantissa(p_bar, M) @ x.v

    def draw(y: Tensor, stream: int) -> Tensor:
        words = philox_words(y.shape, 5, stream, y.device)
        return round_mantissa(y, M, "stochastic", words)

    exact, true = acc / total, (p_bar @ x.v) / total
    rounded = round_mantissa(round_mantissa(acc, M) / total, M)
    first = draw(draw(acc, 1) / total, 0)
    second = draw(draw(acc, 2**31 + 1) / total, 2**31)
    p = torch.exp(s - (s.amax(-1, keepdim=True) + total.log()))
    dp = x.do @ x.v.mT
    output, delta_o = {
        "stock": (rounded, rounded),
        "delta_fp32": (rounded, exact),
        "delta_dp": (rounded, None),
        "stochastic": (first, first),
        "o_fp32": (exact, exact),
        "delta_rounded": (exact, rounded),
        "stochastic_independent": (first, second),
        "delta_flipped": (rounded, exact - (rounded - exact)),
        "delta_error_flipped": (rounded, true - (rounded - true)),
    }[fix]
    weighed = p * dp if delta_o is None else x.do * delta_o
    ds = p * (dp - weighed.sum(-1, keepdim=True))
    return {"o": output, "dq": SCALE * (ds @ x.k), "dk": SCALE * (ds.mT @ x.q), "dv": p.mT @ x.do}


@pytest.mark.parametrize(
    "fix",
    [
        "stock",
        "delta_fp32",
        "delta_dp",
        "stochastic",
        "o_fp32",
        "delta_rounded",
        "stochastic_independent",
        "delta_flipped",
        "delta_error_flipped",
    ],
)
def test_ladder_kernels_follow_the_formulas(fix: str) -> None:
    kernel = KERNELS[f"eager-ladder/{fix}"]
    options: dict[str, Any] = {"mantissa_bits": M}
    if "seed" in kernel.option_names:
        options["seed"] = 5
    found = forward_backward(kernel.configure(**options), CPU, problem())
    expected = by_hand(fix)
    assert torch.equal(found.o, expected["o"])
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(getattr(found, name), expected[name], rtol=1e-4, atol=2e-6)


def test_ablations_have_an_error_in_delta_of_the_same_size_or_none() -> None:
    """rowsum(dS) with δ consistent with P is FP32 dust; with a coarse O it is not."""
    x = problem()
    q, k = torch.nn.functional.pad(x.q, (0, 1)), torch.nn.functional.pad(x.k, (0, 1), value=4.0)
    v, do = torch.nn.functional.pad(x.v, (0, 1)), torch.nn.functional.pad(x.do, (0, 1))
    padded = Inputs(q, k, v, do, True, SCALE)
    rms = {
        fix: float(
            forward_backward(KERNELS[f"eager-ladder/{fix}"].configure(mantissa_bits=1), CPU, padded)
            .dq[..., -1]
            .square()
            .mean()
            .sqrt()
        )
        for fix in ("stock", "delta_dp", "delta_rounded", "delta_error_flipped", "delta_fp32", "o_fp32")
    }
    assert rms["delta_dp"] < 1e-5
    assert rms["delta_rounded"] == pytest.approx(rms["stock"], rel=1e-5)
    assert rms["delta_error_flipped"] == pytest.approx(rms["stock"], rel=1e-4), "only the sign differs"
    assert rms["delta_fp32"] == pytest.approx(rms["o_fp32"], rel=1e-4)
    # P̄ in one bit leaves an error in O itself, which the backward pass's P does not have.
    assert 1e-2 < rms["o_fp32"] < rms["stock"]


def test_without_coarse_mantissa_every_ladder_kernel_is_ordinary_attention() -> None:
    exact = forward_backward(KERNELS["eager-ladder/stock"], CPU, problem())
    for name, kernel in KERNELS.items():
        found = forward_backward(kernel, CPU, problem())
        for part in ("o", "dq", "dk", "dv"):
            torch.testing.assert_close(
                getattr(found, part),
                getattr(exact, part),
                rtol=1e-4,
                atol=1e-5,
                msg=f"{name} {part}",
            )


def test_the_ladder_is_untiled() -> None:
    call = Call((1, 1, 8, 16), (1, 1, 8, 16), torch.bfloat16, torch.device("cpu"), causal=False)
    for kernel in KERNELS.values():
        assert kernel.launch_facts(call)["tile_keys"] == "whole"
        assert "tile" not in kernel.option_names


@pytest.mark.parametrize("fix", ["stock", "delta_fp32", "delta_dp", "delta_error_flipped"])
def test_bf16_inputs_change_only_what_flash_attention_casts(fix: str) -> None:
    """O is the M-bit O of the FP32 kernel on the same values; gradients differ by BF16 casts of P and dS."""
    x = problem()
    low = Inputs(*(t.bfloat16() for t in (x.q, x.k, x.v, x.do)), causal=True, scale=SCALE)
    same = Inputs(*(t.float() for t in (low.q, low.k, low.v, low.do)), causal=True, scale=SCALE)
    kernel = KERNELS[f"eager-ladder/{fix}"].configure(mantissa_bits=M)
    found, expected = (forward_backward(kernel, CPU, problem) for problem in (low, same))
    assert torch.equal(found.o.float(), expected.o)
    for part in ("dq", "dk", "dv"):
        a, b = getattr(found, part).float(), getattr(expected, part)
        assert float((a - b).norm() / b.norm()) < 0.01, part
        assert not torch.equal(a, b)


def test_ladder_products_stay_fp32_under_autocast() -> None:
    x = problem()
    kernel = KERNELS["eager-ladder/delta_error_flipped"].configure(mantissa_bits=M)
    expected = kernel(x.q, x.k, x.v, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kernel(x.q, x.k, x.v, causal=True), expected)


@pytest.mark.parametrize("name", [n for n, k in KERNELS.items() if "compiled" in k.option_names])
def test_elementwise_parts_can_be_compiled_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced without a break; run as they are (no compiler here), so the bits are the same."""
    compile_traced = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile_traced)
    ladder._compiled.cache_clear()
    kernel = KERNELS[name].configure(mantissa_bits=M)
    found = forward_backward(kernel.configure(compiled=True), CPU, problem())
    ladder._compiled.cache_clear()
    assert found.digests() == forward_backward(kernel, CPU, problem()).digests()


def test_compiled_parts_may_be_made_anew_in_a_thread_of_autograds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch.compile refuses more than eight variants unless told otherwise, in each thread."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    ladder._compiled.cache_clear()
    spec = KERNELS["eager-ladder/stock"].configure(mantissa_bits=M, compiled=True).spec
    sums: list[Tensor] = []

    def in_a_thread() -> None:
        for tokens_ in range(1, 12):
            ones = torch.ones(1, 1, tokens_, 4)
            sums.append(ladder._parts(spec).delta(ones, ones, None))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    ladder._compiled.cache_clear()
    assert [float(x[0, 0, 0, 0]) for x in sums] == [4.0] * 11


def test_random_bits_are_of_the_stream_and_of_the_kernels_own_seed() -> None:
    kernel = KERNELS["eager-ladder/stochastic"]
    seeds = [
        reseeded(kernel.configure(seed=own), "run", step).options.model_dump()["seed"]
        for own in (0, 1)
        for step in (0, 1)
    ]
    assert len(set(seeds)) == 4
    stock = KERNELS["eager-ladder/stock"]
    assert reseeded(stock, "run", 1) is stock


def test_the_probe_fits_the_next_head_that_fused_kernels_take() -> None:
    widths = {d: d + probe_channels(d) for d in (16, 64, 65, 128, 248)}
    assert widths == {16: 32, 64: 96, 65: 96, 128: 256, 248: 256}


def test_grouped_heads_are_those_of_repeated_keys() -> None:
    x = problem()
    q = torch.cat([x.q, x.q.flip(2)], dim=1)  # [2, 2, 24, 16] on one key head
    kernel = KERNELS["eager-ladder/stock"].configure(mantissa_bits=M)
    grouped = kernel(q, x.k, x.v, causal=True)
    wide = kernel(q, x.k.repeat(1, 2, 1, 1), x.v.repeat(1, 2, 1, 1), causal=True)
    torch.testing.assert_close(grouped, wide)


# ---- the probe --------------------------------------------------------------------------------


def look(dtype: torch.dtype, probe: int, kernel: Any) -> tuple[StepAttention, Tensor, Tensor]:
    """One looked-at call on `problem()`: the attention, o, dq."""
    x = problem()
    q, k, v = (t.to(dtype, copy=True).requires_grad_() for t in (x.q, x.k, x.v))
    attention = StepAttention(kernel, probe=probe, look=True)
    o = attention(0, q, k, v)
    o.backward(x.do.to(dtype))
    assert q.grad is not None
    return attention, o.detach(), q.grad


def test_the_probe_reads_rowsum_ds_and_changes_nothing_else() -> None:
    x = problem()
    kernel = KERNELS["eager-ladder/stock"].configure(mantissa_bits=1)
    attention, o, dq = look(torch.float32, 1, kernel)
    plain = forward_backward(kernel, CPU, Inputs(x.q, x.k, x.v, x.do, True, SCALE))
    torch.testing.assert_close(o, plain.o)
    torch.testing.assert_close(dq, plain.dq)
    # Independently: a constant added to one channel of every key moves dq there by scale·c·rowsum(dS).
    shifted = torch.nn.functional.pad(x.k, (0, 1), value=PROBE_KEY)
    again = [torch.nn.functional.pad(t, (0, 1)) for t in (x.q, x.v, x.do)]
    wide = forward_backward(kernel, CPU, Inputs(again[0], shifted, again[1], again[2], True, SCALE))
    leak = leak_of(attention.seen[0])
    torch.testing.assert_close(leak.float(), wide.dq[..., -1] / (SCALE * PROBE_KEY))
    # And the second call, which leaves training alone, reads the same.
    apart, o, dq = look(torch.float32, 0, kernel)
    assert torch.equal(o, plain.o)
    assert torch.equal(dq, plain.dq)
    torch.testing.assert_close(leak_of(apart.seen[0]), leak, rtol=1e-4, atol=1e-6)


def test_signals_are_their_definitions() -> None:
    kernel = KERNELS["eager-ladder/stock"].configure(mantissa_bits=1)
    attention, _, _ = look(torch.float32, 1, kernel)
    seen = attention.seen[0]
    leak = leak_of(seen)
    found = {name: float(value) for name, value in signals(seen, leak).items()}
    q, k, v, do = (t[:, 0].double() for t in (seen.q, seen.k, seen.v, problem().do))  # [2, 24, 16]
    s = (SCALE * q @ k.mT).masked_fill(torch.ones(24, 24).triu(1).bool(), -INF)
    p = s.softmax(-1)
    dp = do @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    rows = s.amax(-1)
    assert found["row_max_abs"] == pytest.approx(float(rows.abs().max()))
    repeats = (s >= rows[..., None] - 1e-3).sum(-1) > 1
    assert found["repeated_max_share"] == pytest.approx(float(repeats.double().mean()))
    assert found["max_p_mean"] == pytest.approx(float(p.amax(-1).mean()), rel=1e-5)
    keys = k.reshape(-1, 16)
    ratio = keys.mean(0).norm() / keys.norm(dim=-1).mean()
    assert found["key_mean_ratio"] == pytest.approx(float(ratio), rel=1e-5)
    share = leak.abs().sum().double() / ds.abs().sum()
    assert found["leak_share"] == pytest.approx(float(share), rel=1e-4)
    assert found["leak_share"] > 0.01


def test_spectral_norms_by_decomposition_and_without() -> None:
    known = torch.zeros(2, 3, 4, 5, dtype=torch.float64)
    known[:, :, 0, 0], known[:, :, 1, 1], known[1, 0, 0, 0] = 3.0, -2.0, 9.0
    assert spectral_norms(known).tolist() == [[3.0, 3.0, 3.0], [9.0, 3.0, 3.0]]
    torch.testing.assert_close(norms_by_squaring(known), spectral_norms(known))
    weights = torch.stack([torch.from_numpy(normal(key_of("svd", n), (48, 48))).float() for n in range(3)])
    like = torch.stack([torch.eye(48), torch.zeros(48, 48)])  # all alike: the worst case
    weights = torch.cat([weights, like])
    torch.testing.assert_close(norms_by_squaring(weights), spectral_norms(weights), rtol=1e-5, atol=1e-12)
    weights[1, 2, 3], weights[3, 0, 0] = NAN, -INF
    assert spectral_norms(weights).isnan().tolist() == [False, True, False, True, False]


# ---- the case, end to end ---------------------------------------------------------------------


def test_heads_that_leak_to_either_side_do_not_cancel() -> None:
    leak = torch.zeros(2, 1, 3, 4, 5).double()  # [logs, layers, B, H, T]
    leak[..., 0, :], leak[..., 1, :] = 1.0, -1.0
    leak[..., 2, :4] = torch.tensor([1.0, -1.0, 1.0, 0.0]).double()
    assert float(signed_coherence(leak)) == pytest.approx(0.2 / 2.6)
    assert coherence_by_head(leak).tolist() == [[1.0, -1.0, pytest.approx(1 / 3), 0.0]]
    assert largest(coherence_by_head(leak)[:, 1:]) == -1.0
    leak[0, 0, 0, 3, 0] = NAN
    assert math.isnan(largest(coherence_by_head(leak)))


@cache
def tiny(fix: str = "stock", bits: int = 1, **params: Any) -> tuple[Measurement, str]:
    values = CASE.Params(**{**TINY, **params})
    kernel = KERNELS[f"eager-ladder/{fix}"].configure(mantissa_bits=bits)
    with CPU.deterministic():
        found = CASE.run(kernel, CPU, CASE.problem(values, torch.float32, 1))
    return found, CASE.verdict(values, found.metrics)


def test_a_tiny_run_has_metrics_curves_and_digests() -> None:
    found, verdict = tiny(steps=120)
    assert verdict == "stable@120"
    assert found.metrics["steps_run"] == 120
    assert found.metrics["last_loss"] < 4.2 < found.series["loss"][0] + 0.2
    assert found.series["step"] == [float(step) for step in range(0, 120, 10)]
    assert {len(curve) for curve in found.series.values()} == {12}
    assert {"w_q_norm_0", "w_k_norm_1", "leak_mean", "row_max_abs", "gradient_norm"} <= set(found.series)
    assert {"leak_coherence_0", "leak_coherence_1", "leak_rms", "w_q_norm_1"} <= set(found.metrics)
    # One head: what the most one-sided head shows is what the layer shows.
    for layer in (0, 1):
        head, both = (found.metrics[f"leak_coherence_{x}{layer}"] for x in ("head_", ""))
        assert head == pytest.approx(both, rel=1e-12)
    assert set(found.digests) == {"loss"}


@pytest.mark.parametrize("fix", ["stock", "stochastic"])
def test_two_runs_give_the_same_losses_bit_for_bit(fix: str) -> None:
    first, _ = tiny(fix)
    tiny.cache_clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        second, _ = tiny(fix)
        assert torch.get_num_threads() == threads + 1, "put back"
    finally:
        torch.set_num_threads(threads)
    assert first.digests == second.digests
    assert first.metrics == second.metrics
    assert first.digests["loss"] != tiny(fix, seed=1)[0].digests["loss"]
    assert first.digests["loss"] != tiny(fix, bits=2)[0].digests["loss"]


@pytest.mark.parametrize("name", KERNELS)
def test_every_ladder_kernel_trains(name: str) -> None:
    found, verdict = tiny(name.partition("/")[2])
    assert verdict == "stable@24"
    assert all(math.isfinite(value) for key, value in found.metrics.items() if key != "crash_step")


def trained(lr: float, steps: int, dtype: torch.dtype, watch: Watch) -> TrainingLog:
    """A tiny run of two heads on the larger language."""
    size = Size(layers=2, width=16, context=16, vocabulary=1024, heads=2)
    text = documents(1024, 128)
    model, offsets = fresh_model("x", size, 0), batch_offsets("x", 0, steps, 2, len(text) - 16)
    kernel = KERNELS["eager-ladder/stock"].configure(mantissa_bits=1)
    recipe = Recipe(steps, 2, lr, warmup=100)
    return train(TextTrainer(model, kernel, recipe, ("x", 0), dtype, text, offsets), watch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lr", [1e-2, 1.0])  # holds, and explodes
def test_losses_read_late_are_those_read_at_once(dtype: torch.dtype, lr: float) -> None:
    at_once = trained(lr, 200, dtype, Watch())
    assert at_once.detector.exploded == (lr == 1.0)
    for watch in (Watch(read_every=0), Watch(read_every=7)):
        late = trained(lr, 200, dtype, watch)
        assert late.loss == at_once.loss
        assert late.gradient_norm == at_once.gradient_norm
        assert repr(late.curves) == repr(at_once.curves)  # NaN too
        assert late.detector.crash == at_once.detector.crash


def test_going_on_after_an_explosion_keeps_its_step() -> None:
    stopped = trained(1.0, 200, torch.float32, Watch())
    went_on = trained(1.0, 200, torch.float32, Watch(stop_after_explosion=False))
    assert len(stopped.loss) < len(went_on.loss) == 200
    assert went_on.loss[: len(stopped.loss)] == stopped.loss
    assert went_on.detector.crash == stopped.detector.crash
    assert len(went_on.curves["step"]) == 20


def test_looking_changes_no_loss() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        often, seldom = (trained(1e-2, 60, dtype, Watch(look_every=n)) for n in (5, 60))
        assert often.loss == seldom.loss
        assert (len(often.curves["step"]), len(seldom.curves["step"])) == (12, 1)


def test_parameters_added_later_leave_older_rows_their_key() -> None:
    old = {"seed": 0, "steps": 1500, "lr": 6e-3, "batch": 4, "layers": 3, "width": 64}
    assert CASE.Params().recorded() == {**old, "context": 128, "mlp_ratio": 2}
    changed = CASE.Params(heads=2, stop_after_explosion=False).recorded()
    assert (changed["heads"], changed["stop_after_explosion"]) == (2, False)
    assert CASE.Params.added_later <= set(CASE.Params.model_fields)


def test_training_stops_after_an_explosion() -> None:
    found, verdict = tiny(lr=1.0, steps=400)
    assert verdict.startswith("exploded@")
    assert found.metrics["steps_run"] < 400
    assert found.metrics["steps_run"] <= found.metrics["crash_step"] + PATIENCE


@pytest.mark.parametrize(
    ("crash", "spikes", "expected"),
    [
        (INF, 0, "stable@1500"),
        (INF, 2, "spike"),
        (584, 0, "exploded@584"),
        (584, 1, "exploded@584"),
    ],
)
def test_verdict_from_metrics_alone(crash: float, spikes: float, expected: str) -> None:
    metrics = {"crash_step": float(crash), "spikes": float(spikes), "steps_run": 1500.0}
    assert CASE.verdict(CASE.Params(), metrics) == expected


def test_other_dtypes_and_several_seeds_in_a_row_are_refused() -> None:
    kernel, params = KERNELS["eager-ladder/stock"], CASE.Params(**TINY)
    with pytest.raises(Unsupported, match="loss scaling"):
        CASE.run(kernel, CPU, CASE.problem(params, torch.float16, 1))
    with pytest.raises(Unsupported, match=r"mantissa_bits 8: torch\.bfloat16 stores 7; .*float32"):
        CASE.run(kernel.configure(mantissa_bits=8), CPU, CASE.problem(params, torch.bfloat16, 1))
    with pytest.raises(Unsupported, match=r"list params\.seed"):
        CASE.run(kernel, CPU, CASE.problem(params, torch.float32, 3))


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"seed": -1}, "seed"),
        ({"steps": 0}, "steps"),
        ({"lr": 0}, "lr"),
        ({"lr": NAN}, "lr"),
        ({"mantissa_bits": 1}, "mantissa_bits"),
        ({"width": 64, "heads": 3}, "multiple of heads"),
        ({"width": 1000}, "at most 248 a head"),
        ({"vocabulary": 65}, "vocabulary"),
    ],
)
def test_parameters_are_strict(params: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        CASE.Params(**params)
