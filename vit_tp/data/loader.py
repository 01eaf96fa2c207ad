"""How does one data-parallel replica get its batches?

Through torch's DataLoader, fed with whole micro-batches of sample keys, so the stream is the same for any number of
workers. A source that can only be read from front to back is read by streams.py. Sources hold paths, never open files:
workers start with a copy of them.

Does not know: which process reads (train/feed.py), what becomes of pixels on the device (train/prepare.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.utils.data import Dataset

from vit_tp.config import BatchPlan
from vit_tp.data.batches import IGNORE, Batch, Failure, Loading, Rows, draw_batches
from vit_tp.data.faults import load_or_replace
from vit_tp.data.order import (
    PADDING,
    SampleKey,
    eval_micro_batches,
    micro_batch_samples,
    step_samples,
    steps_per_epoch,
)
from vit_tp.data.spec import Source, StreamSource
from vit_tp.data.streams import stream_eval_batches, stream_train_batches
from vit_tp.errors import VitTpError

__all__ = ["IGNORE", "Batch", "Loading", "Rows", "eval_batches", "train_batches"]


def train_batches(
    source: Source | StreamSource,
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
        ConfigError: The source is read in streams, and their number does not suit the batch and its replicas.
    """
    assert plan.micro_batch_size * plan.grad_accum_steps * plan.dp_size == plan.global_batch_size, plan
    assert 0 <= dp_rank < plan.dp_size, (dp_rank, plan.dp_size)
    steps_per_epoch(len(source), plan.global_batch_size)  # refuse now, not at the first batch
    if isinstance(source, StreamSource):
        return stream_train_batches(
            source,
            plan=plan,
            dp_rank=dp_rank,
            first_step=first_step,
            last_step=last_step,
            num_streams=source.num_streams,
            repeats=repeats,
            loading=loading,
        )
    keys = _train_keys(len(source), plan, dp_rank, source.form.seed, first_step, last_step, repeats)
    return draw_batches(_MicroBatches(source), loading, keys)


def eval_batches(
    source: Source | StreamSource,
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
    if isinstance(source, StreamSource):
        return stream_eval_batches(
            source, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_size=dp_size, loading=loading
        )
    shares = eval_micro_batches(len(source), dp_rank, dp_size, micro_batch_size // source.views)
    keys = [[SampleKey(0, index) for index in share] for share in shares]
    return len(keys), draw_batches(_MicroBatches(source), loading, keys)


def _train_keys(
    num_samples: int, plan: BatchPlan, dp_rank: int, seed: int, first_step: int, last_step: int, repeats: int
) -> Iterator[list[SampleKey]]:
    for step in range(first_step, last_step):
        samples = step_samples(step, num_samples, plan.global_batch_size, seed, repeats)
        for micro_batch in range(dp_rank * plan.grad_accum_steps, (dp_rank + 1) * plan.grad_accum_steps):
            yield micro_batch_samples(samples, micro_batch, plan.micro_batch_size)


class _MicroBatches(Dataset):
    """The micro-batches of a source, asked for by their keys."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, keys: Sequence[SampleKey]) -> Batch | Failure:
        rows = Rows(self._source, len(keys), keys[0].epoch)
        try:
            for place, key in enumerate(keys):
                if key.index != PADDING:
                    rows.put(place, *load_or_replace(self._source, key))
        except VitTpError as error:
            return Failure.of(error)
        return rows.batch
