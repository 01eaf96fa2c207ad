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
from vit_tp.config import BatchPlan, Config, DataConfig, batch_plan, eval_batch_plan, run_folder
from vit_tp.config.folder import unreadable_log
from vit_tp.config.sizes import resolution_schedule
from vit_tp.data.faults import FaultLog
from vit_tp.data.loader import Batch, Loading, eval_batches, train_batches
from vit_tp.data.order import steps_per_epoch
from vit_tp.data.sources import build_source, describe
from vit_tp.data.spec import DataSpec, Form, Source, StreamSource
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
from vit_tp.train.prefetch import on_device
from vit_tp.train.prepare import Preparations


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
        input_size: Height and width of the input in pixels; of clips, the number of frames before them.
        all_stages: Names of all stages of the model.
        log_folder: Where ranks note what they could not read.
    """

    config: Config
    spec: DataSpec
    plan: BatchPlan
    groups: Groups
    device: torch.device
    task: Classification
    engine: VitEngine
    feed: Feed
    input_size: tuple[int, ...]
    all_stages: list[str]
    log_folder: Path

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.spec.num_train, self.plan.global_batch_size)

    @property
    def total_steps(self) -> int:
        recipe = self.config.recipe
        whole = self.steps_per_epoch * recipe.epochs
        return whole if recipe.max_steps is None else min(whole, recipe.max_steps)

    @cached_property
    def preparations(self) -> Preparations:
        """What is done to pixels on their way into the model."""
        return Preparations(self.config, self.spec, self.device, self.groups.place.dp * self.plan.grad_accum_steps)

    @cached_property
    def fault_log(self) -> FaultLog:
        """What this rank could not read."""
        path = unreadable_log(self.log_folder, self.groups.rank)
        return FaultLog(path, self.config.data.max_bad_fraction, self.spec.num_train // self.plan.dp_size)

    @cached_property
    def validation(self) -> Source | StreamSource:
        """The validation split, opened once; on ranks that read."""
        return build_source(self.config.data, self._form("val"))

    def schedule(self) -> Any:
        """Return the learning rate's course over this run's optimizer."""
        return build_schedule(
            self.engine.optimizer, self.config.recipe.schedule, self.steps_per_epoch, self.total_steps
        )

    def arrange_for_(self, step: int | None) -> None:
        """Arrange engine and stages for the images of a training step, or of an evaluation (None)."""
        form = self._form("val" if step is None else "train")
        if self._is_resized and self.engine.module.arrange_(form.size_at((step or 0) // self.steps_per_epoch)):
            self.engine.reset_activation_shape()

    @cached_property
    def _is_resized(self) -> bool:
        return bool(self.config.recipe.resolution_schedule)

    def training_batches(self, first_step: int = 0) -> Iterator[Batch] | None:
        """Return this replica's micro-batches from a step on, on the rank that reads; None elsewhere."""
        if not self.feed.is_reader:
            return None
        batches = train_batches(
            build_source(self.config.data, self._form("train")),
            plan=self.plan,
            dp_rank=self.groups.place.dp,
            first_step=first_step,
            last_step=self.total_steps,
            repeats=self.config.data.repeats,
            loading=self._loading,
        )
        return on_device(self._watched(batches), self.device)

    def validation_batches(self) -> Iterator[Batch] | None:
        """Return this replica's share of the validation set, on the rank that reads; None elsewhere."""
        if not self.feed.is_reader:
            return None
        _, batches = eval_batches(
            self.validation,
            micro_batch_size=self.plan.eval_micro_batch_size,
            dp_rank=self.groups.place.dp,
            dp_size=self.plan.dp_size,
            loading=self._loading,
        )
        return on_device(self._watched(batches), self.device)

    def count_unreadable(self) -> int:
        """Return how many samples could not be read so far, over all ranks. Collective over the world."""
        count = torch.tensor([self.fault_log.num_bad], device=self.device)
        dist.all_reduce(count)
        return int(count)

    @property
    def _loading(self) -> Loading:
        data = self.config.data
        return Loading(data.num_workers, data.prefetch, pin_memory=self.device.type == "cuda")

    def _form(self, split: str) -> Form:
        *num_frames, height, width = self.input_size
        frames = num_frames[0] if num_frames else None
        schedule = resolution_schedule(self.config) if split == "train" else ()
        return Form(split, self.config.run.seed, (height, width), frames, schedule)

    def _watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.fault_log.note(len(batch.targets), batch.faults)
            yield batch


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
    stages = stage_names(model)
    return Assembly(config, spec, plan, groups, device, task, engine, feed, tuple(input_size), stages, log_folder)


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
