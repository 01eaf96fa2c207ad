"""`vit-tp train`: compose, check, refuse to overwrite, start the ranks; or be one of them.

Does not know: any training step (train/).
"""

from __future__ import annotations

from pathlib import Path

from vit_tp.config import FIRST_HALF, SECOND_HALF, Config, check, run_folder
from vit_tp.errors import ConfigError
from vit_tp.launch.commands import rank_arguments, with_replicas
from vit_tp.launch.env import RankEnv
from vit_tp.launch.process import guard
from vit_tp.verbs.job import Request, become_rank, is_started_by_us, place, start


def launch(request: Request) -> int:
    """Train in ranks that this process starts; return the exit code."""
    from vit_tp.compose import save_config

    config = _train_config(request)
    check(config)
    folder = run_folder(config)
    _refuse_existing(config)
    config, where = place(config)
    check(config)  # again, with the replicas that there really are
    from vit_tp.train.preflight import preflight

    lines = preflight(config).lines
    save_config(config, folder / "config.yaml")
    print("\n".join(lines))
    arguments = rank_arguments("train", folder / "config.yaml")
    code = start(config, arguments, where, folder / "result.json", folder / "log")
    if code == 0:
        print(_summary(folder))
    return code


def be_rank(request: Request, env: RankEnv) -> int:
    """Be one rank of a training that something else started; return the exit code."""
    config = with_replicas(_train_config(request), env.world_size)
    folder = run_folder(config)
    if (folder / "result.json").exists():  # before any rank writes into a finished run's log
        _refuse_existing(config)
    check(config)

    def work() -> None:
        if env.rank == 0 and not is_started_by_us():
            _claim(config, request.config_file)
            from vit_tp.train.preflight import preflight

            print("\n".join(preflight(config).lines), file=console_out)
        from vit_tp.train.rank import train_rank

        train_rank(config, env, console_out, console_err)
        if env.rank == 0 and not is_started_by_us():
            print(_summary(folder), file=console_out)

    console_out, console_err = become_rank(config, env, folder / "log")
    guard(work, env.rank, folder / "log", console_err)
    return 0


def _train_config(request: Request) -> Config:
    from vit_tp.compose import compose, load_config, override

    if request.config_file is None:
        return compose(request.overrides)
    config = load_config(request.config_file)
    return override(config, request.overrides, ["run", *FIRST_HALF, *SECOND_HALF]) if request.overrides else config


def _refuse_existing(config: Config) -> None:
    folder = run_folder(config)
    if not (folder / "config.yaml").exists():
        return
    if (folder / "result.json").exists():
        state = "has finished"
    else:
        state = "has no result.json: it is running or broke off, and this version does not continue runs"
    raise ConfigError(
        f"{folder} holds a run that {state}; a run is never overwritten. Use run.name={_next_free_name(config)}."
    )


def _next_free_name(config: Config) -> str:
    stem, dash, number = config.run.name.rpartition("-")
    stem, start = (stem, int(number) + 1) if dash and number.isdigit() else (config.run.name, 2)
    while (Path(config.run.dir) / f"{stem}-{start}").exists():
        start += 1
    return f"{stem}-{start}"


def _claim(config: Config, config_file: Path | None) -> None:
    """Take the run's folder for ranks that were started by hand: the file they were given may be the folder's own."""
    from vit_tp.compose import save_config

    folder = run_folder(config)
    own = folder / "config.yaml"
    is_own = config_file is not None and own.exists() and own.samefile(config_file)
    if not is_own or (folder / "metrics.jsonl").exists():
        _refuse_existing(config)
    save_config(config, own)


def _summary(folder: Path) -> str:
    from vit_tp.report.result import read_result, summary_lines

    return "\n".join(summary_lines(folder, read_result(folder)))
