"""What a run will be, in lines for a person."""

from __future__ import annotations

from torch import nn

from vit_tp.config import BatchPlan, Config, region_name
from vit_tp.config.types import show
from vit_tp.data.order import steps_per_epoch
from vit_tp.data.spec import DataSpec
from vit_tp.models.build import input_shape
from vit_tp.models.dtypes import DTYPES
from vit_tp.models.stages import num_blocks
from vit_tp.parallel.topology import Topology
from vit_tp.plan.limits import GB
from vit_tp.plan.stages import StagePlan, plan_ranks, plan_stages
from vit_tp.sharding.indivisible import describe_kept
from vit_tp.sharding.matches import Match
from vit_tp.train.fit import Need


def _changed(config: Config) -> str:
    """Return in what a model differs from timm's of that name."""
    kwargs = [f"{name}={show(value)}" for name, value in config.model.kwargs.items() if value is not None]
    return f" with {', '.join(kwargs)}" if kwargs else ""


def _held(stages: list[StagePlan]) -> int:
    """Return how many parameters of the whole model one tensor-parallel rank would hold."""
    return sum(stage.num_params for stage in stages) + max(stage.num_table_params for stage in stages)


def _peak(need: Need | str, index: int) -> str:
    return f"; peak {need.peaks[index].peak_bytes / GB:.3g} GB" if isinstance(need, Need) else ""


def _memory(need: Need | str) -> str:
    if isinstance(need, str):
        return need
    room = "" if need.limit is None else f" of {need.room / GB:.3g} GB: {need.limit.describe(need.num_ranks)}"
    return f"tensors of a rank take at most {need.peak_bytes / GB:.3g} GB{room}"


def describe_run(
    config: Config,
    topology: Topology,
    plan: BatchPlan,
    spec: DataSpec,
    model: nn.Module,
    bounds: list[int],
    matches: list[Match],
    need: Need | str,
) -> list[str]:
    """Return the plan of a training, one line for each thing; `need` may say why it is not known."""
    params = sum(p.numel() for p in model.parameters())
    parallel, dtype = config.parallel, DTYPES[config.compute.dtype]
    stages = plan_stages(
        model,
        plan.micro_batch_size,
        topology.tp,
        dtype,
        parallel.cut_head_from,
        parallel.indivisible,
        region_name(config),
        config.recipe.sync_fraction,
        config.compute.recompute,
    )
    kept = describe_kept(matches, topology.tp, _held(stages), params)
    steps = steps_per_epoch(spec.num_train, plan.global_batch_size)
    _, chans, height, width = input_shape(model, 1)
    return [
        f"model     {config.model.timm}{_changed(config)}: {params / 1e6:.2f} M parameters, "
        f"{num_blocks(model)} blocks, input {chans} x {height} x {width}",
        f"grid      tp={topology.tp} x pp={topology.pp} x dp={topology.dp} = {topology.world_size} processes, "
        f"{config.compute.dtype}",
        *([f"whole     {kept}"] if kept else []),
        *(
            f"stage {index:<3} {rank.first} .. {rank.last}: each rank holds {rank.num_params / 1e6:.2f} M parameters "
            f"and at most {rank.micro_batches} micro-batches, {rank.activation_bytes / 2**20:.1f} MiB of activations"
            f"{_peak(need, index)}"
            for index, rank in enumerate(plan_ranks(stages, bounds, plan.grad_accum_steps))
        ),
        f"memory    {_memory(need)}",
        f"batch     {plan.global_batch_size} = {plan.micro_batch_size} samples x {plan.grad_accum_steps} micro-batches "
        f"x {plan.dp_size} replicas",
        f"data      {config.data.source}: {spec.num_train} training and {spec.num_val} validation samples, "
        f"{spec.num_classes} classes, {steps} steps an epoch "
        f"({spec.num_train - steps * plan.global_batch_size} left over)",
    ]
