"""`crash/gpt2`: token files, batch sequences, the recipe, the loop; cut, resumed, signalled, without space."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
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
from bench.inputs import key_of, raw_words
from bench.registry import load_case
from cases.base import Measurement, Workspace
from cases.crash.gpt2 import checkpoint, loop
from cases.crash.gpt2.batches import (
    CounterBatches,
    ExplicitBatches,
    chained,
    counter_header,
    read_batches,
    share,
    words_from,
    write_counter,
    write_explicit,
)  # fmt: skip
from cases.crash.gpt2.data import FOLDER_VARIABLE, bundled, open_tokens
from cases.crash.gpt2.optimizer import Recipe, optimizers
from cases.crash.gpt2.signals import WIDTHS, probe, weight_norms
from cases.crash.language import LENGTH, tokens
from cases.crash.model import GPT, Size, fresh_model

CPU = CpuBackend()
KERNELS = CPU.kernels()
CASE: Any = load_case("crash/gpt2")
SMALL: dict[str, Any] = {
    "steps": 12, "layers": 2, "heads": 2, "width": 16, "context": 16, "batch": 4, "micro_batch": 2,
    "warmup": 4, "decay_steps": 12, "log_every": 4, "checkpoint_every": 4,
}  # fmt: skip
SHA = "0" * 64


class Said(list[str]):
    """What a run said."""

    def __call__(self, text: str) -> None:
        self.append(text)


def run(
    folder: Path, kernel: Kernel | str = "sdpa-flash/stock", dtype: torch.dtype = torch.float32,
    said: Said | None = None, **params: Any,
) -> Measurement:  # fmt: skip
    chosen = KERNELS[kernel] if isinstance(kernel, str) else kernel
    values = CASE.Params(**{**SMALL, **params})
    workspace = Workspace(folder, Said() if said is None else said)
    with CPU.deterministic():
        found: Measurement = CASE.run_in(workspace, chosen, CPU, values, dtype, 1)
    return found


# ---- token files ------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for token files, with `text.bin`: the bundled text as nanoGPT would store it."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    tokens().numpy().astype("<u2").tofile(folder / "text.bin")
    return folder


def open_it(
    name: str, vocabulary: int = 64, sha256: str | None = None, said: Said | None = None
) -> Any:
    return open_tokens(name, 16, vocabulary, sha256, Said() if said is None else said)


def test_a_file_of_the_bundled_text_is_the_bundled_text(data: Path) -> None:
    found, inside = open_it("text.bin"), open_it("bundled")
    assert found.sha256 == inside.sha256 == bundled()[1].sha256
    assert found.sha256 == "341817b6980677beed921f82e780e707c372fa1c7ec8acfa335489b3a894e40a"
    rows = found.rows(np.array([5, LENGTH - 17]), 17)
    assert (rows.shape, rows.dtype) == ((2, 17), np.int64)
    assert rows[0].tolist() == tokens()[5:22].tolist()


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        (b"\0" * 101, "x.bin", "101 bytes, an odd number"),
        (b"\0" * 32, "x.bin", "16 tokens; a context of 16 needs at least 17"),
        (b"", "x.bin", "0 tokens"),
        (b"\0" * 40 + b"\x40\0" + b"\x50\0", "x.bin", "id 80 at token 21; a vocabulary of 64 has ids 0 to 63"),
        (b"\0" * 40, "y.bin", "no such file"),
        (b"\0" * 40, "../x.bin", "relative"),
        (b"\0" * 40, "/x.bin", "relative"),
    ],
)  # fmt: skip
def test_bad_token_files_are_named(data: Path, content: bytes, name: str, expected: str) -> None:
    (data / "x.bin").write_bytes(content)
    with pytest.raises(UsageError, match="data: ") as caught:
        open_it(name)
    assert expected in str(caught.value)


def test_another_file_than_the_one_asked_for_is_refused(data: Path) -> None:
    right = open_it("text.bin").sha256
    assert open_it("text.bin", sha256=right).sha256 == right
    with pytest.raises(UsageError, match=f"data_sha256: {SHA} is asked for"):
        open_it("text.bin", sha256=SHA)


def test_a_file_is_read_once_and_again_when_it_changed(data: Path) -> None:
    first, second, third = Said(), Said(), Said()
    before = open_it("text.bin", said=first).sha256
    assert open_it("text.bin", said=second).sha256 == before
    assert (len(first), len(second)) == (1, 0)
    (data / "text.bin").write_bytes(b"\1\0" * 40)
    assert open_it("text.bin", said=third).sha256 != before
    assert len(third) == 1
    (data / "text.bin.facts").write_text("{}")
    assert open_it("text.bin").sha256 != before, "a damaged note is not believed"


# ---- batch sequences --------------------------------------------------------------------------


def header(batch: int = 6, length: int = 1000, context: int = 16) -> Any:
    return counter_header("crash/gpt2", 3, length, SHA, context, batch)


def test_offsets_are_words_of_the_stream_times_starts() -> None:
    batches = CounterBatches(header())
    words = raw_words(key_of("crash/gpt2/3/batches"), 60)
    expected = [(int(word) * 984) >> 64 for word in words]
    assert [int(o) for step in range(10) for o in batches.offsets(step)] == expected
    for start in range(9):
        assert words_from(5, start, 7).tolist() == raw_words(5, 16)[start : start + 7].tolist()


def test_a_file_of_more_than_four_billion_tokens_is_used_to_its_end() -> None:
    batches = CounterBatches(header(batch=1000, length=9_035_582_198, context=1024))
    offsets = batches.offsets(0)
    assert offsets.min() >= 0
    assert 2**33 < offsets.max() < 9_035_581_174


def test_ranks_and_micro_batches_take_all_of_a_step_in_order() -> None:
    offsets = np.arange(24)
    for size in (1, 2, 3, 4):
        parts = [share(offsets, rank, size, 2) for rank in range(size)]
        assert {part.shape for part in parts} == {(12 // size, 2)}
        assert np.concatenate([part.ravel() for part in parts]).tolist() == offsets.tolist()


def test_recorded_sequences_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.batches"
    write_counter(path, header())
    assert path.stat().st_size < 500
    counted = read_batches(path)
    assert isinstance(counted, CounterBatches)
    offsets = np.stack([counted.offsets(step) for step in range(5)])
    written = write_explicit(path, offsets, tokens=1000, tokens_sha256=SHA, context=16)
    explicit = read_batches(path)
    assert isinstance(explicit, ExplicitBatches)
    assert explicit.header == written
    assert path.read_bytes().endswith(offsets.astype("<u8").tobytes())
    assert all((explicit.offsets(s) == offsets[s]).all() for s in range(5))
    assert explicit.header.identity() != counted.header.identity()


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b[:-8], "232 bytes of offsets; 5 steps of 6 are 240"),
        (lambda b: b[:-1] + b"\1", "offsets_sha256 does not match"),
        (lambda b: b[50:], "not a batch file"),
        (lambda b: b"", "not a batch file"),
        (lambda b: b.replace(b'"batch": 6', b'"batch": 6, "more": 1'), "unknown key"),
        (lambda b: b.replace(b'"context": 16', b'"context": 0'), "context"),
        (lambda b: b.replace(b'"tokens": 1000', b'"tokens": 500 '), "offset 9"),
    ],
)
def test_bad_batch_files_are_named(tmp_path: Path, change: Any, expected: str) -> None:
    path = tmp_path / "run.batches"
    offsets = np.arange(900, 930).reshape(5, 6)
    write_explicit(path, offsets, tokens=1000, tokens_sha256=SHA, context=16)
    damage(path, change)
    with pytest.raises(UsageError, match="replay: ") as caught:
        read_batches(path)
    assert expected in str(caught.value)
    with pytest.raises(UsageError, match="no such file"):
        read_batches(tmp_path / "none")


def test_the_record_of_a_run_replays_it(data: Path, tmp_path: Path) -> None:
    first = run(tmp_path / "a")
    (data / "again.batches").write_bytes((tmp_path / "a" / "run.batches").read_bytes())
    again = run(tmp_path / "b", replay="again.batches")
    assert first.digests == again.digests
    # The same offsets written out, as from another training code: the same losses.
    recorded = read_batches(data / "again.batches")
    offsets = np.stack([recorded.offsets(step) for step in range(12)])
    h = recorded.header
    write_explicit(
        data / "list.batches", offsets, tokens=h.tokens, tokens_sha256=h.tokens_sha256, context=16
    )
    listed = run(tmp_path / "c", replay="list.batches")
    for name in ("loss", "batches", "weights", "data"):
        assert listed.digests[name] == first.digests[name]
    assert listed.digests["sequence"] != first.digests["sequence"]
    with pytest.raises(UsageError, match=r"12 steps are recorded; params\.steps is 13"):
        run(tmp_path / "d", replay="list.batches", steps=13)
    with pytest.raises(
        UsageError, match=r"another run: context 16 there, 8 here; batch 4 there, 2 here"
    ):
        run(tmp_path / "d", replay="again.batches", context=8, batch=2)


def test_a_chain_tells_every_sequence_apart() -> None:
    a, b = np.array([1, 2]), np.array([3, 4])
    assert chained(chained(SHA, a), b) != chained(chained(SHA, b), a)


# ---- recipe and model -------------------------------------------------------------------------


def test_learning_rate_of_the_paper() -> None:
    recipe = Recipe()
    assert recipe.lr_at(0) == pytest.approx(1e-3 / 2000)
    assert recipe.lr_at(1999) == pytest.approx(1e-3)
    assert recipe.lr_at(2000) == pytest.approx(1e-3)
    assert recipe.lr_at(301_000) == pytest.approx((1e-3 + 1e-5) / 2)
    assert recipe.lr_at(600_000) == recipe.lr_at(900_000) == pytest.approx(1e-5)


def test_muon_takes_the_matrices_of_the_blocks_alone() -> None:
    model = GPT(Size(layers=2, width=16, heads=2))
    (alone,) = optimizers(model, Recipe())
    assert isinstance(alone, torch.optim.AdamW)
    adamw, muon = optimizers(model, Recipe(optimizer="muon"))
    assert isinstance(muon, torch.optim.Muon)
    of_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in of_muon}
    assert names == {
        f"blocks.{i}.{w}" for i in (0, 1) for w in ("w_q", "w_k", "w_v", "w_o", "w_1", "w_2")
    }
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
        h = F.layer_norm(
            F.embedding(ids, model.embedding) + model.positions, (12,), block.norm_attention
        )
    for x, w in zip(seen["qkv"], (block.w_q, block.w_k, block.w_v), strict=True):
        assert x.shape == (1, 3, 8, 4)
        torch.testing.assert_close(x[0, 1], h[0] @ w[4:8].T)


# ---- signals ----------------------------------------------------------------------------------


def test_the_probe_reads_rowsum_ds() -> None:
    """Against the formula: δ error = rowsum(dP∘P) − rowsum(dO∘O), with the kernel's rounded O."""
    model = fresh_model("x", Size(1, 32, 24, mlp_ratio=4, heads=2), 0)
    kernel = KERNELS["eager-ladder/stock"].configure(mantissa_bits=3)
    kept: dict[str, Any] = {}

    def attend(layer: int, q: Any, k: Any, v: Any, scale: float) -> Any:
        o = kernel(q, k, v, causal=True, scale=scale)
        o.retain_grad()
        kept.update(q=q.detach(), k=k.detach(), v=v.detach(), o=o, scale=scale)
        return o

    ids = tokens()[:50].reshape(2, 25)
    point = probe(model, ids, attend, torch.autocast("cpu", enabled=False))
    assert kept["q"].shape == (2, 2, 24, 32), "16 channels, and the next width"
    # The same pass again with gradients kept, for dO.
    logits = model(ids[:, :-1], lambda layer, q, k, v: attend(layer, q, k, v, 0.25))
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    q, k, v = (kept[n].double() for n in ("q", "k", "v"))
    o, do = kept["o"].detach().double(), kept["o"].grad.double()
    s = (0.25 * q @ k.mT).masked_fill(torch.ones(24, 24).triu(1).bool(), -math.inf)
    p, dp = s.softmax(-1), do @ v.mT
    leak = (p * dp).sum(-1) - (do * o).sum(-1)
    assert point["leak_mean"] == pytest.approx(float(leak.mean()), rel=1e-3)
    assert point["leak_abs_0"] == pytest.approx(float(leak.abs().mean()), rel=1e-3)
    assert point["row_max_abs"] == pytest.approx(float(s.amax(-1).abs().max()), rel=1e-5)
    assert point["leak_abs"] > 1e-7


def test_every_head_has_a_wider_one() -> None:
    assert all(any(width > head_dim for width in WIDTHS) for head_dim in range(1, 256))


def test_weight_norms_are_spectral_and_nan_where_a_weight_is() -> None:
    model = fresh_model("x", Size(2, 16, heads=2), 0)
    with torch.no_grad():
        model.blocks[0].w_q.copy_(torch.diag(torch.arange(16.0)))
        model.blocks[1].w_k[0, 0] = math.inf
    norms = weight_norms(model.blocks)
    assert norms["w_q_norm_0"] == pytest.approx(15)
    assert math.isnan(norms["w_k_norm_1"])
    assert math.isfinite(norms["w_q_norm_1"])


# ---- checkpoints ------------------------------------------------------------------------------

RUN = {"lr": 1e-3, "kernel": "a/b", "beta": None}


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint.save(
            folder, step, RUN, {"x": torch.full((1000,), float(step)), "n": [step, "a"]}
        )


def load(folder: Path, run: dict[str, Any] = RUN) -> tuple[checkpoint.Checkpoint | None, Said]:
    said = Said()
    return checkpoint.load(folder, run, said), said


def test_a_checkpoint_reads_back_and_the_one_before_is_kept(tmp_path: Path) -> None:
    assert load(tmp_path) == (None, [])
    save(tmp_path, 4, 8)
    found, said = load(tmp_path)
    assert found is not None
    assert (found.step, found.state["n"], said) == (8, [8, "a"], [])
    assert torch.equal(found.state["x"], torch.full((1000,), 8.0))
    assert {p.name for p in tmp_path.iterdir()} == {checkpoint.CURRENT, checkpoint.PREVIOUS}


@pytest.mark.parametrize(
    "change",
    [lambda b: b[:-100], lambda b: b[:3000] + b"x" + b[3001:], lambda b: b"", lambda b: b[5:]],
    ids=["truncated", "flipped", "empty", "beheaded"],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, change: Any) -> None:
    save(tmp_path, 4, 8)
    damage(tmp_path / checkpoint.CURRENT, change)
    found, said = load(tmp_path)
    assert found is not None
    assert found.step == 4
    assert checkpoint.CURRENT in said[0]
    assert checkpoint.PREVIOUS in said[1]
    assert "step 4" in said[1]
    damage(tmp_path / checkpoint.PREVIOUS, change)
    with pytest.raises(UsageError, match="no checkpoint is whole"):
        load(tmp_path)


def test_a_cut_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 4, 8)
    os.replace(tmp_path / checkpoint.CURRENT, tmp_path / checkpoint.PREVIOUS)
    found, said = load(tmp_path)
    assert found is not None
    assert found.step == 8
    assert "going on from the checkpoint before" in said[0]


def test_a_checkpoint_of_another_run_is_refused_with_the_differing_keys(tmp_path: Path) -> None:
    save(tmp_path, 4)
    with pytest.raises(UsageError, match="another run") as caught:
        load(tmp_path, {**RUN, "lr": 2e-3, "seed": 1})
    assert "lr is 0.001 there, 0.002 here; seed is None there, 1 here" in str(caught.value)
    assert "kernel" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_full_disk_leaves_both_checkpoints_as_they_were(tmp_path: Path) -> None:
    import resource

    save(tmp_path, 4, 8)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path, 12)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    checkpoint.save(tmp_path, 4, RUN, {"x": Evil()})
    with pytest.raises(Exception, match=r"Weights only"):
        load(tmp_path)
    assert not (tmp_path / "evil").exists()


# ---- the loop ---------------------------------------------------------------------------------


class Tripwire:
    """A kernel that does something at its n-th call and is otherwise the one inside."""

    def __init__(self, at: int, action: Callable[[], None], name: str = "sdpa-flash/stock"):
        self.inner, self.at, self.action, self.calls = KERNELS[name], at, action, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

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

    monkeypatch.setattr(loop.checkpoint, "save", full)
    said = Said()
    found = run(tmp_path / "full", said=said)
    assert found.metrics["steps_run"] == 12
    warnings = [line for line in said if line.startswith("WARNING")]
    assert (
        warnings[0]
        == "WARNING: no checkpoint at step 4: No space left on device; the last is of step 0"
    )
    assert len(warnings) == 3


@pytest.mark.parametrize("kernel", ["sdpa-flash/stock", "eager-fused/stochastic"])
def test_two_runs_give_the_same_losses_bit_for_bit(tmp_path: Path, kernel: str) -> None:
    first = run(tmp_path / "a", kernel, torch.bfloat16)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        second = run(tmp_path / "b", kernel, torch.bfloat16)
    finally:
        torch.set_num_threads(threads)
    assert (first.digests, first.metrics, first.series) == (
        second.digests, second.metrics, second.series
    )  # fmt: skip
    assert (
        run(tmp_path / "c", kernel, torch.bfloat16, seed=1).digests["loss"] != first.digests["loss"]
    )
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


def test_metrics_curves_digests_and_facts(tmp_path: Path) -> None:
    found = run(tmp_path / "a")
    assert found.series["step"] == [0, 4, 8]
    assert found.series["loss"][0] == pytest.approx(math.log(64), abs=0.1)
    assert {len(curve) for curve in found.series.values()} == {3}
    assert {"w_q_norm_1", "leak_mean_1", "leak_abs_0", "lr", "row_max_abs"} <= found.series.keys()
    assert {"leak_coherence", "leak_coherence_1", "w_k_norm_0", "best_loss"} <= found.metrics.keys()
    assert found.digests.keys() == {"inputs", *CASE.outputs}
    assert found.digests["inputs"] == CASE.inputs_digest(CASE.Params(**SMALL), torch.float32, 1)
    assert found.facts["processes"] == 1
    assert found.facts["tokens_per_s"] > 0


def test_the_digest_covers_every_input() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"seed": 1}, {"steps": 13}, {"width": 32}, {"heads": 1}, {"batch": 2}, {"layers": 1},
        {"context": 8}, {"vocabulary": 65},
    ]  # fmt: skip
    digests = {CASE.inputs_digest(CASE.Params(**{**SMALL, **c}), torch.float32, 1) for c in changes}
    assert len(digests) == len(changes)
    how = {"lr": 1e-4, "micro_batch": 4, "checkpoint_every": 1}
    assert CASE.inputs_digest(CASE.Params(**{**SMALL, **how}), torch.float32, 1) in digests


@pytest.mark.parametrize(
    ("params", "match"),
    [({"heads": 3}, "heads: 3 does not divide width 16"), ({"micro_batch": 3}, "does not divide batch 4"),
     ({"width": 512, "heads": 1}, "at most 255"), ({"optimizer": "sgd"}, "optimizer"),
     ({"data": "/x/y.bin"}, "data"), ({"replay": "a b"}, "replay"), ({"lr": 0}, "lr")],
)  # fmt: skip
def test_parameters_are_strict(params: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        CASE.Params(**{**SMALL, **params})


def test_what_it_cannot_train_is_said() -> None:
    kernel, params = KERNELS["sdpa-flash/stock"], CASE.Params(**SMALL)
    with pytest.raises(Unsupported, match="float32"):
        CASE.run(kernel, CPU, params, torch.float16, 1)
    with pytest.raises(UsageError, match=r"list params\.seed"):
        CASE.run(kernel, CPU, params, torch.float32, 3)
