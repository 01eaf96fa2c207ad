"""What does a stage cost, and which stages does each pipeline rank hold? Counted on meta."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vit_tp.config.schedules import SCHEDULES
from vit_tp.errors import ConfigError
from vit_tp.models.build import input_shape
from vit_tp.models.partition import explicit, partition, weighted
from vit_tp.models.stages import WHOLE, build_stage, num_blocks, stage_names


def stage_parameters(model: nn.Module) -> list[int]:
    """Return the number of parameters of each stage, in order."""
    return [sum(p.numel() for p in build_stage(model, name).inner.parameters()) for name in stage_names(model)]


def stage_flops(model: nn.Module) -> list[int]:
    """Return the floating-point operations of each stage's forward on one image, in order. The model is on meta."""
    x, flops = torch.empty(input_shape(model, 1), device="meta"), []
    for name in stage_names(model):
        stage = copy.deepcopy(build_stage(model, name))  # ConVit's forward puts a larger buffer in its model
        with FlopCounterMode(display=False) as counter:  # its module hooks need gradients on
            x = stage(x).detach()
        flops.append(counter.get_total_flops())
    return flops


COSTS = {"parameters": stage_parameters, "flops": stage_flops}


def stage_bounds(
    model: nn.Module,
    pp: int,
    by: str | Sequence[int] = "parameters",
    embed_weight: float | None = None,
    head_weight: float | None = None,
    schedule: str = "1f1b",
) -> list[int]:
    """Return the boundaries of the chunks that pipeline ranks hold in the flat list of stages.

    Args:
        model: A whole timm model; on meta where `by` is "flops".
        pp: Pipeline ranks.
        by: "parameters" or "flops", to balance; or the first block of each chunk.
        embed_weight: Cost of the embedding in mean blocks, instead of the counted one.
        head_weight: The same for the head.
        schedule: Says how many chunks there are; under "1f1b" one for each pipeline rank.

    Returns:
        One index more than chunks; chunk c is stages [b[c], b[c + 1]) of `stage_names(model)`.

    Raises:
        ConfigError: If the model has no stage layout or too few blocks, the list does not fit it, or the schedule is
            unknown.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"schedule={schedule!r} is not known; there are {', '.join(SCHEDULES)}. Use for example schedule='1f1b'."
        )
    chunks = SCHEDULES[schedule].num_chunks(pp)
    asked = f"parallel.pp={pp}" + (f" with parallel.schedule={schedule}" if chunks > pp else "")
    if stage_names(model) == [WHOLE]:
        if chunks > 1:
            raise ConfigError(
                f"{asked} needs blocks that pass on one tensor, and those of {type(model).__name__} are not one list "
                f"of them (two streams, or a class without a stage layout). "
                f"Use parallel.pp=1{' parallel.schedule=1f1b' if chunks > pp else ''} and parallel.tp."
            )
        return [0, 1]
    blocks = num_blocks(model)
    if chunks > max(pp, blocks):
        fewer = f"parallel.pp={blocks * pp // chunks} or less, or " if blocks * pp >= chunks else ""
        raise ConfigError(
            f"{asked} cuts the model into {chunks} runs of blocks, {chunks // pp} on each stage's ranks, and it has "
            f"{blocks} blocks. Use {fewer}parallel.schedule=1f1b."
        )
    if not isinstance(by, str):
        return explicit(by, blocks, chunks)
    return partition(weighted(COSTS[by](model), embed_weight, head_weight), chunks)
