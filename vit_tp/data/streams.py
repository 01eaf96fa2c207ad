"""How does one data-parallel replica get its batches from shards?

It reads its streams (stream_order.py) at once and takes G/V samples from each in every step. Workers share the streams
out in groups of neighbours, group g to worker g mod W; each worker yields step by step one batch for each of its
groups, and None where another worker has a group more. The loader asks its workers in turn, so batches come in the
order (step, group), whatever W is. They are cut anew into micro-batches.

Each open stream holds the raw samples of one window and one open shard, nothing else; decoding comes after. What
cannot be read is replaced by another sample of its window.

Does not know: tar files, which process reads (train/feed.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from vit_tp.config import BatchPlan
from vit_tp.data.batches import Batch, Failure, Loading, Rows, draw_batches
from vit_tp.data.faults import MAX_ATTEMPTS, Loaded, first_readable
from vit_tp.data.order import SampleKey, num_eval_micro_batches, steps_per_epoch
from vit_tp.data.spec import Sample, StreamSource, Unreadable
from vit_tp.data.stream_order import (
    Piece,
    choose_num_streams,
    cut_pieces,
    epoch_pieces,
    fixed_pieces,
    substitute_order,
    window_edges,
    window_order,
)
from vit_tp.errors import VitTpError

# An evaluation is read at this many places at once at most; a constant, so that no number of workers changes its order.
EVAL_SECTIONS = 16


class Raw(NamedTuple):
    """One sample as it is stored, or Unreadable, and its fixed number."""

    index: int
    content: Any


def stream_train_batches(
    source: StreamSource,
    *,
    plan: BatchPlan,
    dp_rank: int,
    first_step: int,
    last_step: int,
    num_streams: int | None = None,
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
        num_streams: Streams that an epoch is read in, V; None: chosen by the batch.
        repeats: Copies of each sample, augmented apart; they follow one another in a stream.
        loading: How it works.

    Raises:
        DataError: The split is smaller than one global batch, or no sample of a window can be read.
        ConfigError: V does not divide the batch, or the replicas do not divide V.
    """
    steps = steps_per_epoch(len(source), plan.global_batch_size)
    num_streams = choose_num_streams(num_streams, plan.global_batch_size, plan.dp_size)
    rows = plan.global_batch_size // num_streams
    share = num_streams // plan.dp_size
    own = range(dp_rank * share, (dp_rank + 1) * share)
    loading = loading._replace(num_workers=min(loading.num_workers, share))
    # Groups are about as large as micro-batches, but no worker is left without one.
    size = max(1, min(plan.micro_batch_size // rows, share // max(loading.num_workers, 1)))
    reading = EpochReading(source, steps, num_streams, rows, repeats)
    groups = [
        _StreamGroup(reading, own[first : first + size], range(first_step, last_step))
        for first in range(0, share, size)
    ]
    batches = draw_batches(_SharedOut(groups, last_step - first_step), loading)
    return _cut(batches, plan.micro_batch_size, loading.pin_memory)


def stream_eval_batches(
    source: StreamSource,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    loading: Loading = Loading(),  # noqa: B008
) -> tuple[int, Iterator[Batch]]:
    """Return the number of this dp rank's micro-batches, which is the same on all, and their iterator.

    A rank reads one run of the samples as they lie in the shards; rows that are left over are padded.

    Args:
        source: The validation split.
        micro_batch_size: Rows of one forward pass: samples times their views.
        dp_rank: 0 .. dp_size - 1.
        dp_size: Data-parallel replicas.
        loading: How it works.
    """
    size = micro_batch_size // source.views
    length = num_eval_micro_batches(len(source), dp_size, size)
    num_sections = min(length, EVAL_SECTIONS)
    edges = [dp_rank * length + section * length // max(num_sections, 1) for section in range(num_sections + 1)]
    sections = [_EvalSection(source, size, first, last) for first, last in zip(edges, edges[1:], strict=False)]
    loading = loading._replace(num_workers=min(loading.num_workers, num_sections))
    batches = draw_batches(_SharedOut(sections, -(-length // max(num_sections, 1))), loading)
    return length, (batch for batch in batches if batch is not None)


@dataclass(frozen=True)
class EpochReading:
    """How every epoch is read.

    Args:
        source: The training split.
        steps: Optimizer steps of an epoch.
        num_streams: Streams, V.
        rows: Samples that each stream gives to a step, G/V.
        repeats: Copies of each sample.
    """

    source: StreamSource
    steps: int
    num_streams: int
    rows: int
    repeats: int

    def stream(self, stream: int, first_step: int) -> Iterator[Loaded]:
        """Yield what one stream gives from a step on, epoch after epoch, without end."""
        first_epoch, step = divmod(first_step, self.steps)
        for epoch in count(first_epoch):
            yield from self._epoch(epoch, stream, step * self.rows if epoch == first_epoch else 0)

    def _epoch(self, epoch: int, stream: int, begin: int) -> Iterator[Loaded]:
        source, length = self.source, self.steps * self.rows
        num_samples = -(-length // self.repeats)
        edges = window_edges(num_samples, source.shuffle_window, stream, self.num_streams)
        first = next(window for window, end in enumerate(edges[1:]) if begin < end * self.repeats)
        places = (stream * num_samples + edges[first], (stream + 1) * num_samples)
        stored = _read(source, cut_pieces(epoch_pieces(source.shard_sizes, source.form.seed, epoch), *places))
        for window in range(first, len(edges) - 1):
            low, high = edges[window], edges[window + 1]
            places = range(max(begin, low * self.repeats), min(length, high * self.repeats))
            order = window_order(high - low, source.form.seed, epoch, stream, window)
            # The list is given away: it is gone before the next window is read.
            yield from self._window(
                list(islice(stored, high - low)), epoch, order, (p - low * self.repeats for p in places)
            )

    def _window(self, raws: list[Raw], epoch: int, order: list[int], places: Iterable[int]) -> Iterator[Loaded]:
        remedy = f"; the {len(raws)} samples of a window (data.shuffle_window) are all that can replace one another"
        for place in places:
            chosen, copy = order[place // self.repeats], place % self.repeats
            key = SampleKey(epoch, raws[chosen].index, copy)
            yield first_readable(self.source, self._tries(raws, chosen, key), remedy)

    def _tries(self, raws: list[Raw], chosen: int, key: SampleKey) -> Iterator[tuple[SampleKey, partial[Sample]]]:
        yield key, partial(_decode, self.source, raws[chosen].content, key)
        others = substitute_order(len(raws), self.source.form.seed, key)
        others = [other for other in others if other != chosen and not isinstance(raws[other].content, Unreadable)]
        for other in others[:MAX_ATTEMPTS]:
            substitute = key._replace(index=raws[other].index)
            yield substitute, partial(_decode, self.source, raws[other].content, substitute)


@dataclass(frozen=True)
class _StreamGroup:
    """Neighbouring streams of a rank; yields the batch that they make in each step."""

    reading: EpochReading
    streams: range
    steps: range

    def __iter__(self) -> Iterator[Batch]:
        reading = self.reading
        streams = [reading.stream(stream, self.steps.start) for stream in self.streams]
        for step in self.steps:
            batch = Rows(reading.source, len(streams) * reading.rows, step // reading.steps)
            for place, loaded in enumerate(chain.from_iterable(islice(stream, reading.rows) for stream in streams)):
                batch.put(place, *loaded)
            yield batch.batch


@dataclass(frozen=True)
class _EvalSection:
    """A run of the micro-batches of a split: first <= number < last, of `size` samples each; yields them."""

    source: StreamSource
    size: int
    first: int
    last: int

    def __iter__(self) -> Iterator[Batch]:
        pieces = cut_pieces(fixed_pieces(self.source.shard_sizes), self.first * self.size, self.last * self.size)
        stored = _read(self.source, pieces)
        for _ in range(self.first, self.last):
            batch = Rows(self.source, self.size, 0)
            for place, raw in enumerate(islice(stored, self.size)):
                key = SampleKey(0, raw.index)
                tries = [(key, partial(_decode, self.source, raw.content, key))]
                batch.put(place, *first_readable(self.source, tries))
            yield batch.batch


class _SharedOut(IterableDataset):
    """What several readers make, shared out among the workers of a loader.

    Args:
        readers: Each makes one batch in a round; iterated over in one worker only.
        length: Rounds.
    """

    def __init__(self, readers: Sequence[Iterable[Batch]], length: int) -> None:
        self._readers, self._length = readers, length

    def __iter__(self) -> Iterator[Batch | Failure | None]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        own = [iter(reader) for reader in self._readers[first::stride]]
        if len(own) < -(-len(self._readers) // stride):
            own.append(iter(()))  # every worker takes as many turns
        try:
            for _ in range(self._length):
                for reader in own:
                    yield next(reader, None)
        except VitTpError as error:
            yield Failure.of(error)


def _read(source: StreamSource, pieces: Iterable[Piece]) -> Iterator[Raw]:
    for piece in pieces:
        before = sum(source.shard_sizes[: piece.shard])
        places = range(piece.first, piece.last)
        for place, content in zip(places, source.fetch(*piece), strict=True):
            yield Raw(before + place, content)


def _decode(source: StreamSource, content: Any, key: SampleKey) -> Sample:
    if isinstance(content, Unreadable):
        raise ValueError(content.reason)
    return source.decode(content, key)


def _cut(batches: Iterable[Batch | None], size: int, pin_memory: bool) -> Iterator[Batch]:
    """Cut batches, of any sizes, into micro-batches; faults go with the first that is made after they came."""
    held: list[Batch] = []
    for batch in batches:
        if batch is None:
            continue
        held.append(batch)
        while sum(len(part.targets) for part in held) >= size:
            whole = _joined(held, pin_memory)
            yield Batch(*(rows[:size] for rows in whole[:3]), whole.faults)
            rest = Batch(*(rows[size:] for rows in whole[:3]))
            held = [rest] if len(rest.targets) else []


def _joined(batches: Sequence[Batch], pin_memory: bool) -> Batch:
    if len(batches) == 1:
        return batches[0]

    def joined(parts: Sequence[Tensor]) -> Tensor:
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        return torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=pin_memory))

    images, targets, seeds, faults = zip(*batches)
    return Batch(joined(images), joined(targets), joined(seeds), tuple(chain.from_iterable(faults)))
