"""Starting torch.distributed as DeepSpeed wants it, without compiling anything."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import compiler

from vit_tp.parallel.groups import DEFAULT_TIMEOUT


def start_communication(timeout: timedelta = DEFAULT_TIMEOUT) -> torch.device:
    """Join the world described by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; return this rank's device.

    A process group that exists already is adopted. NCCL is used where ranks have GPUs, gloo on CPU.
    """
    # DeepSpeed would build a C++ extension here for CPU inference, 28 to 98 s, and fail where there is no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon_uncompiled()
    on_gpu = get_accelerator().device_name() == "cuda"
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))  # DeepSpeed does so only in its engine
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(
            dist_backend="nccl" if on_gpu else "gloo", timeout=timeout, auto_mpi_discovery=False, verbose=False
        )
    return torch.device(get_accelerator().current_device_name())


def stop_communication() -> None:
    """Leave the world in step with the others; without it the interpreter sometimes aborts at exit."""
    dist.barrier()
    dist.destroy_process_group()


def _import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon before ZeRO does, with its decorators off.

    ZeRO imports it in the first step, whatever the optimizer, and its decorators load torch's compiler: 6 s of CPU on
    every rank. This package refuses Muon, which is not elementwise.
    """
    decorator = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = decorator
