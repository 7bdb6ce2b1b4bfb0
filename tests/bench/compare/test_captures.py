"""Two captures: known differences are measured as known, both are held against FP64, bad files are named."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

import runner
from backends.cpu import CpuBackend
from bench.compare.captures import (
    Capture,
    against_fp64,
    compare_captures,
    pair_metrics,
    read_capture,
)
from bench.compare.captures_text import captures_text
from bench.errors import UsageError
from bench.measure.inputs import Inputs, key_of, normal
from bench.measure.metrics import output_metrics
from bench.measure.numerics import FORMATS
from bench.measure.reference import attention_reference
from cases.passes import forward_backward

BACKEND = CpuBackend()


def inputs(causal: bool = True) -> Inputs:
    shapes = ((2, 4, 24, 16), (2, 2, 20, 16), (2, 2, 20, 16), (2, 4, 24, 16))
    arrays = (normal(key_of("capture", i), shape) for i, shape in enumerate(shapes))
    return Inputs.quantized(torch.bfloat16, *arrays, causal=causal)


def tensors(kernel: str, x: Inputs) -> dict[str, Tensor]:
    k = BACKEND.kernels()[kernel]
    grads = forward_backward(k, BACKEND, x)
    found = {"q": x.q, "k": x.k, "v": x.v, "do": x.do, **vars(grads)}
    lse = k.forward(x.q, x.k, x.v, causal=x.causal, scale=x.scale).lse
    return found if lse is None else found | {"lse": lse}


def save(path: Path, found: dict[str, Tensor], **metadata: str) -> Path:
    contiguous = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}
    save_file(contiguous, path, metadata={"causal": "true"} | metadata)
    return path


def test_known_differences() -> None:
    a = torch.tensor([1.0, -1.0, 2.0, 4.0, 0.0])
    b = torch.tensor([1.0005, -1.002, 2.02, 4.0, 0.0])
    found = pair_metrics(a, b)
    x, y = a.double(), b.double()
    assert found["cosine"] == pytest.approx(float(x @ y / (x.norm() * y.norm())), abs=1e-15)
    assert found["max_abs"] == pytest.approx(0.02, rel=1e-6)
    assert found["max_rel"] == pytest.approx(0.01, rel=1e-6)
    assert (found["below_1_per_mille"], found["below_5_per_mille"]) == (0.6, 0.8)
    assert found["bias"] == pytest.approx((0.0005 + 0.002 + 0.02) / 8, rel=1e-4)
    assert pair_metrics(b, a)["bias"] < 0
    assert found["equal"] is False


def test_one_ulp_away_from_zero_is_a_bias_of_one_ulp() -> None:
    a = torch.tensor([1.0, -3.0, 0.5, -100.0]).bfloat16()
    b = (a.view(torch.int16) + 1).view(torch.bfloat16)
    assert pair_metrics(a, b)["bias_ulp"] == 1.0


def test_zeros_nans_and_infinities() -> None:
    found = pair_metrics(torch.tensor([0.0, 1.0, math.nan]), torch.tensor([1.0, math.inf, math.nan]))
    assert (found["nonfinite"], found["nonfinite_a"], found["nonfinite_b"]) == (2, 1, 2)
    assert found["max_rel"] == math.inf
    assert math.isnan(found["cosine"])
    nothing = pair_metrics(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert nothing == {"equal": True, "nonfinite": 1, "nonfinite_a": 1, "nonfinite_b": 1}
    result = compare_captures(*(Capture({"o": torch.full((1, 1, 1, 1), math.nan)}, False, None),) * 2)
    assert "o         equal   –" in captures_text(result, "a", "b")
    assert result.notes[-1] == "o: elements not finite: 1 in A, 1 in B; 1 left out"


def test_what_is_not_finite_is_counted_on_its_side() -> None:
    a, b = torch.ones(1, 1, 2, 2), torch.tensor([1.0, math.inf, 1.0, 1.0]).reshape(1, 1, 2, 2)
    result = compare_captures(Capture({"o": a}, False, None), Capture({"o": b}, False, None))
    assert result.notes[-1] == "o: elements not finite: 0 in A, 1 in B; 1 left out"


@pytest.mark.parametrize("scale", [96**-0.5, float(torch.tensor(96**-0.5))], ids=["FP64", "FP32"])
def test_the_default_scale_may_be_written_out(scale: float) -> None:
    found = {"o": torch.ones(1, 1, 2, 96), "lse": torch.ones(1, 1, 2)}
    default, written = Capture(found, False, None), Capture(found, False, scale)
    assert compare_captures(default, written).tensors["o"]["equal"]
    assert compare_captures(written, default).tensors["o"]["equal"]
    with pytest.raises(UsageError, match=r"False, 0\.10206\d* in A but False, 0\.1 in B"):
        compare_captures(default, Capture(found, False, 0.1))
    lse = {"lse": found["lse"]}  # alone it does not say what D is
    with pytest.raises(UsageError, match=r"False, D\^-0\.5 in A but False, 0\.1 in B"):
        compare_captures(Capture(lse, False, None), Capture(lse, False, 0.1))


@pytest.mark.parametrize("causal", [False, True])
def test_fp64_figures_are_those_of_the_whole_problem(causal: bool) -> None:
    """Head by head, with GQA, as in one piece."""
    x = inputs(causal)
    found = tensors("eager-stored/stock", x)
    capture = Capture(found, causal, None)
    got, ref = against_fp64(capture), attention_reference(x)
    whole = output_metrics(found["o"], ref, FORMATS[torch.bfloat16], seeds=1)
    assert got["o"]["bias_ulp"] == pytest.approx(whole["aligned_ulp_mean"], rel=1e-9)
    for name in ("lse", "dq", "dk", "dv"):
        exact = getattr(ref, name)
        error = found[name].double() - exact
        assert got[name]["max_error"] == pytest.approx(float(error.abs().max() / exact.abs().max()))
        expected = float((error * exact.sign()).sum() / exact.abs().sum())
        assert got[name]["bias"] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    leak = -(x.do.double() * (found["o"].double() - ref.o)).sum(-1)
    expected = float(leak.mean() / ref.delta.abs().mean())
    assert got["leak"]["leak_over_delta"] == pytest.approx(expected, rel=1e-9)


def test_the_command_compares_two_captures(tmp_path: Path) -> None:
    x = inputs()
    a = save(tmp_path / "gpu.safetensors", tensors("eager-stored/stock", x))
    b = save(tmp_path / "npu.safetensors", tensors("eager-fused/stock", x))
    done = CliRunner().invoke(runner.app, ["compare", str(a), str(b)])
    assert done.exit_code == 0, done.output
    assert re.search(r"q +equal +1\.000000000 +0\.000e\+00 +0\.000e\+00 +100\.00% +100\.00%", done.output)
    assert re.search(r"dq +differ +0\.99", done.output)
    assert "leak: coherence" in done.output
    document = json.loads(CliRunner().invoke(runner.app, ["compare", str(a), str(b), "--json"]).stdout)
    assert document["tensors"]["o"]["equal"] is False
    assert document["digests"]["q"]["a"] == document["digests"]["q"]["b"]
    # The stored policy rounds O's way to its end many times, the fused one once.
    assert document["fp64"]["a"]["o"]["max_error"] > document["fp64"]["b"]["o"]["max_error"]


def test_inputs_in_one_file_serve_both_and_other_inputs_are_noted(tmp_path: Path) -> None:
    x = inputs()
    found = tensors("eager-fused/stock", x)
    bare = Capture({name: found[name] for name in ("q", "k", "v", "o")}, True, None)
    result = compare_captures(Capture(found, True, None), bare)
    assert result.fp64["a"]["leak"] == result.fp64["b"]["leak"]
    assert "in one of them alone: dk, do, dq, dv, lse" in result.notes[0]
    other = Capture(found | {"q": -found["q"]}, True, None)
    result = compare_captures(Capture(found, True, None), other)
    assert result.fp64 == {}
    assert result.notes == ["inputs differ: q: outputs differ whatever the kernels do"]


GOOD: dict[str, Any] = {"o": torch.zeros(1, 1, 2, 4)}


@pytest.mark.parametrize(
    ("message", "found", "metadata"),
    [
        ("unknown tensor 'out'; allowed: q, k, v, do, o", {"out": GOOD["o"]}, {}),
        ("none of o, lse, dq, dk, dv is there", {"q": GOOD["o"]}, {}),
        ("o is torch.float64; allowed: bfloat16, float16, float32", {"o": GOOD["o"].double()}, {}),
        ("o is [2, 4]; expected 4 dimensions, none 0", {"o": torch.zeros(2, 4)}, {}),
        ("o is [1, 1, 0, 4]; expected 4 dimensions, none 0", {"o": torch.zeros(1, 1, 0, 4)}, {}),
        ("metadata causal: 'yes'; allowed: true, false", GOOD, {"causal": "yes"}),
        ("metadata scale: '-1'; allowed: a number > 0", GOOD, {"scale": "-1"}),
        ("metadata scale: 'x'; allowed: a number > 0", GOOD, {"scale": "x"}),
        (
            "k is [1, 2, 2, 4]; o is [1, 3, 2, 4]: expected the same batch",
            {
                "o": torch.zeros(1, 3, 2, 4),
                "q": torch.zeros(1, 3, 2, 4),
                "k": torch.zeros(1, 2, 2, 4),
                "v": torch.zeros(1, 2, 2, 4),
            },
            {},
        ),
        (
            "k is [1, 1, 2, 5]; ",
            {"o": GOOD["o"], "q": GOOD["o"], "k": torch.zeros(1, 1, 2, 5), "v": torch.zeros(1, 1, 2, 5)},
            {},
        ),
        (
            "v is [1, 1, 3, 4]; k is [1, 1, 2, 4]",
            {"o": GOOD["o"], "k": GOOD["o"], "v": torch.zeros(1, 1, 3, 4)},
            {},
        ),
        ("dq is [1, 1, 3, 4]; o is [1, 1, 2, 4]", {"o": GOOD["o"], "dq": torch.zeros(1, 1, 3, 4)}, {}),
        ("lse is [1, 1, 3]; o is [1, 1, 2, 4]", {"o": GOOD["o"], "lse": torch.zeros(1, 1, 3)}, {}),
    ],
)
def test_bad_captures_are_named(message: str, found: Any, metadata: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        read_capture(save(tmp_path / "a.safetensors", found, **metadata))


def test_bad_files_and_pairs_are_named(tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", GOOD)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(a.read_bytes()[:20])
    with pytest.raises(UsageError, match="not readable as safetensors"):
        read_capture(broken)
    with pytest.raises(UsageError, match="not readable as safetensors"):
        read_capture(tmp_path / "missing.safetensors")
    first = read_capture(a)
    for other, message in (
        (save(tmp_path / "b.safetensors", GOOD, causal="false"), "causal and scale are True"),
        (
            save(tmp_path / "c.safetensors", {"o": torch.zeros(1, 1, 3, 4)}),
            r"o: \[1, 1, 2, 4\] in A",
        ),
        (save(tmp_path / "d.safetensors", {"dq": GOOD["o"]}), "A and B share none of o, lse"),
    ):
        with pytest.raises(UsageError, match=message):
            compare_captures(first, read_capture(other))
    (tmp_path / "run.json").write_text("{}")
    done = CliRunner().invoke(runner.app, ["compare", str(a), str(tmp_path / "run.json")])
    assert isinstance(done.exception, UsageError)
    assert "a capture; the other file is none" in str(done.exception)
