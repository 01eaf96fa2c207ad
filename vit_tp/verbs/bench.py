"""`vit-tp bench data`: is the data or the model the bottleneck? As the process that launches, or as a rank.

Nothing is kept but what is printed, and the logs where it failed. Does not know: how it is measured (train/bench.py).
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Mapping

from vit_tp.config import Config, check, run_folder
from vit_tp.errors import ConfigError
from vit_tp.launch.commands import rank_arguments, with_replicas
from vit_tp.launch.env import RankEnv
from vit_tp.launch.process import guard
from vit_tp.verbs.job import Request, become_rank, place, require_devices, start

STEPS = 10
SUBJECT = "data"


def launch(request: Request) -> int:
    """Measure in ranks that this process starts; return the exit code."""
    from vit_tp.compose import compose, load_config, save_config

    require_subject(request)
    config = load_config(request.config_file) if request.config_file is not None else compose(request.overrides)
    check(config)
    config, where = place(config)
    check(config)
    from vit_tp.report.result import read_result
    from vit_tp.train.preflight import preflight

    print("\n".join(preflight(config).lines))
    scratch = tempfile.mkdtemp(prefix="vit_tp_bench_")
    measured = _measured(config, scratch)
    folder = run_folder(measured)
    save_config(measured, folder.config)
    arguments = rank_arguments("bench", folder.config, [SUBJECT, f"steps={config.recipe.max_steps or STEPS}"])
    code = start(measured, arguments, where, folder.result, folder.log)
    if code == 0:  # where it failed, its logs are wanted
        print("\n".join(verdict(read_result(folder.result))))
        shutil.rmtree(scratch)
    return code


def be_rank(request: Request, env: RankEnv) -> int:
    """Be one rank of a measurement; return the exit code."""
    from vit_tp.compose import load_config

    require_subject(request)
    if request.config_file is None:
        raise ConfigError(
            "vit-tp bench starts its ranks itself; ranks that something else started have no common folder. "
            "Use vit-tp bench data outside of a job."
        )
    config = with_replicas(load_config(request.config_file), env.world_size)
    require_devices(config)
    folder = run_folder(config)
    _, console_err = become_rank(config, env, folder.log)

    def work() -> None:
        from vit_tp.report.result import write_result
        from vit_tp.train.bench import bench_data_rank

        [num_steps] = (int(word.removeprefix("steps=")) for word in request.overrides)
        figures = bench_data_rank(config, env, num_steps)
        if env.rank == 0:
            write_result(folder.result, figures)

    guard(work, env.rank, folder.log, console_err)
    return 0


def require_subject(request: Request) -> None:
    """Raise unless what is to be measured is known."""
    if request.subject != SUBJECT:
        raise ConfigError(
            f"vit-tp bench was asked for {request.subject or 'nothing'}; it measures {SUBJECT}. "
            f"Use vit-tp bench {SUBJECT} [OVERRIDE ...]."
        )
    if any(word.startswith("run=") for word in request.overrides):
        raise ConfigError(
            f"vit-tp bench takes what vit-tp train takes, not the folder of a run; it measures before one is there. "
            f"Use vit-tp bench {SUBJECT} --config-file <run folder>/config.yaml, or the run's own overrides."
        )


def _measured(config: Config, scratch: str) -> Config:
    """Return the run with as many steps as the measurement takes."""
    from vit_tp.train.bench_steps import total_steps

    measured = copy.deepcopy(config)
    measured.run.dir, measured.run.name = scratch, "bench"
    measured.recipe.max_steps = total_steps(config, config.recipe.max_steps or STEPS)
    measured.recipe.resolution_schedule = []  # at the size that a run ends with
    measured.recipe.epochs = max(config.recipe.epochs, measured.recipe.max_steps)
    measured.log.tensorboard = measured.log.progress = False
    return measured


def verdict(figures: Mapping[str, float]) -> list[str]:
    """Return what was measured, and what it means, in lines for a person."""
    data, model, together = (figures[f"{name}_samples_per_s"] for name in ("data", "model", "together"))
    readers, workers = int(figures["readers"]), int(figures["num_workers"])
    by = f"{readers} reader{'s' if readers > 1 else ''} with {workers} worker processes{' each' if readers > 1 else ''}"
    lines = [
        f"data      {data:.1f} samples/s by {by}; the first batches took {figures['first_batches_s']:.1f} s",
        f"model     {model:.1f} samples/s on batches that are there already",
        f"together  {together:.1f} samples/s; {figures['data_wait']:.0%} of the time is waiting for samples",
    ]
    if figures["unreadable"]:
        lines.append(f"unreadable  {int(figures['unreadable'])} samples were replaced")
    if data < model:
        lines.append(
            f"bottleneck  the data: the model could take {model / data:.2f} times as many samples. "
            f"Use data.num_workers={max(2 * workers, 2)} where cores are idle, smaller files, or shards."
        )
    else:
        lines.append(f"bottleneck  the model: samples come {data / model:.2f} times as fast as it takes them")
    return lines
