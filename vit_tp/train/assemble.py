"""From a config and a place in the grid to everything that trains or evaluates."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vit_tp.checkpoint.export import fill_from
from vit_tp.checkpoint.pretrained import start_from
from vit_tp.config import BatchPlan, Config, DataConfig, batch_plan, eval_batch_plan, run_folder
from vit_tp.config.sizes import resolution_schedule
from vit_tp.data.sources import describe
from vit_tp.data.spec import DataSpec
from vit_tp.models.build import build_model, input_shape
from vit_tp.models.dtypes import DTYPES
from vit_tp.models.stages import stage_names
from vit_tp.models.weights import FirstWeights
from vit_tp.parallel.groups import Groups, build_groups, limit_waiting
from vit_tp.parallel.topology import Topology
from vit_tp.recipe.optimizer import build_optimizer, is_frozen, param_groups
from vit_tp.recipe.schedule import build_schedule
from vit_tp.sharding.cutting import cutting_of
from vit_tp.sharding.plugins import load_plugins
from vit_tp.tasks.classification import Classification, build_task
from vit_tp.train.engine import VitEngine, evaluator, initialize
from vit_tp.train.feed import Feed
from vit_tp.train.pipeline import pipeline
from vit_tp.train.run_data import RunData


@dataclass
class Assembly:
    """One rank's parts of a run.

    Args:
        config: The run.
        plan: Sizes of the batches.
        groups: This rank's peers.
        device: Where it computes.
        data: What it reads.
        task: Loss and figures; where the loss is its sums are filled.
        engine: DeepSpeed's, with our sums and norm.
        feed: Where the engine's batches come from.
        all_stages: Names of all stages of the model.
    """

    config: Config
    plan: BatchPlan
    groups: Groups
    device: torch.device
    data: RunData
    task: Classification
    engine: VitEngine
    feed: Feed
    all_stages: list[str]

    @property
    def total_steps(self) -> int:
        recipe = self.config.recipe
        whole = self.data.steps_per_epoch * recipe.epochs
        return whole if recipe.max_steps is None else min(whole, recipe.max_steps)

    def schedule(self) -> Any:
        """Return the learning rate's course over this run's optimizer."""
        recipe = self.config.recipe
        return build_schedule(self.engine.optimizer, recipe.schedule, self.data.steps_per_epoch, self.total_steps)

    def arrange_for_(self, step: int | None) -> None:
        """Arrange engine and stages for the images of a training step, or of an evaluation (None)."""
        if self.config.recipe.resolution_schedule and self.engine.module.arrange_(self.data.size_at(step)):
            self.engine.reset_activation_shape()


def assemble(
    config: Config,
    topology: Topology,
    device: torch.device,
    weights: Path | None = None,
    log_folder: Path | None = None,
) -> Assembly:
    """Build one rank's parts. Collective over the world.

    Args:
        config: The run, checked.
        topology: The grid of ranks.
        device: This rank's.
        weights: Folder of exported weights to evaluate; None builds a run that trains, from model.pretrained
            or its first weights.
        log_folder: Where ranks note what they could not read; None: the run's.
    """
    load_plugins(config.plugins)
    spec = _describe_once(config.data)
    plan = (batch_plan if weights is None else eval_batch_plan)(config, topology.dp)
    resolutions = resolution_schedule(config)
    model = build_model(config.model, spec.num_classes, spec.in_chans, is_resized=bool(resolutions))
    for name, param in model.named_parameters():
        param.requires_grad_(not is_frozen(name, config.recipe.freeze))
    timeout = timedelta(seconds=config.compute.timeout_s)
    groups = build_groups(topology, timeout)
    chosen = cutting_of(config)
    cutting = chosen.with_columns(chosen.require(model, topology.tp), topology.tp)
    task = build_task(config, spec.num_classes, None if cutting.gather_logits else groups.tp_group)
    drawn = FirstWeights(config.run.seed)
    if weights is None:
        fill = start_from(config.model, spec.num_classes, spec.in_chans, drawn)
    else:
        fill = fill_from(weights, drawn)
    pipe = pipeline(
        model,
        topology,
        task,
        schedule=config.parallel.schedule,
        partition=config.parallel.partition,
        embed_weight=config.parallel.embed_weight,
        head_weight=config.parallel.head_weight,
        **vars(cutting),
        img_sizes=[size for _, size in resolutions],
        seed=config.run.seed,
        fill=fill,
        groups=groups,
    )
    if weights is None:
        chosen = config.recipe.optimizer
        by_decay = param_groups(pipe.named_timm_parameters(), pipe.no_decay, chosen.weight_decay)
        engine = initialize(pipe, deepspeed_config(config, plan), build_optimizer(chosen, by_decay), timeout)
    else:
        engine = evaluator(pipe, plan.micro_batch_size, DTYPES[config.compute.dtype])
        limit_waiting(timeout)
    _, _, *input_size = input_shape(model, 1)
    feed = Feed(groups, device, pipe.schedule.loss_rank(topology.pp))
    log_folder = log_folder or run_folder(config).log
    data = RunData(config, spec, plan, groups, device, tuple(input_size), log_folder, feed.is_reader)
    return Assembly(config, plan, groups, device, data, task, engine, feed, stage_names(model))


def _describe_once(data: DataConfig) -> DataSpec:
    """Let rank 0 look at the data for all: a thousand ranks listing a million files would take down a file server."""
    found = [describe(data) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def deepspeed_config(config: Config, plan: BatchPlan) -> dict[str, Any]:
    """Return what the recipe says in DeepSpeed's words."""
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.grad_accum_steps,
        "gradient_clipping": config.recipe.clip_grad,
        "bf16": {"enabled": config.compute.dtype == "bf16"},
        "fp16": {"enabled": config.compute.dtype == "fp16"},
    }
