"""Speed of the Triton attention kernels beside PyTorch's flash and cuDNN, on one GPU.

    python -m bench.tools.benchmarks.attention_in_turns       # three shapes, every fix, about a minute
    python -m bench.tools.benchmarks.attention_in_turns --out speed.json
    python -m bench.tools.benchmarks.attention_in_turns --shape 4,8,4096,256 --kernel "triton/stab*"
    python -m bench.tools.benchmarks.attention_in_turns --host          # what a call costs the host

Every call is timed alone with device events, after the L2 cache was overwritten and while the
device is held busy, so that neither a warm cache nor the host's launch time counts. Kernels take
turns in rounds, so that drift of the clock hits all of them. Reported: median over the calls, the
span of the middle 80 %, TFLOP/s by the usual count (4 B H T^2 D forward, 10 B H T^2 D backward,
halved by the causal mask), and ratios to the vendors' kernels timed in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from backends import cuda
from backends.fixes import FIXES
from backends.kernels.triton_flash_ops import launch_facts, triton_attention

SHAPES = ((4, 16, 4096, 128), (8, 16, 2048, 64), (2, 16, 8192, 128))  # (B, H, T, D)
VENDORS = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
REFERENCES = (*VENDORS, "triton/stock")  # always timed: every figure is given relative to them


def attention(name: str) -> Callable:
    """The kernel `name` as a function of q, k, v: causal, default scale."""
    if name in VENDORS:

        def vendor(q, k, v):
            with sdpa_kernel(VENDORS[name]):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        return vendor
    fix = name.removeprefix("triton/")
    return lambda q, k, v: triton_attention(q, k, v, causal=True, fix=fix)


def host_ms(names: list[str], calls: int = 300) -> dict[str, dict[str, float]]:
    """name -> {forward, both: ms a call} of a problem so small that the host is all that counts."""
    q, k, v, do = (torch.randn(1, 2, 128, 64, device="cuda").bfloat16() for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def forward(run: Callable) -> None:
        with torch.no_grad():
            run(q, k, v)

    def both(run: Callable) -> None:
        torch.autograd.grad(run(q, k, v), (q, k, v), do)

    times: dict[str, dict[str, float]] = {}
    for name in names:
        times[name] = {}
        for part, run in (("forward", forward), ("both", both)):
            for _ in range(10):
                run(attention(name))
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run(attention(name))
            torch.cuda.synchronize()
            times[name][part] = round((time.perf_counter() - start) / calls * 1e3, 4)
    return times


def measure(shape: tuple[int, ...], names: list[str], rounds: int, calls: int) -> dict[str, dict]:
    """name -> {forward, backward: list of ms, forward_backward_mib}."""
    batch, heads, tokens, head_dim = shape
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(batch, heads, tokens, head_dim, generator=generator, device="cuda").bfloat16()
        for _ in range(4)
    )
    for x in (q, k, v):
        x.requires_grad_()
    backend = cuda.create()
    timer = partial(backend.timer(), warm_up=0)
    results: dict[str, dict[str, Any]] = {n: {"forward": [], "backward": []} for n in names}

    def forward(name: str) -> None:
        with torch.no_grad():
            attention(name)(q, k, v)

    def backward(o: torch.Tensor) -> None:
        torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

    def both(name: str) -> None:
        torch.autograd.grad(attention(name)(q, k, v), (q, k, v), do)

    for name in names:  # compile, allocate
        both(name)
        results[name]["forward_backward_mib"] = backend.memory_of(partial(both, name)) / 2**20
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            results[name]["forward"] += timer(partial(forward, name), calls)
            o = attention(name)(q, k, v)
            results[name]["backward"] += timer(partial(backward, o), calls)
            del o
    return results


def summarize(shape: tuple[int, ...], results: dict[str, dict]) -> list[dict]:
    """One flat row a kernel and pass."""
    batch, heads, tokens, head_dim = shape
    pair_flops = batch * heads * tokens * tokens * head_dim / 2  # causal: half of the pairs
    flops = {"forward": 4 * pair_flops, "backward": 10 * pair_flops}
    median = {
        (name, part): statistics.median(times[part]) for name, times in results.items() for part in flops
    }
    for name in results:
        median[name, "both"] = median[name, "forward"] + median[name, "backward"]
    rows = []
    for name, times in results.items():
        for part in ("forward", "backward", "both"):
            ms = median[name, part]
            row = {
                "shape": list(shape),
                "kernel": name,
                "pass": part,
                "ms": round(ms, 4),
                "tflops": round(flops.get(part, sum(flops.values())) / ms * 1e-9, 1),
                "speed_vs_flash": round(median["sdpa-flash", part] / ms, 3),
                "speed_vs_cudnn": round(median["sdpa-cudnn", part] / ms, 3),
                "time_vs_stock": round(ms / median["triton/stock", part], 4),
            }
            if part in flops:
                ordered = sorted(times[part])
                tenth = len(ordered) // 10
                row["ms_p10_p90"] = [round(ordered[tenth], 4), round(ordered[-1 - tenth], 4)]
            else:
                row["peak_mib"] = round(times["forward_backward_mib"], 1)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="write every row to this JSON file")
    parser.add_argument("--shape", action="append", help="B,H,T,D; repeatable")
    parser.add_argument("--kernel", action="append", help="names to time, globs; repeatable")
    parser.add_argument("--host", action="store_true", help="time the host alone, on a tiny problem")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=8, help="timed calls a round")
    args = parser.parse_args()
    shapes = [tuple(map(int, text.split(","))) for text in args.shape or ()] or SHAPES
    patterns = args.kernel or ["*"]
    names = [
        name
        for name in (*VENDORS, *(f"triton/{fix}" for fix in FIXES))
        if name in REFERENCES or any(fnmatch(name, pattern) for pattern in patterns)
    ]
    if args.host:
        print(json.dumps(host_ms(names), indent=1))
        return
    rows = []
    print("device:", torch.cuda.get_device_name(), "torch", torch.__version__)
    for shape in shapes:
        print(shape, launch_facts(shape[3], torch.bfloat16, torch.device("cuda")))
        fresh = summarize(shape, measure(shape, names, args.rounds, args.calls))
        rows += fresh
        for row in fresh:
            span = row.get("ms_p10_p90", "")
            extra = f"{row['peak_mib']} MiB" if "peak_mib" in row else ""
            print(
                f"{row['kernel']:30s} {row['pass']:8s} {row['ms']:8.4f} ms {span!s:18s} "
                f"{row['tflops']:6.1f} TFLOP/s  x flash {row['speed_vs_flash']:5.3f}  "
                f"x cuDNN {row['speed_vs_cudnn']:5.3f}  / stock {row['time_vs_stock']:6.4f} {extra}"
            )
    if args.out:
        with open(args.out, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
