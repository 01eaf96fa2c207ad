"""What does one rank of a run read, and what becomes of it?

Sources as the config names them, the micro-batches of this rank's replica, and the account of what could not be read.

Does not know: engines, models; how samples travel (feed.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from vit_tp.config import BatchPlan, Config
from vit_tp.config.folder import unreadable_log
from vit_tp.config.sizes import Size, resolution_schedule
from vit_tp.data.batches import IGNORE, Batch, Loading
from vit_tp.data.faults import FaultLog
from vit_tp.data.loader import eval_batches, train_batches
from vit_tp.data.order import num_eval_micro_batches, steps_per_epoch
from vit_tp.data.sources import build_source
from vit_tp.data.spec import DataSpec, Form, Source, StreamSource
from vit_tp.errors import DataError
from vit_tp.parallel.groups import Groups
from vit_tp.train.prefetch import on_device
from vit_tp.train.prepare import Preparations


class RunData:
    """The data of a run, as one rank meets it.

    Args:
        config: The run.
        spec: Sizes of the data set, as rank 0 found them.
        plan: Sizes of the batches.
        groups: This rank's peers.
        device: Where pixels are wanted.
        input_size: Height and width of the input in pixels; of clips, the number of frames before them.
        log_folder: Where ranks note what they could not read.
        is_reader: Whether this rank reads for its replica.
    """

    def __init__(
        self,
        config: Config,
        spec: DataSpec,
        plan: BatchPlan,
        groups: Groups,
        device: torch.device,
        input_size: tuple[int, ...],
        log_folder: Path,
        is_reader: bool,
    ) -> None:
        self.config, self.spec, self.plan = config, spec, plan
        self.device, self.is_reader = device, is_reader
        self._dp_rank = groups.place.dp
        *num_frames, height, width = input_size
        self._img_size, self._num_frames = (height, width), num_frames[0] if num_frames else None
        self._logs = {
            split: FaultLog(unreadable_log(log_folder, split, groups.rank), config.data.max_bad_fraction, num_samples)
            for split, num_samples in (("train", spec.num_train), ("val", spec.num_val))
        }
        self.preparations = Preparations(config, spec, device, self._dp_rank * plan.grad_accum_steps)

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.spec.num_train, self.plan.global_batch_size)

    @property
    def num_eval_micro_batches(self) -> int:
        """Micro-batches of an evaluation on each replica."""
        samples = self.plan.eval_micro_batch_size // self.plan.views
        return num_eval_micro_batches(self.spec.num_val, self.plan.dp_size, samples)

    def size_at(self, step: int | None) -> Size:
        """Return height and width of the images of a training step, or of an evaluation (None)."""
        if step is None:
            return self._img_size
        return self._form("train").size_at(step // self.steps_per_epoch)

    def training_batches(self, first_step: int, last_step: int) -> Iterator[Batch] | None:
        """Return this replica's micro-batches of some steps, on the rank that reads; None elsewhere."""
        if not self.is_reader:
            return None
        _ = self._validation  # opened now: what is wrong with it must not wait for the first evaluation
        batches = train_batches(
            self._open("train"),
            plan=self.plan,
            dp_rank=self._dp_rank,
            first_step=first_step,
            last_step=last_step,
            repeats=self.config.data.repeats,
            loading=self._loading,
        )
        return on_device(self._watched(batches, "train"), self.device)

    def validation_batches(self) -> Iterator[Batch] | None:
        """Return this replica's share of the validation set, on the rank that reads; None elsewhere."""
        if not self.is_reader:
            return None
        count, batches = eval_batches(
            self._validation,
            micro_batch_size=self.plan.eval_micro_batch_size,
            dp_rank=self._dp_rank,
            dp_size=self.plan.dp_size,
            loading=self._loading,
        )
        assert count == self.num_eval_micro_batches, (count, self.num_eval_micro_batches)
        return on_device(self._watched(batches, "val"), self.device)

    def count_unreadable(self) -> int:
        """Return how many reads failed so far, over all ranks. Collective over the world.

        Raises:
            DataError: Over all ranks they are too many.
        """
        counts = torch.tensor([[log.num_read, log.num_bad] for log in self._logs.values()], device=self.device)
        dist.all_reduce(counts)
        for log, (num_read, num_bad) in zip(self._logs.values(), counts.tolist()):
            log.require(num_read, num_bad)
        return int(counts[:, 1].sum())

    @cached_property
    def _validation(self) -> Source | StreamSource:
        return self._open("val")

    @property
    def _loading(self) -> Loading:
        data = self.config.data
        return Loading(data.num_workers, data.prefetch, pin_memory=self.device.type == "cuda")

    def _form(self, split: str) -> Form:
        schedule = resolution_schedule(self.config) if split == "train" else ()
        return Form(split, self.config.run.seed, self._img_size, self._num_frames, schedule)

    def _open(self, split: str) -> Source | StreamSource:
        source = build_source(self.config.data, self._form(split))
        known = self.spec.num_train if split == "train" else self.spec.num_val
        if len(source) != known:
            raise DataError(
                f"this rank finds {len(source)} samples in split {split} of data.root={self.config.data.root} and rank "
                f"0 found {known}; replicas would read other samples than they should. Wait until no files are being "
                f"copied, and let every host see the same ones."
            )
        names = getattr(source, "class_names", ())
        if tuple(names) != self.spec.class_names:
            other = sorted(set(names) ^ set(self.spec.class_names))
            raise DataError(
                f"the classes in data.root={self.config.data.root} are no longer those that the run began with "
                f"({', '.join(other[:5])}); their numbers would mean other classes. Put the training classes back as "
                f"they were."
            )
        return source

    def _watched(self, batches: Iterator[Batch], split: str) -> Iterator[Batch]:
        log, views = self._logs[split], 1 if split == "train" else self.plan.views
        for batch in batches:
            log.note(int((batch.targets != IGNORE).sum()) // views, batch.faults)
            yield batch
