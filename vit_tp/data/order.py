"""Which samples make up which step, micro-batch and rank?

The global stream of samples is a function of (seed, number of samples, global batch size). Ranks and micro-batches only
cut it:

    step            |             global batch              |
    micro-batches   |  0  |  1  |  2  |  3  |  4  |  5  | ...     global micro-batch m holds samples [m*mb, (m+1)*mb)
    dp ranks        |    rank 0       |     rank 1      |         rank r owns micro-batches r*gas .. r*gas + gas - 1

so it does not change with dp, tp, pp, micro_batch_size or loader workers. Training sees full global batches only: the
tail of an epoch is dropped, another tail each time. Evaluation sees each sample exactly once.

Does not know: images, torch, processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vit_tp.errors import DataError

PADDING = -1
_ORDER_STREAM = 2


class SampleKey(NamedTuple):
    """One sample of one pass: its augmentation depends on all three numbers.

    Args:
        epoch: Pass over the data, from 0.
        index: Which sample.
        copy: Which of its copies in this pass, where augmentation is repeated.
    """

    epoch: int
    index: int
    copy: int = 0


@lru_cache(maxsize=2)
def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order in which an epoch visits the samples.

    Args:
        num_samples: Samples of the training split, N.
        seed: run.seed, 0 or more.
        epoch: Pass over the data, from 0.

    Returns:
        Permutation (N,) int64 of 0 .. N - 1, read-only.
    """
    bits = np.random.MT19937(np.random.SeedSequence((_ORDER_STREAM, seed, epoch)))
    # RandomState because numpy promises that its stream never changes with numpy's version; Generator's may.
    order = np.random.RandomState(bits).permutation(num_samples).astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Return the optimizer steps of one epoch: floor(N / global_batch_size).

    Args:
        num_samples: Samples of the training split, N.
        global_batch_size: Samples of one optimizer step over all ranks.

    Raises:
        DataError: The split is smaller than one global batch; lower recipe.global_batch_size.
    """
    steps = num_samples // global_batch_size
    if steps == 0:
        raise DataError(
            f"The training split has {num_samples} samples, fewer than recipe.global_batch_size={global_batch_size}; "
            f"only full global batches are trained on, so an epoch would have no step. "
            f"Use recipe.global_batch_size={num_samples} or less, or more data."
        )
    return steps


def step_samples(step: int, num_samples: int, global_batch_size: int, seed: int, repeats: int = 1) -> list[SampleKey]:
    """Return the samples of one optimizer step over all ranks, in order.

    With repeats, copies of a sample follow one another and an epoch of N places holds the first N / repeats samples of
    its order, as timm's RepeatAugSampler has it (Hoffer et al., arXiv 1901.09335).

    Args:
        step: Optimiser step since the start of training, from 0; runs on over epochs.
        num_samples: Samples of the training split, N.
        global_batch_size: Samples of one optimizer step over all ranks.
        seed: run.seed.
        repeats: Copies of each sample.

    Returns:
        global_batch_size keys.
    """
    epoch, step_in_epoch = divmod(step, steps_per_epoch(num_samples, global_batch_size))
    first = step_in_epoch * global_batch_size
    order = epoch_order(num_samples, seed, epoch)
    places = range(first, first + global_batch_size)
    return [SampleKey(epoch, int(order[place // repeats]), place % repeats) for place in places]


def micro_batch_samples(
    step_samples: Sequence[SampleKey], micro_batch_index: int, micro_batch_size: int
) -> list[SampleKey]:
    """Return the samples of one global micro-batch of a step.

    Args:
        step_samples: The samples of the step.
        micro_batch_index: Micro-batch of the step counted over all dp ranks, 0 .. dp * grad_accum_steps - 1.
        micro_batch_size: Samples of one forward pass.
    """
    first = micro_batch_index * micro_batch_size
    assert first >= 0 and first + micro_batch_size <= len(step_samples), (micro_batch_index, len(step_samples))
    return list(step_samples[first : first + micro_batch_size])


def num_eval_micro_batches(num_samples: int, dp_size: int, micro_batch_size: int) -> int:
    """Return how many micro-batches each dp rank scores: ceil(N / (micro_batch_size * dp_size)).

    Args:
        num_samples: Samples of the split, N.
        dp_size: Data-parallel replicas.
        micro_batch_size: Samples of one forward pass.
    """
    return -(-num_samples // (micro_batch_size * dp_size))


def eval_micro_batches(num_samples: int, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[list[int]]:
    """Return one dp rank's share of an evaluation.

    Over all dp ranks each sample occurs exactly once. Every rank gets the same number of micro-batches of the same
    size, since the pipeline's exchanges have a fixed number and shape; places left over hold PADDING (-1).

    Args:
        num_samples: Samples of the split, N.
        dp_rank: 0 .. dp_size - 1.
        dp_size: Data-parallel replicas.
        micro_batch_size: Samples of one forward pass.

    Returns:
        ceil(N / (micro_batch_size * dp_size)) lists of micro_batch_size indices.
    """
    assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
    count = num_eval_micro_batches(num_samples, dp_size, micro_batch_size)
    padded = np.full(count * dp_size * micro_batch_size, PADDING, dtype=np.int64)
    padded[:num_samples] = np.arange(num_samples)
    return padded.reshape(count, dp_size, micro_batch_size)[:, dp_rank].tolist()
