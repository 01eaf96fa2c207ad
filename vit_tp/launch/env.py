"""Which rank is this process? Answered from the environment, once, by one pure function.

The only reader of rank variables in the package. Does not know: the grid, devices, how the process was started beyond
the names that its launcher left.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from vit_tp.errors import TopologyError

RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE"),
)
HAND_START = "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"


@dataclass(frozen=True)
class RankEnv:
    """This process among the others.

    Args:
        rank: Number of this process, 0 to world_size - 1.
        world_size: Processes in the job.
        local_rank: Number of this process on its host; on GPUs also the number of its device.
        local_world_size: Processes of the job on this host.
        master_addr: Host of rank 0.
        master_port: Port of the rendezvous on that host.
        source: Who started the process: torchrun, deepspeed or environment.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    source: str


def rank_env(environ: Mapping[str, str]) -> RankEnv | None:
    """Read this process's place from the variables that torchrun and DeepSpeed's launcher set.

    Args:
        environ: The environment.

    Returns:
        The place, or None outside a distributed job.

    Raises:
        TopologyError: Some variables are there and others are not, or they contradict one another.
    """
    # A lone LOCAL_RANK or MASTER_ADDR is a leftover of some shell; a rank or a world size means a job.
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environ.get(name)]
    if missing:
        present = ", ".join(f"{name}={environ[name]}" for name in needed if environ.get(name)) or "empty variables"
        raise TopologyError(
            f"{present} says that this process is a rank, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; it cannot find the others. Start ranks with deepspeed, "
            f"torchrun or plain `vit-tp train`, or set {HAND_START} for each; or unset {present.split('=')[0]}."
        )
    rank, world_size, local_rank = (_whole(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    port = _whole(environ, "MASTER_PORT")
    local_world_size = _local_world_size(environ, world_size)
    for name, value, limit_name, limit in (
        ("RANK", rank, "WORLD_SIZE", world_size),
        ("LOCAL_RANK", local_rank, "the number of ranks on this host", local_world_size),
    ):
        if not 0 <= value < limit:
            raise TopologyError(
                f"{name}={value} does not fit {limit_name}={limit}; ranks count from 0 to {limit - 1}. "
                f"Give each process its own {name} below {limit}."
            )
    if local_world_size > world_size:
        raise TopologyError(
            f"RANK={rank} of WORLD_SIZE={world_size} is LOCAL_RANK={local_rank} of {local_world_size} on this host; "
            f"a host holds no more ranks than the job. Set {HAND_START} alike for all processes of the job."
        )
    marks = {"torchrun": "TORCHELASTIC_RUN_ID", "deepspeed": "CROSS_SIZE"}
    source = next((launcher for launcher, mark in marks.items() if mark in environ), "environment")
    return RankEnv(rank, world_size, local_rank, local_world_size, environ["MASTER_ADDR"], port, source)


def export(env: RankEnv, environ: MutableMapping[str, str]) -> None:
    """Write what torch and DeepSpeed read: all names, whoever started the process.

    DeepSpeed does not ask MPI when these are set, and its PipelineModule fails without LOCAL_RANK.
    """
    environ["RANK"], environ["WORLD_SIZE"] = str(env.rank), str(env.world_size)
    environ["LOCAL_RANK"] = str(env.local_rank)
    environ["LOCAL_WORLD_SIZE"] = environ["LOCAL_SIZE"] = str(env.local_world_size)
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = env.master_addr, str(env.master_port)


def strip_local_rank(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Take the flag that older launchers put on the command line out of it, before anyone parses it.

    Args:
        argv: Arguments of the command, without the program.
        environ: The environment.

    Returns:
        The arguments without --local_rank or --local-rank in either spelling, and the environment, with LOCAL_RANK
        taken from the flag where the job has not set it.

    Raises:
        TopologyError: The flag contradicts LOCAL_RANK, or has no number.
    """
    clean, found = [], None
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in ("--local_rank", "--local-rank"):
            clean.append(word)
            continue
        text = value if equals else next(words, "")
        if not text.lstrip("-").isdigit():
            raise TopologyError(f"{flag} is followed by {text!r}; a launcher gives a number there. Use {flag}=0.")
        found = int(text)
    environ = dict(environ)
    is_job = "RANK" in environ or "WORLD_SIZE" in environ
    if found is not None and found >= 0 and is_job:  # -1 is torch's old word for "no distributed job"
        if environ.setdefault("LOCAL_RANK", str(found)) != str(found):
            raise TopologyError(
                f"--local_rank={found} contradicts LOCAL_RANK={environ['LOCAL_RANK']}; one process has one place. "
                f"Remove the flag: deepspeed takes --no_local_rank."
            )
    return clean, environ


def _local_world_size(environ: Mapping[str, str], world_size: int) -> int:
    names = [name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if environ.get(name)]
    sizes = {_whole(environ, name) for name in names}
    if len(sizes) > 1:
        raise TopologyError(
            f"LOCAL_WORLD_SIZE={environ['LOCAL_WORLD_SIZE']} contradicts LOCAL_SIZE={environ['LOCAL_SIZE']}; one is a "
            f"leftover of another job. Unset LOCAL_SIZE."
        )
    return sizes.pop() if sizes else world_size


def _whole(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise TopologyError(
            f"{name}={environ[name]} is not a whole number; ranks are counted. Set {name} to a number."
        ) from None
