"""What every verb that starts ranks has in common: placing them, starting them, becoming one.

Does not know: what ranks do.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from vit_tp.config import Config
from vit_tp.config.folder import rank_log
from vit_tp.launch import commands, local
from vit_tp.launch.env import RankEnv, export
from vit_tp.launch.process import forget_failure, redirect_output, watch_parent


@dataclass(frozen=True)
class Request:
    """What was typed.

    Args:
        verb: Name of the verb.
        overrides: Words with an equals sign.
        config_file: --config-file.
        subject: Of a verb that has several: what follows it.
    """

    verb: str
    overrides: list[str]
    config_file: Path | None
    subject: str | None = None


@dataclass(frozen=True)
class Place:
    """Where ranks run.

    Args:
        slots: One name for each rank: its device, or any number on CPU.
        on_cpu: Whether there is no device.
        max_ranks: Ranks that there are places for; None: any number.
    """

    slots: list[str]
    on_cpu: bool
    max_ranks: int | None = None


def place(config: Config) -> tuple[Config, Place]:
    """Return the configuration with the replicas that there really will be, and a place for each rank.

    Raises:
        ConfigError: The grid does not fit the devices.
    """
    gpus = _visible_gpus(config)
    world = commands.local_world(config, len(gpus))
    slots = gpus[:world] if gpus else [str(number) for number in range(world)]
    return commands.with_replicas(config, world), Place(slots, on_cpu=not gpus, max_ranks=len(gpus) or None)


def place_of_ranks(config: Config, env: RankEnv) -> Place:
    """Return where the ranks of this host run that something else started."""
    gpus = _visible_gpus(config)
    num_ranks = env.local_world_size
    return Place(gpus[:num_ranks] or [str(number) for number in range(num_ranks)], on_cpu=not gpus)


def start(config: Config, arguments: Sequence[str], where: Place, result_file: Path, log_folder: Path) -> int:
    """Print the equivalent command, start the ranks and wait for them; return the job's exit code."""
    port = local.free_port(config.cluster.port)
    threads = commands.fair_threads(local.num_cores(), len(where.slots))
    environ = commands.child_environment(os.environ, os.getpid(), threads, where.on_cpu)
    command = commands.deepspeed_command(arguments, where.slots, port, environ)
    print(f"equivalent to  {command}", flush=True)
    code = local.run(commands.launch_argv(arguments, where.slots, port), environ, result_file, log_folder)
    if code:
        ends = {128 + number: f" ({number.name} ended one of its processes)" for number in signal.Signals}
        print(
            f"The job ended with code {code}{ends.get(code, '')}. What each rank printed is in {log_folder}/.",
            file=sys.stderr,
        )
        if cause := local.first_failure(log_folder):
            print(f"First failure: {cause}", file=sys.stderr)
    return code


def is_started_by_us() -> bool:
    """Say whether this rank's job was started by `vit-tp`, which then prints the plan and the summary."""
    return commands.LAUNCHER_PID in os.environ


def require_devices(config: Config) -> None:
    """Refuse what needs a GPU where this host has none: nobody has asked for ranks that were started by hand.

    Raises:
        ConfigError: compute.device or compute.dtype needs one.
    """
    needs_gpu = config.compute.device == "cuda" or config.compute.dtype == "fp16"
    if needs_gpu and not is_started_by_us():
        commands.require_devices(config, len(_visible_gpus(config)))


def become_rank(config: Config, env: RankEnv, log_folder: Path) -> tuple[TextIO, TextIO]:
    """Prepare this process before torch and DeepSpeed are imported.

    Returns:
        Streams to the console; stdout and stderr go to this rank's log from now on.
    """
    if is_started_by_us():
        watch_parent()
    elif env.rank == 0:
        forget_failure(log_folder)
    if config.compute.device != "auto":
        os.environ["DS_ACCELERATOR"] = config.compute.device
    export(env, os.environ)
    return redirect_output(rank_log(log_folder, env.rank))


def _visible_gpus(config: Config) -> list[str]:
    device = config.compute.device
    return commands.visible_gpus(device, os.environ, "" if device == "cpu" else local.gpu_listing())
