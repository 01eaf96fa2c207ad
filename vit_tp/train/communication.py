"""Starting torch.distributed as DeepSpeed wants it, without compiling anything."""

from __future__ import annotations

import importlib
import os
import socket
from datetime import timedelta
from importlib.metadata import requires, version

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import compiler
from packaging.requirements import Requirement

from vit_tp.errors import TopologyError
from vit_tp.parallel.groups import DEFAULT_TIMEOUT


def start_communication(timeout: timedelta = DEFAULT_TIMEOUT) -> torch.device:
    """Join the world described by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; return this rank's device.

    A process group that exists already is adopted. NCCL is used where ranks have GPUs, gloo on CPU.

    Raises:
        RuntimeError: If this DeepSpeed is outside the range that the package was made for.
        TopologyError: If two processes call themselves by the same rank.
    """
    _require_supported()
    # DeepSpeed would build a C++ extension here for CPU inference, 28 to 98 s, and fail where there is no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon_uncompiled()
    accelerator = get_accelerator()
    accelerator.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # DeepSpeed does so only in its engine
    if not dist.is_initialized():
        _join(accelerator.communication_backend_name() if accelerator.device_name() == "cuda" else "gloo", timeout)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return torch.device(accelerator.current_device_name())


def stop_communication() -> None:
    """Leave the world in step with the others; without it the interpreter sometimes aborts at exit."""
    dist.barrier()
    dist.destroy_process_group()


def _join(backend: str, timeout: timedelta) -> None:
    """Meet the other ranks, each rank's place taken once: two processes of one rank would wait for ever."""
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise TopologyError(
            f"port {os.environ['MASTER_PORT']} of {os.environ['MASTER_ADDR']} is taken; another job uses it, or a "
            f"second process was started with RANK=0. Set another MASTER_PORT, or give each process its own RANK."
        ) from error
    me = f"process {os.getpid()} on {socket.gethostname()}"
    if store.add(f"vit_tp/arrivals/{rank}", 1) > 1:
        other = store.get(f"vit_tp/who/{rank}").decode()
        raise TopologyError(f"{me} and {other} were both started with RANK={rank}. Give each process its own RANK.")
    store.set(f"vit_tp/who/{rank}", me)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _require_supported() -> None:
    """Refuse a DeepSpeed that setup.py does not allow: what is replaced in it may have moved."""
    wanted = next(r for r in map(Requirement, requires("vit-tp") or []) if r.name == "deepspeed")
    if not wanted.specifier.contains(version("deepspeed"), prereleases=True):
        raise RuntimeError(f"DeepSpeed {version('deepspeed')} is installed; vit_tp works with {wanted.specifier}.")


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
