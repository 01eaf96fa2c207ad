"""`vit-tp eval`: a finished run's weights on any grid; as the process that launches, or as a rank.

The figures go to <run>/eval/<grid>.json. Does not know: how a model is evaluated (train/).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vit_tp.config import SECOND_HALF, Config, check, eval_tag
from vit_tp.errors import ConfigError
from vit_tp.launch.commands import rank_arguments, with_replicas
from vit_tp.launch.env import RankEnv
from vit_tp.launch.process import guard
from vit_tp.verbs.job import Request, become_rank, is_started_by_us, place, start


def launch(request: Request) -> int:
    """Evaluate in ranks that this process starts; return the exit code."""
    from vit_tp.compose import save_config

    config, folder = _run_to_evaluate(request)
    config, where = place(config)
    from vit_tp.train.preflight import preflight

    preflight(config, training=False)
    tag = eval_tag(config)
    result = folder / "eval" / f"{tag}.json"
    save_config(config, result.with_suffix(".yaml"))
    arguments = rank_arguments("eval", result.with_suffix(".yaml"), [f"run={folder}"])
    code = start(config, arguments, where, result, folder / "log" / f"eval_{tag}")
    if code == 0:
        print(_summary(result))
    return code


def be_rank(request: Request, env: RankEnv) -> int:
    """Be one rank of an evaluation that something else started; return the exit code."""
    config, folder = _run_to_evaluate(request)
    config = with_replicas(config, env.world_size)
    result = folder / "eval" / f"{eval_tag(config)}.json"
    log_dir = folder / "log" / f"eval_{eval_tag(config)}"

    def work() -> None:
        from vit_tp.train.rank import eval_rank

        figures = eval_rank(config, env, folder, console_out, console_err)
        if env.rank == 0:
            _write(result, figures)
        if env.rank == 0 and not is_started_by_us():
            print(_summary(result), file=console_out)

    console_out, console_err = become_rank(config, env, log_dir)
    guard(work, env.rank, log_dir, console_err)
    return 0


def _run_to_evaluate(request: Request) -> tuple[Config, Path]:
    """Return the run's configuration with the second half as asked, and the run's folder."""
    from vit_tp.compose import load_config, override

    named = [word.removeprefix("run=") for word in request.overrides if word.startswith("run=")]
    if len(named) != 1 or not named[0]:
        raise ConfigError(f"vit-tp eval was given {len(named)} runs; it evaluates one. Use run=<run folder>.")
    folder = Path(named[0])
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder} holds no config.yaml; it is not the folder of a run. Use run=<run.dir>/<run.name>.")
    if not any((folder / "export").glob("*")):
        raise ConfigError(
            f"{folder}/export holds no weights; the run has not finished. Use run=<folder of a finished run>."
        )
    config = load_config(request.config_file or folder / "config.yaml")
    overrides = [word for word in request.overrides if not word.startswith("run=")]
    config = override(config, overrides, SECOND_HALF) if overrides else config
    check(config, training=False)
    return config, folder


def _write(path: Path, figures: dict[str, Any]) -> None:
    from vit_tp.report.numbers import to_plain

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(to_plain(figures), indent=2) + "\n")
    os.replace(temporary, path)


def _summary(result: Path) -> str:
    from vit_tp.report.result import summary_lines

    return "\n".join([*summary_lines(result.parent, json.loads(result.read_text())), f"result  {result}"])
