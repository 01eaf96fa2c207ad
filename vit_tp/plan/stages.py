"""What does each rank hold: how many parameters, and how many bytes of activations for its backward passes?

Counted, not modelled: a stage's forward runs on meta and what autograd saves is added up. Does not know: devices, the
memory of gradients and optimizers, what is alive for a moment only (peak.py).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from vit_tp.config.schedules import SCHEDULES
from vit_tp.models.build import input_shape
from vit_tp.models.stages import BlockStage, build_stage, stage_names
from vit_tp.parallel.groups import StandIn
from vit_tp.plan.live import FusedAttention
from vit_tp.sharding.cutting import DEFAULT_CUTTING, Cutting
from vit_tp.sharding.stages import cut_stage_


@dataclass(frozen=True)
class StagePlan:
    """One stage as one tensor-parallel rank holds it.

    Args:
        name: Of the stage.
        num_params: Parameters of its slice.
        activation_bytes: What one micro-batch's forward leaves saved.
        num_table_params: Parameters of tables that it shares with the other blocks of its rank.
    """

    name: str
    num_params: int
    activation_bytes: int
    num_table_params: int = 0


def plan_stages(
    model: nn.Module,
    micro_batch_size: int,
    tp_size: int,
    dtype: torch.dtype,
    cutting: Cutting = DEFAULT_CUTTING,
) -> list[StagePlan]:
    """Return what one tensor-parallel rank would hold of each stage, in order.

    Args:
        model: A whole timm model on meta; it is left as it is.
        micro_batch_size: Samples of one forward pass, B.
        tp_size: Ranks that share each weight.
        dtype: Of weights and activations.
        cutting: How it is cut.
    """
    plans, exchange = [], cutting.build_region(StandIn(tp_size))
    x = torch.empty(input_shape(model, micro_batch_size), dtype=dtype, device="meta")
    for name in stage_names(model):
        stage = copy.deepcopy(build_stage(model, name)).to(dtype)
        tables = [stage.tables] if isinstance(stage, BlockStage) else []
        for part in (stage, *tables):
            cut_stage_(part, exchange, cutting)
        weights = {p.untyped_storage() for p in stage.parameters()}
        x = x.detach().requires_grad_(bool(plans))
        kept = {x.untyped_storage()} if getattr(stage, "is_recomputed", False) else set()  # checkpoint holds it itself
        x, saved = _forward_and_saved(stage, x)
        activation_bytes = sum(storage.nbytes() for storage in (saved | kept) - weights)
        own, shared = (sum(p.numel() for part in held for p in part.inner.parameters()) for held in ([stage], tables))
        plans.append(StagePlan(name, own, activation_bytes, shared))
    return plans


@dataclass(frozen=True)
class RankPlan:
    """One pipeline rank as one of its tensor-parallel ranks.

    Args:
        chunks: Names of the first and the last stage of each run of stages that it holds.
        num_params: Parameters that it holds.
        micro_batches: How many each run holds between forward and backward at most.
        activation_bytes: What they leave saved.
    """

    chunks: list[tuple[str, str]]
    num_params: int
    micro_batches: list[int]
    activation_bytes: int


def plan_ranks(
    stages: Sequence[StagePlan], bounds: Sequence[int], grad_accum_steps: int, schedule: str = "1f1b"
) -> list[RankPlan]:
    """Return what each pipeline rank would hold.

    Args:
        stages: From `plan_stages`.
        bounds: From `models.costs.stage_bounds`.
        grad_accum_steps: Micro-batches of a step.
        schedule: See `models.costs.stage_bounds`.
    """
    order = SCHEDULES[schedule]
    pp = (len(bounds) - 1) // order.chunks_per_rank
    plans = []
    for rank in range(pp):
        runs = [stages[bounds[chunk] : bounds[chunk + 1]] for chunk in order.chunks_of(rank, pp)]
        alive = order.live_micro_batches(rank, pp, grad_accum_steps)
        plans.append(
            RankPlan(
                [(run[0].name, run[-1].name) for run in runs],
                sum(s.num_params for run in runs for s in run) + max(s.num_table_params for run in runs for s in run),
                alive,
                sum(n * s.activation_bytes for n, run in zip(alive, runs) for s in run),
            )
        )
    return plans


def _forward_and_saved(stage: nn.Module, x: Tensor) -> tuple[Tensor, set[torch.UntypedStorage]]:
    saved = set()

    def note(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor), FusedAttention():
        return stage(x), saved
