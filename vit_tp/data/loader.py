"""How does one data-parallel replica get its batches?

Through torch's DataLoader, fed with whole micro-batches of sample keys, so the stream is the same for any number of
workers, and with a generator of its own: without one, each start of an iterator would draw from the default generator,
and the one rank that reads would see other dropout masks than its peers.

Does not know: which process reads (train/feed.py), mixing, the device.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vit_tp.config import BatchPlan
from vit_tp.data.order import (
    PADDING,
    SampleKey,
    eval_micro_batches,
    micro_batch_samples,
    step_samples,
    steps_per_epoch,
)
from vit_tp.data.spec import Source
from vit_tp.errors import DataError

IGNORE = -100


class Batch(NamedTuple):
    """One micro-batch: images (B, C, Y, X) float32 and targets (B,) int64; IGNORE (-100) marks a padded row."""

    images: Tensor
    targets: Tensor


def train_batches(
    source: Source,
    *,
    plan: BatchPlan,
    dp_rank: int,
    seed: int,
    first_step: int,
    last_step: int,
    num_workers: int,
) -> Iterator[Batch]:
    """Yield one dp rank's micro-batches, grad_accum_steps for each step first_step <= step < last_step.

    Args:
        source: The training split.
        plan: Sizes of the batches.
        dp_rank: 0 .. dp_size - 1.
        seed: run.seed.
        first_step: First optimizer step, from 0; more than 0 when a run continues.
        last_step: The step to stop before.
        num_workers: Loader processes; 0 reads in this one.

    Raises:
        DataError: The split is smaller than one global batch, or a sample cannot be read.
    """
    assert plan.micro_batch_size * plan.grad_accum_steps * plan.dp_size == plan.global_batch_size, plan
    assert 0 <= dp_rank < plan.dp_size, (dp_rank, plan.dp_size)
    steps_per_epoch(len(source), plan.global_batch_size)  # refuse now, not at the first batch
    return _batches(source, _train_keys(len(source), plan, dp_rank, seed, first_step, last_step), num_workers)


def eval_batches(
    source: Source, *, micro_batch_size: int, dp_rank: int, dp_size: int, num_workers: int
) -> tuple[int, Iterator[Batch]]:
    """Return the number of this dp rank's micro-batches, which is the same on all, and their iterator.

    Args:
        source: The validation split.
        micro_batch_size: Samples of one forward pass; padded rows are zeros with target IGNORE.
        dp_rank: 0 .. dp_size - 1.
        dp_size: Data-parallel replicas.
        num_workers: Loader processes; 0 reads in this one.
    """
    shares = eval_micro_batches(len(source), dp_rank, dp_size, micro_batch_size)
    keys = [[SampleKey(0, index) for index in share] for share in shares]
    return len(keys), _batches(source, keys, num_workers)


def _train_keys(
    num_samples: int, plan: BatchPlan, dp_rank: int, seed: int, first_step: int, last_step: int
) -> Iterator[list[SampleKey]]:
    for step in range(first_step, last_step):
        samples = step_samples(step, num_samples, plan.global_batch_size, seed)
        for micro_batch in range(dp_rank * plan.grad_accum_steps, (dp_rank + 1) * plan.grad_accum_steps):
            yield micro_batch_samples(samples, micro_batch, plan.micro_batch_size)


class _Failure(NamedTuple):
    """A sample that could not be read, on its way from a worker: the loader would bury its sentence in a traceback."""

    sentence: str
    details: str


class _MicroBatches(Dataset):
    """The micro-batches of a source, asked for by their keys."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, keys: Sequence[SampleKey]) -> Batch | _Failure:
        shape = self._source.sample_shape
        images = torch.zeros(len(keys), *shape)
        targets = torch.full((len(keys),), IGNORE, dtype=torch.int64)
        for row, (epoch, index) in enumerate(keys):
            if index == PADDING:
                continue
            try:
                image, target = self._source.load(index, epoch)
                if image.shape != shape:
                    raise ValueError(f"its shape is {tuple(image.shape)}, not {tuple(shape)}")
            except Exception as error:
                sentence = (
                    f"Sample {index} ({self._source.name(index)}) cannot be read: {type(error).__name__}: {error}. "
                    f"A training run does not skip samples in silence. Repair or remove it, then start again."
                )
                return _Failure(sentence, traceback.format_exc())
            images[row], targets[row] = image, target
        return Batch(images, targets)


def _unchanged(batch: Batch | _Failure) -> Batch | _Failure:
    return batch


def _batches(source: Source, keys: Iterable[Sequence[SampleKey]], num_workers: int) -> Iterator[Batch]:
    loader = DataLoader(
        _MicroBatches(source),
        batch_size=None,  # each "sample" of the loader is a whole micro-batch
        sampler=keys,
        num_workers=num_workers,
        collate_fn=_unchanged,
        generator=torch.Generator(),
    )
    for batch in loader:
        if isinstance(batch, _Failure):
            error = DataError(batch.sentence)
            error.add_note(batch.details)
            raise error
        yield batch
