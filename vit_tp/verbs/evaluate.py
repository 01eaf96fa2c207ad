"""`vit-tp eval`: a finished run's weights on any grid; as the process that launches, or as a rank.

The figures go to <run>/eval/<grid>_<dtype>.json. Does not know: how a model is evaluated (train/).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from vit_tp.config import EVALUATION, SECOND_HALF, Config, RunFolder, check, eval_tag, is_one_model
from vit_tp.errors import ConfigError
from vit_tp.launch.commands import rank_arguments, with_replicas
from vit_tp.launch.env import RankEnv
from vit_tp.launch.process import guard
from vit_tp.verbs.job import Request, become_rank, is_started_by_us, place, require_devices, start


def launch(request: Request) -> int:
    """Evaluate in ranks that this process starts; return the exit code."""
    from vit_tp.compose import save_config

    config, folder, otherwise = _run_to_evaluate(request)
    config, where = place(config)
    from vit_tp.train.preflight import preflight

    preflight(config, training=False)
    tag = eval_tag(config) + otherwise
    save_config(config, folder.eval_config(tag))
    arguments = rank_arguments("eval", folder.eval_config(tag), [f"run={folder}"])
    code = start(config, arguments, where, folder.eval_result(tag), folder.eval_log(tag))
    if code == 0:
        print(_summary(folder.eval_result(tag)))
    return code


def be_rank(request: Request, env: RankEnv) -> int:
    """Be one rank of an evaluation that something else started; return the exit code."""
    config, folder, otherwise = _run_to_evaluate(request)
    config = with_replicas(config, env.world_size)
    require_devices(config)
    tag = eval_tag(config) + otherwise
    result, log_folder = folder.eval_result(tag), folder.eval_log(tag)
    console_out, console_err = become_rank(config, env, log_folder)

    def work() -> None:
        from vit_tp.report.result import write_result
        from vit_tp.train.rank import eval_rank

        figures = eval_rank(config, env, folder, log_folder)
        if env.rank == 0:
            write_result(result, figures)
        if env.rank == 0 and not is_started_by_us():
            print(_summary(result), file=console_out)

    guard(work, env.rank, log_folder, console_err)
    return 0


def _run_to_evaluate(request: Request) -> tuple[Config, RunFolder, str]:
    """Return the run's configuration with the second half and the protocol as asked, and the run's folder.

    Also what tells figures of other data apart from those of the run's own, in the names of files.
    """
    from vit_tp.compose import load_config, override

    named = [word.removeprefix("run=") for word in request.overrides if word.startswith("run=")]
    if len(named) != 1 or not named[0]:
        raise ConfigError(f"vit-tp eval was given {len(named)} runs; it evaluates one. Use run=<run folder>.")
    folder = RunFolder(Path(named[0]))
    if not folder.config.exists():
        raise ConfigError(
            f"{folder} holds no {folder.config.name}; it is not the folder of a run. Use run=<run.dir>/<run.name>."
        )
    if not any(folder.weights.glob("*")):
        raise ConfigError(
            f"{folder.weights} holds no weights; the run has not finished. Use run=<folder of a finished run>."
        )
    config = load_config(request.config_file or folder.config)
    overrides = [word for word in request.overrides if not word.startswith("run=")]
    trained, config = config, override(config, overrides, [*SECOND_HALF, *EVALUATION]) if overrides else config
    check(config, training=False)
    is_other = config.parallel.tp != trained.parallel.tp
    if is_other and not (is_one_model(trained) and is_one_model(config)):
        raise ConfigError(
            f"{folder} was trained with recipe.sync=partial on parallel.tp={trained.parallel.tp}, each rank with "
            f"channels of its own; on parallel.tp={config.parallel.tp} its weights would be another model. "
            f"Use parallel.tp={trained.parallel.tp}."
        )
    return config, folder, _otherwise(trained, config)


def _otherwise(trained: Config, asked: Config) -> str:
    """Return "" for the run's own data, else a name for the others."""
    other = ""
    if asked.data.root != trained.data.root and asked.data.root is not None:
        leaf = re.sub(r"[^A-Za-z0-9.-]+", "-", asked.data.root.rstrip("/").rsplit("/", 1)[-1]) or "root"
        other += f"_{leaf}-{hashlib.sha256(asked.data.root.encode()).hexdigest()[:6]}"
    if asked.data.decoder != trained.data.decoder:
        other += f"_{asked.data.decoder}"
    return other


def _summary(result: Path) -> str:
    from vit_tp.report.result import read_result, summary_lines

    return "\n".join(summary_lines(read_result(result), {"result": result}))
