"""How does one data-parallel replica get its batches?

Through torch's DataLoader, fed with whole micro-batches of sample keys, so the stream is the same for any number of
workers, and with a generator of its own: without one, each start of an iterator would draw from the default generator,
and the one rank that reads would see other dropout masks than its peers. A source that can only be read from front to
back is read by streams.py. Sources hold paths, never open files: workers start with a copy of them.

Does not know: which process reads (train/feed.py), what becomes of pixels on the device (train/prepare.py).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vit_tp.config import BatchPlan
from vit_tp.data.faults import Fault, load_or_replace
from vit_tp.data.order import (
    PADDING,
    SampleKey,
    eval_micro_batches,
    micro_batch_samples,
    step_samples,
    steps_per_epoch,
)
from vit_tp.data.sampling import sample_seed
from vit_tp.data.spec import Sample, Source
from vit_tp.errors import DataError

IGNORE = -100


class Batch(NamedTuple):
    """One micro-batch.

    Args:
        images: (B, C, Y, X) or (B, C, T, Y, X) uint8; zeros where a row is padded.
        targets: (B,) int64; IGNORE (-100) where a row is padded.
        seeds: (B,) int64, for what is random about a sample once it is on the device.
        faults: What could not be read.
    """

    images: Tensor
    targets: Tensor
    seeds: Tensor
    faults: tuple[Fault, ...] = ()


class Loading(NamedTuple):
    """How a loader works; changes nothing about what it yields.

    Args:
        num_workers: Loader processes; 0 reads in this one.
        prefetch: Micro-batches that each process makes ahead.
        pin_memory: Whether batches come to lie where a device can fetch them without the CPU.
    """

    num_workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False


def train_batches(
    source: Source,
    *,
    plan: BatchPlan,
    dp_rank: int,
    first_step: int,
    last_step: int,
    repeats: int = 1,
    loading: Loading = Loading(),  # noqa: B008
) -> Iterator[Batch]:
    """Yield one dp rank's micro-batches, grad_accum_steps for each step first_step <= step < last_step.

    Args:
        source: The training split.
        plan: Sizes of the batches.
        dp_rank: 0 .. dp_size - 1.
        first_step: First optimizer step, from 0; more than 0 when a run continues.
        last_step: The step to stop before.
        repeats: Copies of each sample, augmented apart.
        loading: How it works.

    Raises:
        DataError: The split is smaller than one global batch, or too many samples in a row cannot be read.
    """
    assert plan.micro_batch_size * plan.grad_accum_steps * plan.dp_size == plan.global_batch_size, plan
    assert 0 <= dp_rank < plan.dp_size, (dp_rank, plan.dp_size)
    steps_per_epoch(len(source), plan.global_batch_size)  # refuse now, not at the first batch
    seed = source.form.seed
    return _batches(source, _train_keys(len(source), plan, dp_rank, seed, first_step, last_step, repeats), loading)


def eval_batches(
    source: Source,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    loading: Loading = Loading(),  # noqa: B008
) -> tuple[int, Iterator[Batch]]:
    """Return the number of this dp rank's micro-batches, which is the same on all, and their iterator.

    Args:
        source: The validation split.
        micro_batch_size: Rows of one forward pass: samples times their views.
        dp_rank: 0 .. dp_size - 1.
        dp_size: Data-parallel replicas.
        loading: How it works.
    """
    assert micro_batch_size % source.views == 0, (micro_batch_size, source.views)
    shares = eval_micro_batches(len(source), dp_rank, dp_size, micro_batch_size // source.views)
    keys = [[SampleKey(0, index) for index in share] for share in shares]
    return len(keys), _batches(source, keys, loading)


def _train_keys(
    num_samples: int, plan: BatchPlan, dp_rank: int, seed: int, first_step: int, last_step: int, repeats: int
) -> Iterator[list[SampleKey]]:
    for step in range(first_step, last_step):
        samples = step_samples(step, num_samples, plan.global_batch_size, seed, repeats)
        for micro_batch in range(dp_rank * plan.grad_accum_steps, (dp_rank + 1) * plan.grad_accum_steps):
            yield micro_batch_samples(samples, micro_batch, plan.micro_batch_size)


class _Failure(NamedTuple):
    """What ended the reading, on its way from a worker: the loader would bury its sentence in a traceback."""

    sentence: str
    details: str


class _MicroBatches(Dataset):
    """The micro-batches of a source, asked for by their keys."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, keys: Sequence[SampleKey]) -> Batch | _Failure:
        rows = Rows(self._source, len(keys), keys[0].epoch)
        try:
            for place, key in enumerate(keys):
                if key.index != PADDING:
                    rows.put(place, *load_or_replace(self._source, key))
        except DataError as error:
            return _Failure(str(error), traceback.format_exc())
        return rows.batch


class Rows:
    """A batch that is filled place by place; each sample fills as many rows as it has views.

    Args:
        source: Where the samples come from.
        num_samples: Places.
        epoch: The pass whose size the samples have.
    """

    def __init__(self, source: Source, num_samples: int, epoch: int) -> None:
        self._views, self._seed = source.views, source.form.seed
        num_rows = num_samples * source.views
        self.batch = Batch(
            torch.zeros(num_rows, *source.form.shape_at(epoch, source.in_chans), dtype=torch.uint8),
            torch.full((num_rows,), IGNORE, dtype=torch.int64),
            torch.zeros(num_rows, dtype=torch.int64),
        )

    def put(self, place: int, key: SampleKey, sample: Sample | None, faults: tuple[Fault, ...]) -> None:
        """Fill a place; without a sample it stays padded."""
        self.batch = self.batch._replace(faults=self.batch.faults + faults)
        if sample is None:
            return
        rows = slice(place * self._views, (place + 1) * self._views)
        images, targets, seeds, _ = self.batch
        images[rows], targets[rows], seeds[rows] = sample.pixels, sample.label, sample_seed(self._seed, key)


def _unchanged(batch: Batch | _Failure) -> Batch | _Failure:
    return batch


def _batches(source: Source, keys: Iterable[Sequence[SampleKey]], loading: Loading) -> Iterator[Batch]:
    loader = DataLoader(
        _MicroBatches(source),
        batch_size=None,  # each "sample" of the loader is a whole micro-batch
        sampler=keys,
        num_workers=loading.num_workers,
        prefetch_factor=loading.prefetch if loading.num_workers else None,
        pin_memory=loading.pin_memory,
        collate_fn=_unchanged,
        generator=torch.Generator(),
    )
    for batch in loader:
        if isinstance(batch, _Failure):
            error = DataError(batch.sentence)
            error.add_note(batch.details)
            raise error
        yield batch
