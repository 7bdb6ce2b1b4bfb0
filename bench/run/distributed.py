"""The processes of a `torchrun`: which one this is, and the little that they say to each other.

Without torchrun there is one process, and everything here is free. One machine name, one result file:
only rank 0 writes and prints. torch is imported where it is needed: every command ends with `end`.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from backends import BACKENDS
from bench.errors import UsageError
from bench.run.registry import unavailable_reason
from cases.processes import launched, world

# Variables that make NCCL add in another order, hence other bits.
ENVIRONMENT = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_MAX_NCHANNELS")


def join() -> None:
    """Meet the other processes of a torchrun and take this process's accelerator; else do nothing.

    gloo for tensors on the host; nccl, hccl or what else PyTorch has for the accelerator.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized() or not launched():
        return
    for name in BACKENDS:  # PyTorch knows some accelerators only once their package is loaded
        unavailable_reason(name)
    backend = "cpu:gloo"
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        local, count = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
        if local >= count:
            processes = os.environ["LOCAL_WORLD_SIZE"]
            raise UsageError(
                f"torchrun started {processes} processes on a machine with {count} "
                f"{accelerator.type} devices; use --nproc-per-node {count}"
            )
        torch.accelerator.set_device_index(local)
        backend += f",{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"
    dist.init_process_group(backend)


def launcher() -> str:
    """How this program was started, for a command to copy."""
    if world().size == 1:
        return "python"
    return f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"


def leave() -> None:
    """Part in order, so that nothing hangs or complains at exit."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def end(code: int) -> NoReturn:
    """Exit with this code, in a torchrun without taking the interpreter down.

    DistributedDataParallel keeps its group, and so gloo's threads, past `destroy_process_group` (torch 2.13).
    A thread that asks for an interpreter on its way out now and then aborted a finished run.
    """
    if world().size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def facts() -> dict[str, Any]:
    """Number of processes and the settings that change the order of their sums; for a result file."""
    here = world()
    if here.size == 1:
        return {}
    return {"processes": here.size, **{n: os.environ[n] for n in ENVIRONMENT if n in os.environ}}
