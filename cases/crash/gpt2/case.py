"""`crash/gpt2`: does GPT-2, trained as in the paper, blow up with this attention?"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator

from backends.base import Backend, Call, Kernel, Unsupported
from bench.errors import UsageError
from bench.files.records import Sha256, dumps
from bench.files.source import source_sha256
from cases.algorithms import algorithms, one_thread
from cases.base import Case, CaseParams, Measurement, Metrics, Problem, Workspace
from cases.crash.gpt2.batches import (
    Batches,
    CounterBatches,
    Header,
    check_replay,
    counter_header,
    read_batches,
    write_counter,
)
from cases.crash.gpt2.checkpoint import Fingerprint
from cases.crash.gpt2.data import BUNDLED, Say, Tokens, bundled, check_tokens, data_path, open_tokens
from cases.crash.gpt2.long_run import Keeper, train_long
from cases.crash.gpt2.trainer import TokenTrainer
from cases.crash.training.log import TrainingLog
from cases.crash.training.loop import Watch
from cases.crash.training.model import GPT, Size, hash_weights, initial_weights
from cases.crash.training.outcome import leak_of_curves, run_metrics, training_verdict
from cases.crash.training.recipe import Recipe
from cases.headline import Headline
from cases.processes import from_main, together, world

MANY_WEIGHTS = 10_000_000  # beyond this, making them takes seconds and is said
RECORD = "run.batches"  # the run's own record of its batch sequence, beside the checkpoints


class Params(CaseParams):
    """One training run. The defaults are a tiny model on the bundled text; the configs `gpt2-124m` and
    `gpt2-350m` spell out the paper's recipe."""

    seed: Annotated[int, Field(ge=0, lt=1024)] = 0  # of the weights, the batches, random rounding
    steps: Annotated[int, Field(ge=1, le=1_000_000)] = 60
    data: Annotated[str, Field(min_length=1, max_length=200)] = BUNDLED  # or a token file
    data_sha256: Sha256 | None = None  # refuse another token file than this
    replay: Annotated[str, Field(min_length=1, max_length=200)] | None = None  # a batch file
    layers: Annotated[int, Field(ge=1, le=48)] = 2
    heads: Annotated[int, Field(ge=1, le=32)] = 2
    width: Annotated[int, Field(ge=8, le=2048)] = 64
    context: Annotated[int, Field(ge=8, le=4096)] = 64
    vocabulary: Annotated[int, Field(ge=2, le=65536)] = 64
    batch: Annotated[int, Field(ge=1, le=65536)] = 8  # sequences a step, over all processes
    micro_batch: Annotated[int, Field(ge=1, le=1024)] = 4  # sequences a forward pass
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: Annotated[float, Field(gt=0, le=1)] = 3e-3
    min_lr: Annotated[float, Field(ge=0, le=1)] = 3e-5
    warmup: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    decay_steps: Annotated[int, Field(ge=1, le=10_000_000)] = 60
    log_every: Annotated[int, Field(ge=1, le=100_000)] = 10  # steps between two looks
    checkpoint_every: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    stop_when_exploded: bool = True

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads: {self.heads} does not divide width {self.width}")
        if self.width // self.heads >= 256:
            raise ValueError(f"heads: {self.heads}: head_dim {self.width // self.heads}, at most 255")
        if self.batch % self.micro_batch:
            raise ValueError(f"micro_batch: {self.micro_batch} does not divide batch {self.batch}")
        return self

    @property
    def size(self) -> Size:
        return Size(
            self.layers, self.width, self.context, mlp_ratio=4, vocabulary=self.vocabulary, heads=self.heads
        )

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            self.steps,
            self.batch,
            self.lr,
            self.warmup,
            schedule="cosine",
            min_lr=self.min_lr,
            decay_steps=self.decay_steps,
            optimizer=self.optimizer,
        )


class Gpt2(Case[Params]):
    """Claim (arXiv 2510.04212): GPT-2 small trained in BF16 with flash attention explodes after several
    thousand steps, and does not when δ is right. The paper's batches were never published; here they
    are a function of the seed, or of a recorded file.

    Inputs: GPT-2 (learned positions, pre-norm LayerNorm and linear layers without bias, GELU, tied head;
    weights from integers) on a uint16 token file or the bundled text. dtype bfloat16 trains under
    autocast, float32 without. One row is one run of hours: it keeps checkpoints, can be cut anywhere,
    and runs on any number of processes (torchrun). Set-up and files: docs/gpt2.md.

    Metrics: `crash_step` by the rule of `cases.crash.training.detector`, one log a step (inf: none),
    `steps_run`, `spikes`, `best_loss` (moving average), `last_loss`, `gradient_norm_last`; the leak
    rowsum(dS) of an extra pass in logged steps (`leak_mean`, `leak_coherence` = Σ leak / Σ |leak|, also by
    layer), max |row-max score|, share of repeated maxima, ‖W_Q‖₂ and ‖W_K‖₂ of each layer. Digests: `loss`
    (float32 losses of all steps), `weights` (initial), `batches` (offsets of all steps), `data` (token file).

    Verdict: `exploded@STEP`, `stable@STEPS`, or `spike`, as in `crash/ladder`.
    """

    name = "crash/gpt2"
    long = True
    outputs = ("loss", "weights", "batches", "data", "sequence")
    headline = Headline("best_loss", "best loss, nats", "{:.2f}")

    def values(self, params: Params) -> int:
        """None that a reader must make again: the digest names weights and batches by their streams."""
        return 0

    def check(self, params: Params, seeds: int) -> None:
        """Refuse what can be refused before anything runs. Raises UsageError."""
        if seeds != 1:
            raise UsageError("one row is one training run: set seeds to 1 and list params.seed")
        check_tokens(params.data, params.context)
        if params.replay is not None:
            read_batches(data_path(params.replay, "replay"))
        if params.batch % (params.micro_batch * world().size):
            raise UsageError(
                f"batch: {params.batch} sequences a step do not divide among {world().size} processes "
                f"in micro-batches of {params.micro_batch}; the product must divide the batch"
            )

    def run(self, kernel: Kernel, backend: Backend, problem: Problem[Params]) -> Measurement:
        """A run without a place for checkpoints: short ones only."""
        with tempfile.TemporaryDirectory() as folder:
            return self.run_in(Workspace(Path(folder), lambda text: None), kernel, backend, problem)

    def run_in(
        self, workspace: Workspace, kernel: Kernel, backend: Backend, problem: Problem[Params]
    ) -> Measurement:
        """Train from the last checkpoint in the workspace on. Raises UsageError for bad input."""
        params, dtype = problem.params, problem.dtype
        if dtype not in (torch.bfloat16, torch.float32):
            raise Unsupported("trains in bfloat16 (autocast) or float32: set params.dtype to one")
        self.check(params, problem.seeds)
        say: Say = workspace.say if world().is_main else lambda text: None
        text = (params.data, params.context, params.vocabulary, params.data_sha256)
        tokens = together(lambda: open_tokens(*text, say))
        batches = together(lambda: _batches(self.name, params, tokens))
        if world().is_main:
            workspace.folder.mkdir(parents=True, exist_ok=True)
            if params.replay is None:
                write_counter(workspace.folder / RECORD, batches.header)
        stop = params.stop_when_exploded
        watch = Watch(params.log_every, stop_after_explosion=stop, look_at_explosion=True)
        stream = (self.name, params.seed)
        with one_thread(), algorithms(deterministic=True):
            model, weights = _model(self.name, params, backend.device, say)
            fingerprint = _fingerprint(problem, kernel, tokens, batches.header, weights)
            trainer = TokenTrainer(
                model, kernel, params.recipe, stream, dtype, tokens, batches, params.micro_batch
            )
            keeper = Keeper(trainer, workspace.folder, fingerprint, params.checkpoint_every, say)
            log = train_long(keeper, watch)
        metrics = run_metrics(log) | leak_of_curves(log.curves)
        digests = {
            "loss": log.loss_digest(),
            "weights": weights,
            "batches": log.batches,
            "data": tokens.sha256,
            "sequence": batches.header.identity(),
        }
        return Measurement(metrics, digests, log.curves, _facts(params, tokens, log))

    def call(self, problem: Problem[Params], device: torch.device) -> Call:
        """Attention of one layer of a micro-batch."""
        size = problem.params.size
        shape = (problem.params.micro_batch, size.heads, size.context, size.head_dim)
        return Call(shape, shape, problem.dtype, device, causal=True)

    def external_inputs(self, params: Params) -> list[str]:
        """Files that a reader does not have; a row's digests `data` and `sequence` stand for them."""
        token_file = [] if params.data == BUNDLED else [f"data '{params.data}'"]
        return token_file + ([f"replay '{params.replay}'"] if params.replay else [])

    def inputs_digest(self, problem: Problem[Params], digests: Mapping[str, str]) -> str:
        """From parameters alone, but for files outside the suite: their recorded sha256."""
        params = problem.params
        data = bundled()[1].sha256 if params.data == BUNDLED else digests.get("data", "")
        sequence = digests.get("sequence", "")
        if params.replay is None:  # length and sha256 of the tokens are not part of the identity
            header = counter_header(self.name, params.seed, 2, "0" * 64, params.context, params.batch)
            sequence = header.identity()
        weights = {"generator": "bench.inputs.normal", "seed": params.seed, **vars(params.size)}
        made_from = {"data": data, "sequence": sequence, "steps": params.steps, "weights": weights}
        return hashlib.sha256(dumps(made_from).encode()).hexdigest()

    def verdict(self, params: Params, metrics: Metrics) -> str:
        return training_verdict(metrics)


def _batches(name: str, params: Params, tokens: Tokens) -> Batches:
    """The run's own random sequence, or the recorded one that it is to replay."""
    own = counter_header(name, params.seed, len(tokens.ids), tokens.sha256, params.context, params.batch)
    if params.replay is None:
        return CounterBatches(own)
    path = data_path(params.replay, "replay")
    recorded = read_batches(path)
    check_replay(recorded.header, own, params.steps, path)
    return recorded


def _model(name: str, params: Params, device: torch.device, say: Say) -> tuple[GPT, str]:
    """The fresh model on the device, and the sha256 of its weights.

    Rank 0 makes them; DistributedDataParallel hands them to the other ranks.
    """
    model, h = GPT(params.size), hashlib.sha256()
    if world().is_main:
        count = sum(p.numel() for p in model.parameters())
        if count > MANY_WEIGHTS:
            say(f"making {count / 1e6:.0f} million weights from integers")
        made = initial_weights(name, params.size, params.seed)
        model.load_state_dict(dict(made))
        hash_weights(h, made)
    return model.to(device), from_main(h.hexdigest())


def _fingerprint(
    problem: Problem[Params], kernel: Kernel, tokens: Tokens, header: Header, weights: str
) -> Fingerprint:
    """Everything that decides the run's bits: what its checkpoints are known by."""
    params = problem.params.model_dump(exclude={"data_sha256", "checkpoint_every"})
    options = {f"option_{k}": v for k, v in kernel.options.model_dump().items()}
    return {
        **params,
        **options,
        "kernel": kernel.name,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "data_bytes": tokens.sha256,
        "sequence": header.identity(),
        "weights": weights,
        "world_size": world().size,
        "torch": torch.__version__,
        "case_version": Gpt2.version,
        "source": source_sha256(),
    }


def _facts(params: Params, tokens: Tokens, log: TrainingLog) -> dict[str, Any]:
    """How it was run: kept with the row, never compared."""
    facts: dict[str, Any] = {
        "processes": world().size,
        "micro_batch": params.micro_batch,
        "data_tokens": len(tokens.ids),
    }
    if not math.isnan(log.tokens_per_s):  # NaN: this process did but the step that is not timed
        facts["tokens_per_s"] = round(log.tokens_per_s, 1)
    return facts | ({"no_leak": log.no_leak} if log.no_leak else {})
