"""`crash/gpt2`: recipe, signals, the loop; cut, resumed, signalled, replayed, without space."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from backends.base import Kernel, Unsupported
from backends.cpu import CpuBackend
from bench.errors import UsageError
from cases import load_case
from cases.base import Measurement, Workspace
from cases.crash.gpt2 import long_run
from cases.crash.gpt2.batches import read_batches, write_explicit
from cases.crash.gpt2.data import FOLDER_VARIABLE
from cases.crash.gpt2.progress import Progress, duration
from cases.crash.gpt2.trainer import leak_point
from cases.crash.language import tokens
from cases.crash.training.attention import StepAttention
from cases.crash.training.model import GPT, Size, fresh_model
from cases.crash.training.norms import weight_norms
from cases.crash.training.optimizer import optimizers
from cases.crash.training.probe import WIDTHS
from cases.crash.training.recipe import Recipe

CPU = CpuBackend()
KERNELS = CPU.kernels()
CASE: Any = load_case("crash/gpt2")
SMALL: dict[str, Any] = {
    "steps": 12,
    "layers": 2,
    "heads": 2,
    "width": 16,
    "context": 16,
    "batch": 4,
    "micro_batch": 2,
    "warmup": 4,
    "decay_steps": 12,
    "log_every": 4,
    "checkpoint_every": 4,
}


class Said(list[str]):
    """What a run said."""

    def __call__(self, text: str) -> None:
        self.append(text)


def run(
    folder: Path,
    kernel: Kernel | str = "sdpa-flash/stock",
    dtype: torch.dtype = torch.float32,
    said: Said | None = None,
    **params: Any,
) -> Measurement:
    chosen = KERNELS[kernel] if isinstance(kernel, str) else kernel
    values = CASE.Params(**{**SMALL, **params})
    workspace = Workspace(folder, Said() if said is None else said)
    with CPU.deterministic():
        found: Measurement = CASE.run_in(workspace, chosen, CPU, CASE.problem(values, dtype, 1))
    return found


# ---- recipe and model -------------------------------------------------------------------------


PAPER = Recipe(600_000, 512, 1e-3, 2000, "cosine", min_lr=1e-5, decay_steps=600_000)


def test_learning_rate_of_the_paper() -> None:
    recipe = PAPER
    assert recipe.lr_at(0) == pytest.approx(1e-3 / 2000)
    assert recipe.lr_at(1999) == pytest.approx(1e-3)
    assert recipe.lr_at(2000) == pytest.approx(1e-3)
    assert recipe.lr_at(301_000) == pytest.approx((1e-3 + 1e-5) / 2)
    assert recipe.lr_at(600_000) == recipe.lr_at(900_000) == pytest.approx(1e-5)


def test_muon_takes_the_matrices_of_the_blocks_alone() -> None:
    model = GPT(Size(layers=2, width=16, heads=2))
    (alone,) = optimizers(model, PAPER, 1e-3)
    assert isinstance(alone, torch.optim.AdamW)
    adamw, muon = optimizers(model, replace(PAPER, optimizer="muon"), 1e-3)
    assert isinstance(muon, torch.optim.Muon)
    of_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in of_muon}
    assert names == {f"blocks.{i}.{w}" for i in (0, 1) for w in ("w_q", "w_k", "w_v", "w_o", "w_1", "w_2")}
    of_adamw = [p for group in adamw.param_groups for p in group["params"]]
    assert len(of_adamw) + len(names) == len(list(model.parameters()))


@pytest.mark.parametrize(("layers", "width", "heads"), [(12, 768, 12), (24, 1024, 16)])
def test_sizes_are_gpt2s(layers: int, width: int, heads: int) -> None:
    """Small and medium: 12·width² a block (4 of attention, 8 of MLP), tied head, gains, no biases."""
    with torch.device("meta"):
        model = GPT(Size(layers, width, 1024, mlp_ratio=4, vocabulary=50304, heads=heads))
    expected = layers * 12 * width**2 + (50304 + 1024) * width + (2 * layers + 1) * width
    assert sum(p.numel() for p in model.parameters()) == expected
    assert model.size.head_dim == 64


def test_heads_are_separate() -> None:
    """One head of the model against the formula written out."""
    model = fresh_model("x", Size(1, 12, 8, mlp_ratio=4, heads=3), 0)
    seen = {}

    def attention(layer: int, q: Any, k: Any, v: Any) -> Any:
        seen["qkv"] = q, k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    ids = tokens()[:8][None]
    with torch.no_grad():
        model(ids, attention)
        block = model.blocks[0]
        h = F.layer_norm(F.embedding(ids, model.embedding) + model.positions, (12,), block.norm_attention)
    for x, w in zip(seen["qkv"], (block.w_q, block.w_k, block.w_v), strict=True):
        assert x.shape == (1, 3, 8, 4)
        torch.testing.assert_close(x[0, 1], h[0] @ w[4:8].T)


# ---- signals ----------------------------------------------------------------------------------


def looked_at(model: GPT, kernel: Any, probe: int) -> tuple[StepAttention, torch.Tensor]:
    """A pass over two sequences, and its loss."""
    ids = tokens()[:50].reshape(2, 25)
    attention = StepAttention(kernel, probe=probe, look=True)
    logits = model(ids[:, :-1], attention)
    return attention, F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def test_the_probe_reads_rowsum_ds() -> None:
    """Against the formula: δ error = rowsum(dP∘P) − rowsum(dO∘O), with the kernel's rounded O."""
    model = fresh_model("x", Size(1, 32, 24, mlp_ratio=4, heads=2), 0)
    kernel = KERNELS["eager-ladder/stock"].configure(mantissa_bits=3)
    kept: dict[str, Any] = {}

    class Spy(Tripwire):
        def __call__(self, *args: Any, **options: Any) -> Any:
            kept["o"] = kernel(*args, **options)
            kept["width"] = args[0].shape[-1]
            kept["o"].retain_grad()
            return kept["o"]

    attention, loss = looked_at(model, Spy(0, cut, "eager-ladder/stock"), probe=16)
    loss.backward()
    point = leak_point(attention)
    assert kept["width"] == 32, "16 channels, and the next width"
    seen = attention.seen[0]
    q, k, v = (x.double() for x in (seen.q, seen.k, seen.v))
    o, do = (x[..., :16].double() for x in (kept["o"].detach(), kept["o"].grad))
    s = (0.25 * q @ k.mT).masked_fill(torch.ones(24, 24).triu(1).bool(), -math.inf)
    p, dp = s.softmax(-1), do @ v.mT
    leak = (p * dp).sum(-1) - (do * o).sum(-1)
    assert point["leak_mean"] == pytest.approx(float(leak.mean()), rel=1e-3)
    assert point["leak_abs_0"] == pytest.approx(float(leak.abs().mean()), rel=1e-3)
    assert point["row_max_abs"] == pytest.approx(float(s.amax(-1).abs().max()), rel=1e-5)
    assert point["leak_abs"] > 1e-7


@pytest.mark.parametrize("bad", [0, 1])
def test_the_probe_hides_no_row_that_is_not_finite(bad: int) -> None:
    model = fresh_model("x", Size(2, 32, 24, mlp_ratio=4, heads=2), 0)
    with torch.no_grad():
        model.blocks[bad].w_q[0, 0] = math.nan
    kernel = KERNELS["eager-ladder/stock"].configure(mantissa_bits=3)
    attention, loss = looked_at(model, kernel, probe=16)
    torch.autograd.grad(loss, model.positions)
    assert math.isnan(leak_point(attention)["row_max_abs"])


def test_every_head_has_a_wider_one() -> None:
    assert all(any(width > head_dim for width in WIDTHS) for head_dim in range(1, 256))


def test_weight_norms_are_spectral_and_nan_where_a_weight_is() -> None:
    model = fresh_model("x", Size(2, 16, heads=2), 0)
    with torch.no_grad():
        model.blocks[0].w_q.copy_(torch.diag(torch.arange(16.0)))
        model.blocks[1].w_k[0, 0] = math.inf
    norms = weight_norms(model)
    assert norms["w_q_norm_0"] == pytest.approx(15)
    assert math.isnan(norms["w_k_norm_1"])
    assert math.isfinite(norms["w_q_norm_1"])


# ---- the loop ---------------------------------------------------------------------------------


class Tripwire:
    """A kernel that does something at its n-th call and is otherwise the one inside."""

    def __init__(self, at: int, action: Callable[[], None], name: str = "sdpa-flash/stock"):
        self.inner, self.at, self.action, self.calls = KERNELS[name], at, action, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def reseeded(self, key: int) -> Tripwire:
        return self  # what is inside draws nothing

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            self.action()
        return self.inner(*args, **options)


class Cut(BaseException):
    """As sudden as a power cut: nothing catches it."""


def cut() -> None:
    raise Cut


CALLS_A_STEP = 4  # 2 micro-batches × 2 layers; a probe is 2 more in logged steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_cut_anywhere_and_resumed_has_the_bits_of_an_uncut_one(
    tmp_path: Path, optimizer: str, dtype: torch.dtype
) -> None:
    whole = run(tmp_path / "whole", dtype=dtype, optimizer=optimizer)
    assert whole.metrics["steps_run"] == 12
    for at in (1, 2 + 4 * CALLS_A_STEP, 4 + 6 * CALLS_A_STEP + 1, 6 + 11 * CALLS_A_STEP + 1):
        folder, said = tmp_path / f"cut{at}", Said()
        with pytest.raises(Cut):
            run(folder, Tripwire(at, cut), dtype, optimizer=optimizer)
        resumed = run(folder, dtype=dtype, optimizer=optimizer, said=said)
        assert any("resumed at step" in line for line in said) == (at > 4 * CALLS_A_STEP + 2)
        assert resumed.digests == whole.digests
        assert resumed.metrics == whole.metrics
        assert resumed.series == whole.series


def test_sigterm_writes_a_checkpoint_at_that_step(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", checkpoint_every=1000)
    said = Said()
    wire = Tripwire(5 * CALLS_A_STEP, lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", wire, said=said, checkpoint_every=1000)
    assert signal.getsignal(signal.SIGTERM) is before
    assert "stopped after step 4; checkpoint at step 5" in said[-1]
    resumed = run(tmp_path / "cut", said=said, checkpoint_every=1000)
    assert "resumed at step 5 of 12" in said
    assert resumed.digests == whole.digests


def test_a_full_disk_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(long_run.checkpoint, "save", full)
    said = Said()
    found = run(tmp_path / "full", said=said)
    assert found.metrics["steps_run"] == 12
    warnings = [line for line in said if line.startswith("WARNING")]
    assert warnings[0] == "WARNING: no checkpoint at step 4: No space left on device; the last is of step 0"
    assert len(warnings) == 3


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for batch files."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_the_record_of_a_run_replays_it(data: Path, tmp_path: Path) -> None:
    first = run(tmp_path / "a")
    (data / "again.batches").write_bytes((tmp_path / "a" / "run.batches").read_bytes())
    again = run(tmp_path / "b", replay="again.batches")
    assert first.digests == again.digests
    # The same offsets written out, as from another training code: the same losses.
    recorded = read_batches(data / "again.batches")
    offsets = np.stack([recorded.offsets(step) for step in range(12)])
    h = recorded.header
    write_explicit(data / "list.batches", offsets, tokens=h.tokens, tokens_sha256=h.tokens_sha256, context=16)
    listed = run(tmp_path / "c", replay="list.batches")
    for name in ("loss", "batches", "weights", "data"):
        assert listed.digests[name] == first.digests[name]
    assert listed.digests["sequence"] != first.digests["sequence"]
    with pytest.raises(UsageError, match=r"12 steps are recorded; params\.steps is 13"):
        run(tmp_path / "d", replay="list.batches", steps=13)
    with pytest.raises(UsageError, match=r"another run: context 16 there, 8 here; batch 4 there, 2 here"):
        run(tmp_path / "d", replay="again.batches", context=8, batch=2)


@pytest.mark.parametrize("kernel", ["sdpa-flash/stock", "eager-fused/stochastic"])
def test_two_runs_give_the_same_losses_bit_for_bit(tmp_path: Path, kernel: str) -> None:
    first = run(tmp_path / "a", kernel, torch.bfloat16)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        second = run(tmp_path / "b", kernel, torch.bfloat16)
    finally:
        torch.set_num_threads(threads)
    assert (first.digests, first.metrics, first.series) == (second.digests, second.metrics, second.series)
    assert run(tmp_path / "c", kernel, torch.bfloat16, seed=1).digests["loss"] != first.digests["loss"]
    # Looking more often changes nothing but the curves.
    often = run(tmp_path / "d", kernel, torch.bfloat16, log_every=1)
    assert often.digests["loss"] == first.digests["loss"]
    assert len(often.series["leak_mean"]) == 12


def test_accumulation_is_the_same_batch_up_to_rounding(tmp_path: Path) -> None:
    one = run(tmp_path / "one", micro_batch=4).series
    four = run(tmp_path / "four", micro_batch=1).series
    assert one["loss"] == pytest.approx(four["loss"], rel=1e-5)
    assert one["gradient_norm"] == pytest.approx(four["gradient_norm"], rel=1e-4)


def test_bf16_trains_in_bf16(tmp_path: Path) -> None:
    """The kernel gets bfloat16 under autocast and float32 without; the losses differ by rounding."""
    seen: set[torch.dtype] = set()

    class Spy(Tripwire):
        def __call__(self, q: Any, *args: Any, **options: Any) -> Any:
            seen.add(q.dtype)
            assert not torch.is_autocast_enabled("cpu")
            return super().__call__(q, *args, **options)

    low = run(tmp_path / "a", Spy(0, cut), torch.bfloat16)
    assert seen == {torch.bfloat16}
    seen.clear()
    high = run(tmp_path / "b", Spy(0, cut))
    assert seen == {torch.float32}
    assert low.digests["loss"] != high.digests["loss"]
    assert low.series["loss"] == pytest.approx(high.series["loss"], rel=1e-3)


def test_a_run_that_diverges_is_a_result(tmp_path: Path) -> None:
    params = {"lr": 1.0, "min_lr": 1.0, "warmup": 1, "steps": 400, "checkpoint_every": 500}
    found = run(tmp_path / "a", **params)
    verdict = CASE.verdict(CASE.Params(**{**SMALL, **params}), found.metrics)
    assert verdict == f"exploded@{found.metrics['crash_step']:.0f}"
    assert found.metrics["steps_run"] < 400
    assert found.series["step"][-1] == found.metrics["steps_run"] - 1, "the last step is looked at"


def test_a_nan_loss_is_an_explosion_and_training_goes_on_if_asked(tmp_path: Path) -> None:
    class Nan(Tripwire):
        def __call__(self, *args: Any, **options: Any) -> Any:
            o = super().__call__(*args, **options)
            return o * math.nan if self.calls > 20 else o

    found = run(tmp_path / "a", Nan(0, cut))
    assert found.metrics["crash_step"] == 4
    assert found.metrics["steps_run"] == 5
    assert math.isnan(found.metrics["last_loss"])
    on = run(tmp_path / "b", Nan(0, cut), stop_when_exploded=False)
    assert (on.metrics["crash_step"], on.metrics["steps_run"]) == (4, 12)


def test_a_kernel_that_takes_no_wider_head_is_trained_without_leak(tmp_path: Path) -> None:
    class Narrow(Tripwire):
        def __call__(self, q: Any, *args: Any, **options: Any) -> Any:
            if q.shape[-1] != 8:
                raise Unsupported(f"head_dim {q.shape[-1]}")
            return super().__call__(q, *args, **options)

    found = run(tmp_path / "a", Narrow(0, cut))
    assert "leak_mean" not in found.series
    assert found.facts["no_leak"] == "head_dim 16"
    assert found.digests["loss"] == run(tmp_path / "b").digests["loss"]


def inputs_digest(known: dict[str, str] | None = None, **change: Any) -> str:
    """The digest of a run on the bundled text, with what else a row knows or without."""
    problem = CASE.problem(CASE.Params(**{**SMALL, **change}), torch.float32, 1)
    return CASE.inputs_digest(problem, known or {})


def test_metrics_curves_digests_and_facts(tmp_path: Path) -> None:
    found = run(tmp_path / "a")
    assert found.series["step"] == [0, 4, 8]
    assert found.series["loss"][0] == pytest.approx(math.log(64), abs=0.1)
    assert {len(curve) for curve in found.series.values()} == {3}
    assert {"w_q_norm_1", "leak_mean_1", "leak_abs_0", "lr", "row_max_abs"} <= found.series.keys()
    assert {"leak_coherence", "leak_coherence_1", "w_k_norm_0", "best_loss"} <= found.metrics.keys()
    assert found.digests.keys() == set(CASE.outputs)
    assert inputs_digest(found.digests) == inputs_digest()
    assert found.facts["processes"] == 1
    assert found.facts["tokens_per_s"] > 0


def test_a_speed_that_was_not_measured_is_left_out(tmp_path: Path) -> None:
    assert "tokens_per_s" not in run(tmp_path / "a", steps=1).facts


def test_the_digest_covers_every_input() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"steps": 13},
        {"width": 32},
        {"heads": 1},
        {"batch": 2},
        {"layers": 1},
        {"context": 8},
        {"vocabulary": 65},
    ]
    digests = {inputs_digest(**change) for change in changes}
    assert len(digests) == len(changes)
    how = {"lr": 1e-4, "micro_batch": 4, "checkpoint_every": 1}
    assert inputs_digest(**how) in digests


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"heads": 3}, "heads: 3 does not divide width 16"),
        ({"micro_batch": 3}, "does not divide batch 4"),
        ({"width": 512, "heads": 1}, "at most 255"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"data": ""}, "data"),
        ({"data_sha256": "abc"}, "data_sha256"),
        ({"lr": 0}, "lr"),
    ],
)
def test_parameters_are_strict(params: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        CASE.Params(**{**SMALL, **params})


def test_what_it_cannot_train_is_said() -> None:
    kernel, params = KERNELS["sdpa-flash/stock"], CASE.Params(**SMALL)
    with pytest.raises(Unsupported, match="float32"):
        CASE.run(kernel, CPU, CASE.problem(params, torch.float16, 1))
    with pytest.raises(UsageError, match=r"list params\.seed"):
        CASE.run(kernel, CPU, CASE.problem(params, torch.float32, 3))


def test_progress_says_step_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("cases.crash.gpt2.progress.time.monotonic", lambda: now)
    said = Said()
    progress = Progress(1000, 4096, said)
    for step in range(41):
        progress.step(step, 3.5, 0.25, 20)
        now += 1.0
    assert said == [
        "step 0/1000  loss 3.5000  gradient norm 0.25  – tokens/s  ETA –  checkpoint at step 20",
        "step 30/1000  loss 3.5000  gradient norm 0.25  4.1k tokens/s  ETA 16 min  checkpoint at step 20",
    ]
    assert progress.tokens_per_s == 4096
    assert [duration(s) for s in (4.2, 61, 3599, 22_000)] == [
        "4 s",
        "1 min",
        "1 h 00 min",
        "6 h 07 min",
    ]
