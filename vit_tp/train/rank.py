"""The whole life of one rank, for training and for evaluation."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch.distributed as dist

from vit_tp.checkpoint.export import save_weights
from vit_tp.config import Config, RunFolder, config_hash, fingerprint, is_one_model, run_folder
from vit_tp.config.atomic import write_atomically
from vit_tp.config.limits import VIDEO_SOURCES
from vit_tp.data.decode import choose_decoder, decoder_version
from vit_tp.errors import ConfigError
from vit_tp.parallel.topology import Topology
from vit_tp.report.result import write_result
from vit_tp.train.assemble import Assembly, assemble
from vit_tp.train.communication import start_communication, stop_communication
from vit_tp.train.engine import full_precision
from vit_tp.train.evaluate import evaluate
from vit_tp.train.loop import train
from vit_tp.train.recorder import Recorder


class RankEnv(Protocol):
    """What launch.env found out about this process."""

    rank: int
    world_size: int


def train_rank(config: Config, env: RankEnv, console: TextIO) -> None:
    """Train as one rank: join the world, assemble, train, export the weights, write the result.

    Args:
        config: The run, parallel.dp known.
        env: This rank's place.
        console: Where the progress bar goes.
    """
    started = time.perf_counter()
    run = join(config, env)
    folder = run_folder(config)
    if env.rank == 0 and run.data.spec.class_names:
        write_atomically(folder.classes, json.dumps(run.data.spec.class_names, ensure_ascii=False) + "\n")
    recorder = Recorder(
        folder.path,
        config.log,
        run.total_steps,
        run.data.steps_per_epoch,
        run.plan.global_batch_size,
        console,
        is_writer=env.rank == 0,
        started=started,
        waited_s=lambda: run.feed.waited_s,
    )
    figures = train(run, recorder)
    recorder.close()
    engine = run.engine
    kept, mark = folder.export, None
    if not is_one_model(config):
        kept, mark = folder.partial, f"trained with recipe.sync=partial on parallel.tp={config.parallel.tp}"
    save_weights(kept, engine.module.saved_stages, run.all_stages, run.groups, full_precision(engine), mark)
    if env.rank == 0:
        circumstances = {"fingerprint": fingerprint(config), **_circumstances(run)}
        write_result(folder.result, {**figures, **circumstances, "wall_s": time.perf_counter() - started})
        _plot(folder)
    stop_communication()


def eval_rank(config: Config, env: RankEnv, folder: RunFolder, log_folder: Path) -> dict[str, Any]:
    """Evaluate a finished run's weights as one rank; return its figures.

    Args:
        config: Of the evaluation.
        env: This rank's place.
        folder: Of the run.
        log_folder: Of the evaluation.
    """
    started = time.perf_counter()
    run = join(config, env, folder.weights, log_folder)
    _require_classes_of_run(folder, run.data.spec.class_names)
    figures = {
        **evaluate(run),
        "unreadable": run.data.count_unreadable(),
        **_circumstances(run),
        "wall_s": time.perf_counter() - started,
    }
    stop_communication()
    return figures


def _plot(folder: RunFolder) -> None:
    """Draw the run; weights and result are safe by now, and no picture is worth a failed run."""
    try:
        from vit_tp.report.plot import plot_run

        plot_run(folder.path)
    except Exception as error:
        print(f"{folder.plot} was not drawn: {type(error).__name__}: {error}", flush=True)


def join(config: Config, env: RankEnv, weights: Path | None = None, log_folder: Path | None = None) -> Assembly:
    topology = Topology(config.parallel.pp, config.parallel.dp, config.parallel.tp)
    topology.require_world(env.world_size)
    device = start_communication(timedelta(seconds=config.compute.timeout_s))
    _require_same(config_hash(config))
    _require_same_decoder(config)
    run = assemble(config, topology, device, weights, log_folder)
    pipe, place = run.engine.module, run.groups.place
    held = " and ".join(f"{chunk[0].name} .. {chunk[-1].name}" for chunk in pipe.chunks)
    params = sum(p.numel() for p in pipe.parameters())
    print(
        f"rank {env.rank} of {env.world_size} (pp={place.pp} dp={place.dp} tp={place.tp}) on {device}, "
        f"process {os.getpid()} on {platform.node()}: {held}, {params} parameters",
        flush=True,
    )
    return run


def _require_same(own: str) -> None:
    """Ranks that were started by hand compose alike; a rank with another config would train another model."""
    hashes: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, own)
    different = [rank for rank, other in enumerate(hashes) if other != hashes[0]]
    if different:
        raise ConfigError(
            f"ranks {different} were given another configuration than rank 0; they would train different models. "
            f"Start every rank with the same overrides, or with --config-file."
        )


def _require_classes_of_run(folder: RunFolder, names: tuple[str, ...]) -> None:
    """Other data may be scored, but not data whose numbers mean other classes."""
    known = json.loads(folder.classes.read_text(encoding="utf-8")) if folder.classes.exists() else None
    if known is not None and list(names) != known:
        other = sorted(set(names) ^ set(known)) or ["the same names in another order"]
        raise ConfigError(
            f"the data have other classes than {folder} was trained on ({', '.join(other[:5])}); labels would mean "
            f"other things than the model's answers. Use a data.root whose training classes are those of "
            f"{folder.classes}."
        )


def _require_same_decoder(config: Config) -> None:
    """Each host chooses what decodes for data.decoder=auto, and other decoders may give other pixels."""
    if config.data.source not in VIDEO_SOURCES:
        return
    decoders: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(decoders, choose_decoder(config.data.decoder, config.data.decoder_device))
    different = [rank for rank, other in enumerate(decoders) if other != decoders[0]]
    if different:
        raise ConfigError(
            f"ranks {different} would decode videos with {decoders[different[0]]} and rank 0 with {decoders[0]}; the "
            f"same video could look otherwise on each host. Use data.decoder=pyav, or install torchcodec everywhere."
        )


def _circumstances(run: Assembly) -> dict[str, object]:
    packages = ("vit-tp", "torch", "deepspeed", "timm")
    return {
        "world_size": run.groups.topology.world_size,
        "grid": asdict(run.groups.topology),
        "dtype": run.config.compute.dtype,
        "device": run.device.type,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
            **_decoder(run),
        },
    }


def _decoder(run: Assembly) -> dict[str, str]:
    """Return what decoded videos: another decoder may give other pixels."""
    if not run.data.spec.is_video:
        return {}
    data = run.config.data
    return {"decoder": decoder_version(choose_decoder(data.decoder, data.decoder_device))}
