"""`vit-tp train`: compose, check, refuse to overwrite, start the ranks; or be one of them.

Does not know: any training step (train/).
"""

from __future__ import annotations

from pathlib import Path

from vit_tp.config import FIRST_HALF, SECOND_HALF, Config, RunFolder, check, run_folder
from vit_tp.errors import ConfigError
from vit_tp.launch.commands import rank_arguments, with_replicas
from vit_tp.launch.env import RankEnv
from vit_tp.launch.memory import device_memory
from vit_tp.launch.process import guard
from vit_tp.verbs.job import Request, become_rank, is_started_by_us, place, place_of_ranks, require_devices, start


def launch(request: Request) -> int:
    """Train in ranks that this process starts; return the exit code."""
    config = _train_config(request)
    check(config)
    folder = run_folder(config)
    _refuse_existing(config)
    config, where = place(config)
    check(config)  # again, with the replicas that there really are
    from vit_tp.train.preflight import preflight

    lines = preflight(config, memory=device_memory(where.slots, where.on_cpu, where.max_ranks)).lines
    _claim(config)
    print("\n".join(lines))
    code = start(config, rank_arguments("train", folder.config), where, folder.result, folder.log)
    if code == 0:
        print(_summary(folder))
    return code


def be_rank(request: Request, env: RankEnv) -> int:
    """Be one rank of a training that something else started; return the exit code."""
    config = with_replicas(_train_config(request), env.world_size)
    folder = run_folder(config)
    if folder.result.exists():  # before any rank writes into a finished run's log
        _refuse_existing(config)
    check(config)
    require_devices(config)
    console_out, console_err = become_rank(config, env, folder.log)

    def work() -> None:
        if env.rank == 0 and not is_started_by_us():
            from vit_tp.train.preflight import preflight

            here = place_of_ranks(config, env)
            lines = preflight(config, memory=device_memory(here.slots, here.on_cpu)).lines
            _claim(config, request.config_file)
            print("\n".join(lines), file=console_out)
        from vit_tp.train.rank import train_rank

        train_rank(config, env, console_err)
        if env.rank == 0 and not is_started_by_us():
            print(_summary(folder), file=console_out)

    guard(work, env.rank, folder.log, console_err)
    return 0


def _train_config(request: Request) -> Config:
    from vit_tp.compose import compose, load_config, override

    if request.config_file is None:
        return compose(request.overrides)
    config = load_config(request.config_file)
    return override(config, request.overrides, ["run", *FIRST_HALF, *SECOND_HALF]) if request.overrides else config


def _refuse_existing(config: Config) -> None:
    if run_folder(config).config.exists():
        raise _taken(config)


def _taken(config: Config) -> ConfigError:
    folder = run_folder(config)
    if folder.result.exists():
        state = "has finished"
    else:
        state = "has no result.json: it is running or broke off, and this version does not continue runs"
    return ConfigError(
        f"{folder} holds a run that {state}; a run is never overwritten. Use run.name={_next_free_name(config)}."
    )


def _next_free_name(config: Config) -> str:
    stem, dash, number = config.run.name.rpartition("-")
    stem, start = (stem, int(number) + 1) if dash and number.isdigit() else (config.run.name, 2)
    while (Path(config.run.dir) / f"{stem}-{start}").exists():
        start += 1
    return f"{stem}-{start}"


def _claim(config: Config, config_file: Path | None = None) -> None:
    """Take the run's folder for this job alone, by making its config.yaml and an empty metrics.jsonl.

    Args:
        config: The run.
        config_file: What ranks started by hand were given. It may be the folder's own config.yaml, which somebody
            prepared; metrics.jsonl alone then tells whether a job has taken it.

    Raises:
        ConfigError: The folder is taken.
    """
    from vit_tp.compose import claim_with_config, save_config

    folder = run_folder(config)
    is_own = config_file is not None and folder.config.exists() and folder.config.samefile(config_file)
    try:
        if is_own:
            folder.metrics.touch(exist_ok=False)
            save_config(config, folder.config)
        else:
            claim_with_config(config, folder.config)
            folder.metrics.touch(exist_ok=False)
    except FileExistsError:
        raise _taken(config) from None
    except OSError as error:
        raise ConfigError(
            f"{folder.path} cannot be written to ({error.strerror}); a run keeps its files there. "
            f"Use run.dir=<a folder that you may write to>."
        ) from None


def _summary(folder: RunFolder) -> str:
    from vit_tp.report.result import read_result, run_summary

    return "\n".join(run_summary(folder, read_result(folder.result)))
