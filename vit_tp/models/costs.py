"""What does a stage cost, and which stages does each pipeline rank hold? Counted on meta."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

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
) -> list[int]:
    """Return the boundaries of the pipeline ranks in the flat list of stages.

    Args:
        model: A whole timm model; on meta where `by` is "flops".
        pp: Pipeline ranks.
        by: "parameters" or "flops", to balance; or the first block of each pipeline rank.
        embed_weight: Cost of the embedding in mean blocks, instead of the counted one.
        head_weight: The same for the head.

    Returns:
        pp + 1 indices; pipeline rank r holds stages [b[r], b[r + 1]) of `stage_names(model)`.

    Raises:
        ConfigError: If the model has no stage layout, too few blocks, or the list does not fit it.
    """
    if stage_names(model) == [WHOLE]:
        if pp > 1:
            raise ConfigError(
                f"parallel.pp={pp} needs blocks that pass on one tensor, and those of {type(model).__name__} are not "
                f"one list of them (two streams, or a class without a stage layout). Use parallel.pp=1 and parallel.tp."
            )
        return [0, 1]
    if not isinstance(by, str):
        return explicit(by, num_blocks(model), pp)
    return partition(weighted(COSTS[by](model), embed_weight, head_weight), pp)
