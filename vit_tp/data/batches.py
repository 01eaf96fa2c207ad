"""What is a micro-batch, and how does it come out of loader processes?

Torch's DataLoader carries whole batches. It gets a generator of its own: without one, each start of an iterator would
draw from the default generator, and the one rank that reads would see other dropout masks than its peers.

Does not know: which samples are in a batch (loader.py, streams.py), which process reads (train/feed.py).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vit_tp.data.faults import Fault
from vit_tp.data.order import SampleKey
from vit_tp.data.sampling import sample_seed
from vit_tp.data.spec import Sample, Source, StreamSource
from vit_tp.errors import VitTpError

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


class Failure(NamedTuple):
    """What ended the reading, on its way from a worker: the loader would bury its sentence in a traceback."""

    kind: type[VitTpError]
    sentence: str
    details: str

    @classmethod
    def of(cls, error: VitTpError) -> Failure:
        """Return what is to be told of an error; to be called where it is handled."""
        return cls(type(error), str(error), traceback.format_exc())


class Rows:
    """A batch that is filled place by place; each sample fills as many rows as it has views.

    Args:
        source: Where the samples come from.
        num_samples: Places.
        epoch: The pass whose size the samples have.
    """

    def __init__(self, source: Source | StreamSource, num_samples: int, epoch: int) -> None:
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


def draw_batches(
    dataset: Dataset, loading: Loading, sampler: Iterable[Sequence[SampleKey]] | None = None
) -> Iterator[Batch | None]:
    """Yield what a data set makes: a Batch, or None where one worker has nothing in a round.

    Args:
        dataset: Makes whole batches, and a Failure where reading has to end.
        loading: How the loader works.
        sampler: What each batch is asked for with; None where the data set is iterated over.

    Raises:
        VitTpError: What a Failure says.
    """
    loader = DataLoader(
        dataset,
        batch_size=None,  # each "sample" of the loader is a whole batch
        sampler=sampler,
        num_workers=loading.num_workers,
        prefetch_factor=loading.prefetch if loading.num_workers else None,
        pin_memory=loading.pin_memory,
        collate_fn=_unchanged,
        generator=torch.Generator(),
    )
    for batch in loader:
        if isinstance(batch, Failure):
            error = batch.kind(batch.sentence)
            error.add_note(batch.details)
            raise error
        yield batch


def _unchanged(batch: Batch | Failure | None) -> Batch | Failure | None:
    return batch
