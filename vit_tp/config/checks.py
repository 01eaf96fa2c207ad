"""check(): types, ranges, names and combinations that can be judged without a model, all complaints at once.

Does not know: heads, blocks, images, devices. What needs timm is asked by train/preflight.py, what needs devices by
launch/commands.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vit_tp.config.batch import batch_plan
from vit_tp.config.checks_data import data_complaints
from vit_tp.config.checks_input import input_complaints
from vit_tp.config.convert import from_dict, to_dict
from vit_tp.config.limits import DECIDED_ELSEWHERE, LAYERWISE_OPTIMIZERS, NAMES, RANGES, RECOMPUTE
from vit_tp.config.schedules import SCHEDULES
from vit_tp.config.schema import Config
from vit_tp.config.types import close_names, show
from vit_tp.errors import ConfigError


def check(config: Config, training: bool = True) -> None:
    """Refuse a configuration that cannot work, whatever model and machine it meets.

    Args:
        config: The whole configuration.
        training: Whether it is to train; an evaluation need not divide the global batch.

    Raises:
        ConfigError: Every complaint, each ending with the override to type.
    """
    typed = from_dict(to_dict(config))  # a wrong type would make the questions below meaningless
    complaints = [*_plugins(typed), *_names(typed), *_ranges(typed), *_run(typed), *_model(typed)]
    complaints += [*input_complaints(typed)]
    complaints += [*data_complaints(typed), *_recipe(typed), *_parallel(typed), *_activations(typed)]
    if training:  # an evaluation takes the run's own weights, and what it started from may be gone
        complaints += _pretrained(typed)
    if training and _has_countable_batches(typed):
        complaints += _batch(typed)
    if complaints:
        raise ConfigError(complaints)


def read(config: Config, path: str) -> Any:
    """Return the value of a dotted knob."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _names(config: Config) -> Iterator[str]:
    for path, known in NAMES.items():
        name = read(config, path)
        if path == "recipe.optimizer.name" and name.lower() in LAYERWISE_OPTIMIZERS:
            yield (
                f"{path}={name} takes its step from whole layers; ZeRO gives an optimizer flat slices of many layers, "
                f"so its result would depend on the number of ranks. Use {path}={known[0]}, or one of "
                f"{', '.join(known[1:])}."
            )
        elif name not in known:
            close = close_names(name, known)
            advice = f"Did you mean {path}={close[0]}?" if close else f"Use for example {path}={known[0]}."
            yield f"{path}={name} is not known; there are {', '.join(known)}. {advice}"


def _ranges(config: Config) -> Iterator[str]:
    for path, (low, high, closed) in RANGES.items():
        value = read(config, path)
        if value is None:
            continue
        is_above = math.isfinite(value) and (value > low or (closed and value == low))
        if is_above and (high is None or value <= high):
            continue
        bound = f"{'at least' if closed else 'more than'} {low}" + (f" and at most {high}" if high is not None else "")
        is_too_low = math.isfinite(value) and value <= low
        example = high if high is not None and not (is_too_low and closed) else low if closed else 0.001
        yield f"{path}={show(value)} is out of range; it must be {bound}. Use for example {path}={example}."


def _run(config: Config) -> Iterator[str]:
    name = config.run.name
    leaf = name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
    if "/" in name or "\\" in name:
        yield (
            f"run.name={name} has a path separator; the run's folder is <run.dir>/<run.name>. "
            f"Use run.dir=<folder> and run.name={leaf or 'run'}."
        )
    elif name in ("", ".", "..") or name != name.strip():
        yield (
            f"run.name={name!r} does not name a folder; the run's folder is <run.dir>/<run.name>. "
            f"Use for example run.name=run."
        )
    if not config.run.dir.strip():
        yield "run.dir is empty; runs need a folder. Use for example run.dir=runs."


def _model(config: Config) -> Iterator[str]:
    if not config.model.timm.strip():
        yield "model.timm is empty; nothing says which model. Use for example model.timm=vit_tiny_patch16_224."
    for key, reason in DECIDED_ELSEWHERE.items():
        if key in config.model.kwargs:
            yield f"model.kwargs.{key}={show(config.model.kwargs[key])} cannot be given; {reason}."


def _plugins(config: Config) -> Iterator[str]:
    for name in config.plugins:
        if not all(part.isidentifier() for part in name.split(".")) or name.endswith(".py"):
            module = Path(name).stem
            yield (
                f"plugins={show(config.plugins)}: {name!r} is not the name of a module; plugins are imported, from the "
                f"working directory or the installed packages. Use for example plugins=[{module or 'my_blocks'}]."
            )


def _pretrained(config: Config) -> Iterator[str]:
    start = config.model.pretrained
    if start is None or start is True:
        return
    if not isinstance(start, str) or not start.strip():
        yield (
            f"model.pretrained={show(start)} is neither true nor a file; there is nothing to start from. "
            f"Use model.pretrained=true, model.pretrained=<file>, or model.pretrained=null."
        )
    elif not Path(start).expanduser().is_file():
        yield (
            f"model.pretrained={start} is not a file (looked for from {Path.cwd()}); weights are read from one. "
            f"Use model.pretrained=<existing .safetensors, .pth, .pt or .bin>, or model.pretrained=true."
        )


def _recipe(config: Config) -> Iterator[str]:
    optimizer, schedule, epochs = config.recipe.optimizer, config.recipe.schedule, config.recipe.epochs
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        yield (
            f"recipe.optimizer.betas={show(optimizer.betas)} are not two momenta; each must be at least 0 and below 1. "
            f"Use for example recipe.optimizer.betas=[0.9,0.999]."
        )
    if optimizer.momentum == 1:
        yield (
            "recipe.optimizer.momentum=1 never forgets a gradient; it must be below 1. "
            "Use for example recipe.optimizer.momentum=0.9."
        )
    if schedule.warmup_epochs > epochs >= 1:
        yield (
            f"recipe.schedule.warmup_epochs={schedule.warmup_epochs:g} is longer than recipe.epochs={epochs}; "
            f"the learning rate would never arrive. Use recipe.schedule.warmup_epochs={epochs} or less."
        )
    for knob in ("warmup_lr", "min_lr"):
        value = getattr(schedule, knob)
        if value > optimizer.lr > 0:
            yield (
                f"recipe.schedule.{knob}={value:g} is above recipe.optimizer.lr={optimizer.lr:g}, the peak; "
                f"the schedule would run the wrong way. Use recipe.schedule.{knob}={optimizer.lr / 100:g}."
            )
    if any(not pattern.strip() for pattern in config.recipe.freeze):
        yield (
            f"recipe.freeze={show(config.recipe.freeze)} has an empty pattern; it would match nothing. "
            f"Use for example recipe.freeze=[blocks.0.*]."
        )
    if config.compute.dtype == "fp16" and config.compute.device == "cpu":
        yield (
            "compute.dtype=fp16 does not run with compute.device=cpu; DeepSpeed refuses fp16 there. "
            "Use compute.dtype=bf16 or compute.dtype=fp32."
        )


def _parallel(config: Config) -> Iterator[str]:
    partition, pp, schedule = config.parallel.partition, config.parallel.pp, config.parallel.schedule
    if partition in ("parameters", "flops"):
        return
    shown, even = f"parallel.partition={show(partition)}", "parallel.partition=parameters"
    if not isinstance(partition, list) or not partition or not all(type(block) is int for block in partition):
        yield (
            f"{shown} is not known; it is parameters, flops, or a list with the first block of each stage. "
            f"Use {even}, or for example parallel.pp=2 parallel.partition=[0,6]."
        )
        return
    per_rank = SCHEDULES[schedule].chunks_per_rank if schedule in SCHEDULES else 1
    if len(partition) != pp * per_rank:
        doubled = f" with parallel.schedule={schedule} has {pp * per_rank}" if per_rank > 1 else ""
        ranks = f"parallel.pp={len(partition) // per_rank} or " if len(partition) % per_rank == 0 else ""
        yield (
            f"{shown} has {len(partition)} stages, parallel.pp={pp}{doubled}; each stage has one first block. "
            f"Use {ranks}{even}."
        )
    if partition[0] != 0:
        yield (
            f"{shown} does not start at block 0; no stage would hold the first blocks. "
            f"Use parallel.partition={show([0, *partition[1:]])} or {even}."
        )
    if any(later <= earlier for earlier, later in zip(partition, partition[1:], strict=False)):
        yield (
            f"{shown} does not grow; each stage needs at least one block. "
            f"Use for example parallel.partition={show(list(range(len(partition))))} or {even}."
        )


def _activations(config: Config) -> Iterator[str]:
    recompute = config.compute.recompute
    is_every = type(recompute) is int and recompute >= 0
    if recompute not in RECOMPUTE and not is_every:
        yield (
            f"compute.recompute={show(recompute)} is not known; it is {', '.join(RECOMPUTE)}, or a whole number N to "
            f"recompute every Nth block (0: none). Use for example compute.recompute=block, or compute.recompute=2."
        )
    if config.recipe.sync == "partial" and config.parallel.sequence:
        yield (
            "recipe.sync=partial gives each rank all tokens of a stream of its own, parallel.sequence=true some tokens "
            "of one stream; both cannot be. Use parallel.sequence=false, or recipe.sync=exact."
        )
    if config.recipe.sync == "partial" and config.parallel.indivisible != "refuse":
        yield (
            f"parallel.indivisible={config.parallel.indivisible} computes some modules whole on every rank, and under "
            f"recipe.sync=partial each rank would feed them another stream. Use parallel.indivisible=refuse."
        )


def _has_countable_batches(config: Config) -> bool:
    """Say whether sizes are in range and the schedule is known, so that it makes sense to ask whether they divide."""
    compute, whole = config.compute, config.recipe.global_batch_size
    sizes = (whole, compute.micro_batch_size, compute.eval_micro_batch_size, config.parallel.dp)
    sizes += (config.data.eval_clips, config.data.eval_crops)
    return config.parallel.schedule in SCHEDULES and all(size is None or size >= 1 for size in sizes)


def _batch(config: Config) -> Iterator[str]:
    # Devices are not counted here: with parallel.dp=null the launcher asks batch_plan again with the real number.
    try:
        plan = batch_plan(config, config.parallel.dp or 1)
    except ConfigError as error:
        yield from error.complaints
        return
    mixing, micro = config.recipe.mixing, plan.micro_batch_size
    if (mixing.mixup_alpha > 0 or mixing.cutmix_alpha > 0 or mixing.cutmix_minmax is not None) and micro % 2:
        yield (
            f"compute.micro_batch_size={micro} is odd; mixup and cutmix mix images in pairs. "
            f"Use compute.micro_batch_size={micro + 1} and a recipe.global_batch_size that it divides, "
            f"or recipe.mixing.mixup_alpha=0 recipe.mixing.cutmix_alpha=0."
        )
