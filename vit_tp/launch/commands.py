"""What is started: from a configuration to a number of ranks, an argv and an environment. Pure functions.

DeepSpeed's `deepspeed` command orphans its ranks on SIGTERM and can return 0 after a crash, so the launcher below it is
started directly; `deepspeed_command` prints what a person would type instead. Does not know: processes (local.py).
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vit_tp.config import Config
from vit_tp.errors import ConfigError
from vit_tp.launch.env import RANK_VARIABLES

LAUNCHER_PID = "VIT_TP_LAUNCHER_PID"  # set for ranks that `vit-tp` started: they end with their parent, and it prints


def visible_gpus(device: str, environ: Mapping[str, str], listing: str) -> list[str]:
    """Return the devices that ranks may use, by the names that CUDA_VISIBLE_DEVICES takes.

    Args:
        device: compute.device.
        environ: The environment; CUDA_VISIBLE_DEVICES hides devices, and DS_ACCELERATOR=cpu turns auto into cpu.
        listing: What `nvidia-smi -L` printed, empty where there is none.

    Returns:
        One name for each device, none for a run on CPU.
    """
    if device == "cpu" or (device == "auto" and environ.get("DS_ACCELERATOR") == "cpu"):
        return []
    present = re.findall(r"^GPU (\d+):", listing, flags=re.MULTILINE)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    names = [name.strip() for name in visible.split(",")]
    # CUDA stops reading at the first name that is no device.
    end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return names[:end] if present else []


def require_devices(config: Config, num_gpus: int) -> None:
    """Refuse what needs a GPU where none is visible.

    Raises:
        ConfigError: compute.device or compute.dtype needs one.
    """
    if num_gpus:
        return
    if config.compute.device == "cuda":
        raise ConfigError(
            "compute.device=cuda, but no GPU is visible; each rank needs one. Use compute.device=cpu, or set "
            "CUDA_VISIBLE_DEVICES."
        )
    if config.compute.dtype == "fp16":
        raise ConfigError(
            "compute.dtype=fp16 needs a GPU and none is visible; DeepSpeed refuses fp16 on CPU. Use compute.dtype=bf16 "
            "or compute.dtype=fp32."
        )


def local_world(config: Config, num_gpus: int) -> int:
    """Return how many ranks run on this machine: tp * pp * dp.

    Args:
        config: The whole configuration. With parallel.dp=null all GPUs are filled; without a GPU there is one replica.
        num_gpus: Devices, 0 for CPU.

    Raises:
        ConfigError: Devices and grid do not fit.
    """
    require_devices(config, num_gpus)
    parallel = config.parallel
    replica = parallel.tp * parallel.pp
    shape = f"parallel.tp={parallel.tp} * parallel.pp={parallel.pp}"
    if num_gpus and replica * (parallel.dp or 1) > num_gpus:
        wanted = shape + (f" * parallel.dp={parallel.dp}" if parallel.dp else "")
        raise ConfigError(
            f"{wanted} = {replica * (parallel.dp or 1)} ranks, but {num_gpus} GPUs are visible; each rank needs one. "
            f"Use a smaller parallel.tp, parallel.pp or parallel.dp, or compute.device=cpu."
        )
    if num_gpus and parallel.dp is None and num_gpus % replica:
        fitting = num_gpus // replica
        raise ConfigError(
            f"{shape} = {replica} ranks do not divide {num_gpus} GPUs; {num_gpus % replica} would idle. "
            f"Use parallel.dp={fitting} to leave them idle, or a parallel.tp and parallel.pp that divide."
        )
    return replica * (parallel.dp or max(1, num_gpus // replica))


def with_replicas(config: Config, world_size: int) -> Config:
    """Return the configuration with parallel.dp as it really is.

    Raises:
        ConfigError: world_size is not tp * pp * dp.
    """
    tp, pp, dp = config.parallel.tp, config.parallel.pp, config.parallel.dp
    if world_size % (tp * pp) or (dp is not None and world_size != tp * pp * dp):
        dp_text = f" * parallel.dp={dp}" if dp is not None else ""
        advice = f"Start {tp * pp * (dp or 1)} ranks"
        if world_size % (tp * pp) == 0:
            advice += f", or use parallel.dp={world_size // (tp * pp)}"
        raise ConfigError(
            f"{world_size} ranks are not parallel.tp={tp} * parallel.pp={pp}{dp_text} = {tp * pp * (dp or 1)}; "
            f"every rank has one place on the grid. {advice}."
        )
    return replace(config, parallel=replace(config.parallel, dp=world_size // (tp * pp)))


def rank_arguments(verb: str, config_file: Path, extra: Sequence[str] = ()) -> list[str]:
    """Return what each rank is given after `python -m vit_tp`: a file, nothing that a shell could read wrongly."""
    return [verb, "--config-file", str(config_file), *extra]


def deepspeed_command(arguments: Sequence[str], slots: Sequence[str], port: int, environ: Mapping[str, str]) -> str:
    """Return the line that a person would type to start the same ranks.

    Args:
        arguments: What follows `python -m vit_tp`.
        slots: One name for each rank: its device, or any number on CPU.
        port: Port of the rendezvous.
        environ: What `child_environment` gave to the ranks.
    """
    prefix = [f"{name}={shlex.quote(environ[name])}" for name in ("DS_ACCELERATOR", "OMP_NUM_THREADS")]
    # --num_gpus makes the command forget CUDA_VISIBLE_DEVICES, so devices other than the first are named.
    are_first = list(slots) == [str(i) for i in range(len(slots))]
    where = ["--num_gpus", str(len(slots))] if are_first else ["--include", f"localhost:{','.join(slots)}"]
    command = ["deepspeed", *where, "--no_local_rank", "--master_port", str(port), "--module", "vit_tp", *arguments]
    return " ".join([*prefix, *(shlex.quote(word) for word in command)])


def launch_argv(arguments: Sequence[str], slots: Sequence[str], port: int, module: str = "vit_tp") -> list[str]:
    """Return the argv that is really started: DeepSpeed's launcher of one machine.

    Args:
        arguments: What each rank is given.
        slots: One name for each rank: its device, or any number on CPU. The launcher sets CUDA_VISIBLE_DEVICES to
            them, over what it was.
        port: Port of the rendezvous.
        module: Module that is a rank.
    """
    ranks = base64.urlsafe_b64encode(json.dumps({"localhost": list(slots)}).encode()).decode()
    return [
        *(sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={ranks}"),
        *("--master_addr", "127.0.0.1", "--master_port", str(port), "--no_local_rank", "--log_level", "critical"),
        *("--module", module, *arguments),
    ]


def child_environment(environ: Mapping[str, str], launcher_pid: int, threads: int, on_cpu: bool) -> dict[str, str]:
    """Return the environment of the ranks' launcher: nothing of a job that we may be inside of.

    Args:
        environ: Ours.
        launcher_pid: Process whose end ends the job.
        threads: OMP_NUM_THREADS where the user has not set it.
        on_cpu: Whether ranks run on CPU.
    """
    cleaned = {name: value for name, value in environ.items() if name not in RANK_VARIABLES}
    if on_cpu:
        cleaned.pop("CUDA_VISIBLE_DEVICES", None)  # DeepSpeed sets it on CPU too, and would read it as slots
    cleaned["OMP_NUM_THREADS"] = cleaned.get("OMP_NUM_THREADS") or str(threads)
    # An accelerator that is named is not announced on the console.
    cleaned["DS_ACCELERATOR"] = "cpu" if on_cpu else "cuda"
    cleaned[LAUNCHER_PID] = str(launcher_pid)
    return cleaned


def fair_threads(num_cores: int, world: int) -> int:
    """Return each rank's share of the cores, at least one."""
    return max(1, num_cores // world)
