"""From a config and a place in the grid to everything that trains or evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vit_tp.checkpoint.export import fill_from
from vit_tp.checkpoint.pretrained import start_from
from vit_tp.config import BatchPlan, Config, DataConfig, batch_plan, eval_batch_plan
from vit_tp.data.loader import Batch, train_batches
from vit_tp.data.order import steps_per_epoch
from vit_tp.data.sources import build_source, describe
from vit_tp.data.spec import DataSpec, Source
from vit_tp.models.build import build_model, input_shape
from vit_tp.models.dtypes import DTYPES
from vit_tp.models.stages import stage_names
from vit_tp.models.weights import FirstWeights
from vit_tp.parallel.groups import Groups, build_groups, limit_waiting
from vit_tp.parallel.rng import seed_from
from vit_tp.parallel.topology import Topology
from vit_tp.recipe.mixing import Mixer
from vit_tp.recipe.optimizer import build_optimizer, is_frozen, param_groups
from vit_tp.recipe.schedule import build_schedule
from vit_tp.sharding.cutting import cutting_of
from vit_tp.sharding.plugins import load_plugins
from vit_tp.tasks.classification import Classification, build_task
from vit_tp.train.engine import VitEngine, evaluator, initialize
from vit_tp.train.feed import Feed
from vit_tp.train.pipeline import pipeline


@dataclass
class Assembly:
    """One rank's parts of a run.

    Args:
        config: The run.
        spec: Sizes of the data set.
        plan: Sizes of the batches.
        groups: This rank's peers.
        device: Where it computes.
        task: Loss and figures; where the loss is its sums are filled.
        engine: DeepSpeed's, with our sums and norm.
        feed: Where the engine's batches come from.
        img_size: Height and width of the input in pixels.
        all_stages: Names of all stages of the model.
    """

    config: Config
    spec: DataSpec
    plan: BatchPlan
    groups: Groups
    device: torch.device
    task: Classification
    engine: VitEngine
    feed: Feed
    img_size: tuple[int, int]
    all_stages: list[str]

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.spec.num_train, self.plan.global_batch_size)

    @property
    def total_steps(self) -> int:
        recipe = self.config.recipe
        whole = self.steps_per_epoch * recipe.epochs
        return whole if recipe.max_steps is None else min(whole, recipe.max_steps)

    @cached_property
    def validation(self) -> Source:
        """The validation split, opened once; on ranks that read."""
        return build_source(self.config.data, "val", self.img_size, self.config.run.seed)

    def schedule(self) -> Any:
        """Return the learning rate's course over this run's optimizer."""
        return build_schedule(
            self.engine.optimizer, self.config.recipe.schedule, self.steps_per_epoch, self.total_steps
        )

    def training_batches(self, first_step: int = 0) -> Iterator[Batch] | None:
        """Return this replica's micro-batches, mixed as the recipe says, on the rank that reads; None elsewhere."""
        if not self.feed.is_reader:
            return None
        config, dp_rank = self.config, self.groups.place.dp
        batches = train_batches(
            build_source(config.data, "train", self.img_size, config.run.seed),
            plan=self.plan,
            dp_rank=dp_rank,
            seed=config.run.seed,
            first_step=first_step,
            last_step=self.total_steps,
            num_workers=config.data.num_workers,
        )
        mixer = Mixer(config.recipe.mixing, config.recipe.smoothing, self.spec.num_classes)
        return self._mixed(batches, mixer, first_step) if mixer.is_on else batches

    def _mixed(self, batches: Iterator[Batch], mixer: Mixer, first_step: int) -> Iterator[Batch]:
        first = self.groups.place.dp * self.plan.grad_accum_steps
        for index, (images, targets) in enumerate(batches):
            step, own = divmod(index, self.plan.grad_accum_steps)
            seed = seed_from(self.config.run.seed, first_step + step, first + own, "mix")
            yield Batch(*mixer.mix(images, targets, seed))


def assemble(config: Config, topology: Topology, device: torch.device, weights: Path | None = None) -> Assembly:
    """Build one rank's parts. Collective over the world.

    Args:
        config: The run, checked.
        topology: The grid of ranks.
        device: This rank's.
        weights: Folder of exported weights to evaluate; None builds a run that trains, from model.pretrained
            or its first weights.
    """
    load_plugins(config.plugins)
    spec = _describe_once(config.data)
    plan = (batch_plan if weights is None else eval_batch_plan)(config, topology.dp)
    model = build_model(config.model, spec.num_classes, spec.in_chans)
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
    _, _, *img_size = input_shape(model, 1)
    feed = Feed(groups, device, pipe.schedule.loss_rank(topology.pp))
    return Assembly(config, spec, plan, groups, device, task, engine, feed, tuple(img_size), stage_names(model))


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
