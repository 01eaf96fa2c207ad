"""Can this run work? Asked in the launching process, with timm on meta, before any rank starts.

All complaints at once. A check that needs the result of one that failed is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from vit_tp.checkpoint.pretrained import open_pretrained
from vit_tp.config import BatchPlan, Config, DataConfig, batch_plan, check, eval_batch_plan
from vit_tp.config.limits import STREAM_SOURCES
from vit_tp.config.schedules import SCHEDULES
from vit_tp.config.sizes import resolution_schedule
from vit_tp.config.types import show
from vit_tp.data.order import steps_per_epoch
from vit_tp.data.sources import describe
from vit_tp.data.spec import DataSpec
from vit_tp.data.stream_order import choose_num_streams
from vit_tp.errors import ConfigError, VitTpError
from vit_tp.models.build import build_model, input_shape
from vit_tp.models.costs import stage_bounds
from vit_tp.models.dtypes import DTYPES, require_castable
from vit_tp.models.sizes import arrange
from vit_tp.models.stages import build_stage, stage_names
from vit_tp.parallel.topology import Topology
from vit_tp.plan.limits import DeviceMemory
from vit_tp.recipe.mixing import Mixer
from vit_tp.recipe.optimizer import is_frozen
from vit_tp.sharding.catalogue import require_cuttable
from vit_tp.sharding.cutting import cutting_of
from vit_tp.sharding.plugins import load_plugins
from vit_tp.train.describe import describe_run
from vit_tp.train.fit import Memory, Need


@dataclass(frozen=True)
class Preflight:
    """What will run.

    Args:
        topology: The grid.
        plan: Sizes of the batches.
        spec: Sizes of the data set.
        bounds: Where the chunks of stages begin and end; under 1F1B pipeline rank r holds chunk r.
        lines: The same for a person, where it is a training.
    """

    topology: Topology
    plan: BatchPlan
    spec: DataSpec
    bounds: list[int]
    lines: list[str]


class _Complaints(list[str]):
    """Collects the sentences of what is refused inside a `with` block."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, VitTpError):
            return False
        self.extend(error.complaints if isinstance(error, ConfigError) else [str(error)])
        return True


def preflight(config: Config, training: bool = True, memory: DeviceMemory | None = None) -> Preflight:
    """Check a run against its data and its model.

    Args:
        config: The run, past `check()`; parallel.dp null counts as 1.
        training: False to evaluate only, where any batch size will do.
        memory: What ranks may take; None where nobody asked.

    Raises:
        ConfigError: With every complaint.
    """
    parallel = config.parallel
    topology = Topology(parallel.pp, parallel.dp or 1, parallel.tp)
    complaints = _Complaints()
    spec = plan = model = bounds = matches = None
    load_plugins(config.plugins)
    with complaints:
        plan = (batch_plan if training else eval_batch_plan)(config, topology.dp)
    with complaints:
        spec = describe(config.data)
    if spec and plan and training:
        with complaints:
            steps_per_epoch(spec.num_train, plan.global_batch_size)
        with complaints:
            _require_batches(config, plan, spec)
    if spec:
        with complaints:
            require_cuttable(config.model.timm)
            model = build_model(config.model, spec.num_classes, spec.in_chans, bool(resolution_schedule(config)))
    for _, size in resolution_schedule(config) if model is not None else ():
        with complaints:
            arrange(model, size)
    start = None
    if model is not None and training and config.model.pretrained is not None:
        with complaints:
            start = open_pretrained(config.model, spec.num_classes, spec.in_chans).describe()
        with complaints:
            _require_pixels_as_pretrained(model, config.data, spec)
    has_sound_model, earlier = model is not None, len(complaints)
    if model is not None:
        with complaints:
            require_castable(model, DTYPES[config.compute.dtype])
        with complaints:
            bounds = _bounds(model, config)
        with complaints:
            matches = cutting_of(config).require(model, topology.tp)
    if bounds and training:
        with complaints:
            _require_trainable(model, bounds, config)
    if bounds:
        with complaints:
            _require_logits(model, spec.num_classes)
    need = ""
    if training and plan and has_sound_model and len(complaints) == earlier:
        with complaints:
            need = _require_memory(config, model, spec, memory)
    if complaints:
        raise ConfigError(list(dict.fromkeys(complaints)))
    lines = describe_run(config, topology, plan, spec, model, bounds, matches, need) if training else []
    lines += [f"weights   {start}"] if start else []
    return Preflight(topology, plan, spec, bounds, lines)


def _bounds(model: nn.Module, config: Config) -> list[int]:
    parallel = config.parallel
    return stage_bounds(
        model,
        parallel.pp,
        parallel.partition,
        parallel.embed_weight,
        parallel.head_weight,
        parallel.schedule,
    )


def _require_batches(config: Config, plan: BatchPlan, spec: DataSpec) -> None:
    mixer = Mixer(config.recipe.mixing, config.recipe.smoothing, spec.num_classes)
    mixer.check_micro_batch_size(plan.micro_batch_size)
    if config.data.source in STREAM_SOURCES:
        choose_num_streams(config.data.num_streams, plan.global_batch_size, plan.dp_size)


def _require_memory(config: Config, model: nn.Module, spec: DataSpec, device: DeviceMemory | None) -> Need | str:
    """Return what the run needs, or why nobody knows: models of others need not run backward on meta."""

    def lay_out(changed: Config) -> tuple[BatchPlan, list[int]]:
        check(changed)
        plan, bounds = batch_plan(changed, changed.parallel.dp or 1), _bounds(model, changed)
        _require_batches(changed, plan, spec)
        cutting_of(changed).require(model, changed.parallel.tp)
        _require_trainable(model, bounds, changed)
        return plan, bounds

    memory = Memory(model, config, device, lay_out)
    try:
        need = memory.need(config)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, VitTpError):
            raise
        return f"not estimated: backward does not run on meta ({type(error).__name__}: {error})".partition("\n")[0]
    memory.require(need)
    return need


def _require_pixels_as_pretrained(model: nn.Module, data: DataConfig, spec: DataSpec) -> None:
    """Weights expect pixels scaled as in their training, and not all of them as ImageNet's are by default."""
    if spec.in_chans != 3:
        return
    cfg = model.pretrained_cfg
    wanted = {"mean": list(cfg["mean"]), "std": list(cfg["std"])}
    usual = {"mean": list(IMAGENET_DEFAULT_MEAN), "std": list(IMAGENET_DEFAULT_STD)}
    missing = [name for name in wanted if getattr(data, name) is None and wanted[name] != usual[name]]
    if missing:
        typed = " ".join(f"data.{name}={show(wanted[name])}" for name in missing)
        raise ConfigError(
            f"timm's weights of this name were trained on pixels with other data.{' and data.'.join(missing)} than "
            f"ImageNet's, which images would be scaled by; they would see colours that they never saw. "
            f"Use {typed}, or the values of your own file."
        )


def _require_trainable(model: nn.Module, bounds: list[int], config: Config) -> None:
    """Every pattern must mean something, and every pipeline rank makes an optimizer of its own, which is not empty."""
    freeze, order, pp = config.recipe.freeze, SCHEDULES[config.parallel.schedule], config.parallel.pp
    idle = [
        pattern for pattern in freeze if not any(is_frozen(name, [pattern]) for name, _ in model.named_parameters())
    ]
    if idle:
        raise ConfigError(
            f"recipe.freeze={idle} fits no parameter of this model, so it would freeze nothing. Use timm's names, such "
            f"as {', '.join(name for name, _ in list(model.named_parameters())[:3])} or blocks.0.*."
        )
    names = stage_names(model)
    for rank in range(pp):
        runs = [names[bounds[chunk] : bounds[chunk + 1]] for chunk in order.chunks_of(rank, pp)]
        held = (name for run in runs for stage in run for name, _ in _stage_parameters(model, stage))
        if all(is_frozen(name, freeze) for name in held):
            raise ConfigError(
                f"recipe.freeze={freeze} leaves pipeline stage {rank} "
                f"({' and '.join(f'{run[0]} to {run[-1]}' for run in runs)}) of parallel.pp={pp} "
                f"without a trainable parameter, and each stage's optimizer needs one. "
                f"Use parallel.pp=1, freeze less, or give that stage a trainable block with parallel.partition=[...]."
            )


def _stage_parameters(model: nn.Module, stage: str) -> list[tuple[str, nn.Parameter]]:
    return list(build_stage(model, stage).named_timm_parameters())


def _require_logits(model: nn.Module, num_classes: int) -> None:
    """The task wants one row of logits for each image."""
    if model.num_classes != num_classes:
        raise ConfigError(
            f"{type(model).__name__} is an encoder without a classifier, and classification into {num_classes} classes "
            f"needs one. Use a model.timm that has one; timm names encoders *_enc."
        )
    x = torch.empty(input_shape(model, 2), device="meta")
    try:
        for stage in stage_names(model):
            x = build_stage(model, stage)(x)
    except ConfigError:  # a sentence of ours, whole
        raise
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"the model's forward fails on its own input size: {error}. Change model.kwargs.") from error
    if tuple(x.shape) != (2, num_classes):
        raise ConfigError(
            f"the model gives {tuple(x.shape)} for 2 images and {num_classes} classes; classification needs one row of "
            f"logits for each image. Use a model.kwargs.global_pool that pools, such as avg or token."
        )
