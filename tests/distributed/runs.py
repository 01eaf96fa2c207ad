"""Whole runs on the digits in a gloo world, through the same assembly as `vit-tp train`, with what each rank saw."""

from __future__ import annotations

import hashlib
import io
import time
from pathlib import Path
from typing import Any

from vit_tp.config import Config

DIGITS_VIT = {
    "patch_size": 2, "embed_dim": 32, "depth": 4, "num_heads": 4, "class_token": False, "global_pool": "avg",
}  # fmt: skip


def digits_config(**overrides: Any) -> Config:
    """A small run; overrides are dotted names with __ for the dot."""
    config = Config()
    config.model.img_size, config.model.kwargs = 8, dict(DIGITS_VIT)
    config.recipe.global_batch_size, config.recipe.max_steps = 32, 6
    config.log.progress = config.log.tensorboard = False
    config.log.every_steps = 1
    for name, value in overrides.items():
        *path, last = name.split("__")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return config


def train_digits(pp: int, dp: int, tp: int, run_dir: str, overrides: dict[str, Any], export: bool = False) -> dict:
    """Train on this rank; return the run's figures and what this rank read, received and held."""
    import torch
    import torch.distributed as dist

    from vit_tp.checkpoint.export import save_weights
    from vit_tp.data.digits import Digits
    from vit_tp.parallel.topology import Topology
    from vit_tp.report.metrics import read_metrics
    from vit_tp.train.assemble import assemble
    from vit_tp.train.communication import start_communication
    from vit_tp.train.engine import full_precision
    from vit_tp.train.loop import train
    from vit_tp.train.recorder import Recorder

    config = digits_config(**overrides, parallel__pp=pp, parallel__dp=dp, parallel__tp=tp)
    run = assemble(config, Topology(pp, dp, tp), start_communication())
    read: list[tuple[str, int, int]] = []
    load = Digits.load
    split = {1437: "train", 360: "val"}

    def counted(self: Digits, key):
        read.append((split[len(self)], key.epoch, key.index))
        return load(self, key)

    Digits.load = counted
    images, targets, generators = [], [], []
    step = run.feed.step

    def watched(batches, num_micro_batches, preparation):
        generators.append(_digest(torch.get_rng_state()))
        pairs = step(batches, num_micro_batches, preparation)
        return None if pairs is None else _watch(pairs, images, targets)

    run.feed.step = watched
    is_writer = dist.get_rank() == 0
    recorder = Recorder(
        Path(run_dir), config.log, run.total_steps, run.data.steps_per_epoch, run.plan.global_batch_size, io.StringIO(),
        is_writer, time.perf_counter(),
    )  # fmt: skip
    figures = train(run, recorder)
    recorder.close()
    if export:
        stages = run.engine.module.saved_stages
        save_weights(Path(run_dir) / "export", stages, run.all_stages, run.groups, full_precision(run.engine))
    metrics = read_metrics(Path(run_dir)) if is_writer else []
    return {
        "figures": figures,
        "losses": [m["loss"] for m in metrics if "loss" in m],
        "metrics": metrics,
        "read": read,
        "images": images,
        "targets": targets,
        "generators": generators,
        "place": tuple(run.groups.place),
        "global_samples": run.engine.global_samples,
        "plan": run.plan,
    }


def eval_digits(pp: int, dp: int, tp: int, run_dir: str, overrides: dict[str, Any]) -> dict[str, float]:
    """Evaluate the exported weights of a run on this rank."""
    from vit_tp.parallel.topology import Topology
    from vit_tp.train.assemble import assemble
    from vit_tp.train.communication import start_communication
    from vit_tp.train.evaluate import evaluate

    config = digits_config(**overrides, parallel__pp=pp, parallel__dp=dp, parallel__tp=tp)
    return evaluate(assemble(config, Topology(pp, dp, tp), start_communication(), Path(run_dir) / "export"))


def _watch(pairs, images: list[str], targets: list[str]):
    for image, target in pairs:
        images.append(_digest(image))
        targets.append(_digest(target))
        yield image, target


def _digest(tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest() if tensor.numel() else ""
