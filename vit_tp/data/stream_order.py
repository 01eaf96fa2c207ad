"""In which order are the samples of shards read, and by which stream?

Shards can only be read from front to back, so not single samples but whole shards are shuffled, and an epoch is read
at V places at once, by V streams of one length. How many there are is a fact about the data, like the seed: neither
ranks nor workers change it.

    places 0 .. N-1: shards in an order of the epoch    | s2, from o on |  s0  |  s3  |  s1  | s2, up to o |
    V=4 streams of one length                           | stream 0 | stream 1 | stream 2 | stream 3 | tail |
    windows of a stream, each shuffled in itself        |  w0  |  w1  |  w2  |  ...

    slots of a step, G/V of each stream                 | stream 0 | stream 1 | stream 2 | stream 3 |
    dp ranks, the same slots as in order.py, dp=2       |       rank 0        |       rank 1        |

An epoch begins in the middle of a shard and comes back to it at its end, so that the tail, which makes no full batch,
is another one each time even where there is one shard. What has been read by some step is a matter of counting: a run
continues anywhere by reading from the beginning of the windows that it stopped in.

Does not know: tar files, torch, processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vit_tp.data.order import SampleKey
from vit_tp.errors import ConfigError

MAX_STREAMS = 64
_SHARD_STREAM = 11
_WINDOW_STREAM = 12
_SUBSTITUTE_STREAM = 13
_SHOWN = 4


class Piece(NamedTuple):
    """A run of places in one shard: first <= place < last."""

    shard: int
    first: int
    last: int


@lru_cache(maxsize=2)
def epoch_pieces(shard_sizes: tuple[int, ...], seed: int, epoch: int) -> tuple[Piece, ...]:
    """Return the shards in the order of an epoch; the pieces hold each sample once.

    Args:
        shard_sizes: Samples of each shard.
        seed: run.seed, 0 or more.
        epoch: Pass over the data, from 0.
    """
    draws = _draws(_SHARD_STREAM, seed, epoch)
    order = draws.permutation(len(shard_sizes)).tolist()
    pieces = [Piece(shard, 0, shard_sizes[shard]) for shard in order if shard_sizes[shard]]
    if pieces:
        shard, _, size = pieces[0]
        begin = int(draws.randint(size, dtype=np.int64))
        pieces = [Piece(shard, begin, size), *pieces[1:], Piece(shard, 0, begin)]
    return tuple(pieces)


def fixed_pieces(shard_sizes: Sequence[int]) -> tuple[Piece, ...]:
    """Return the shards as they are numbered, for evaluation."""
    return tuple(Piece(shard, 0, size) for shard, size in enumerate(shard_sizes))


def cut_pieces(pieces: Sequence[Piece], first: int, last: int) -> list[Piece]:
    """Return the pieces that lie at places first <= place < last, when all follow one another."""
    parts, begin = [], 0
    for shard, low, high in pieces:
        end = begin + high - low
        if max(begin, first) < min(end, last):
            parts.append(Piece(shard, low + max(first - begin, 0), high - max(end - last, 0)))
        begin = end
    return parts


def window_edges(num_samples: int, shuffle_window: int, stream: int, num_streams: int) -> list[int]:
    """Return where a stream's windows begin, and its end.

    The first one is between half and a whole window long, another length for each stream, and the last makes up for
    it: streams then do not all read a new window in the same step.

    Args:
        num_samples: Samples of the stream in one epoch, L, 1 or more.
        shuffle_window: Samples of a window at most.
        stream: Which stream.
        num_streams: How many there are, V.
    """
    if num_samples <= shuffle_window:
        return [0, num_samples]
    whole = -((shuffle_window - 2 * num_samples) // (2 * shuffle_window))  # L is so many windows and a half, at most
    parts = (2 * whole + 1) * num_streams
    inner = {num_samples * (2 * num_streams * window - stream) // parts for window in range(1, whole + 1)}
    return sorted({0, *inner, num_samples})


def window_order(size: int, seed: int, epoch: int, stream: int, window: int) -> list[int]:
    """Return the order in which a window's samples are used."""
    return _draws(_WINDOW_STREAM, seed, epoch, stream, window).permutation(size).tolist()


def substitute_order(size: int, seed: int, key: SampleKey) -> list[int]:
    """Return the order in which a window's samples are tried in the place of one that cannot be read."""
    return _draws(_SUBSTITUTE_STREAM, seed, *key).permutation(size).tolist()


def choose_num_streams(num_streams: int | None, global_batch_size: int, dp_size: int) -> int:
    """Return how many streams an epoch is read in, V.

    Args:
        num_streams: data.num_streams; None takes the largest divisor of the global batch up to 64, on any grid.
        global_batch_size: Samples of one optimizer step over all ranks; V divides it.
        dp_size: Data-parallel replicas, among which the streams are divided.

    Raises:
        ConfigError: V does not divide the batch, or the replicas do not divide V; names those that would do.
    """
    whole = global_batch_size
    divisors = [size for size in range(1, whole + 1) if whole % size == 0]
    chosen = num_streams or max(size for size in divisors if size <= MAX_STREAMS)
    if whole % chosen == 0 and chosen % dp_size == 0:
        return chosen
    legal = sorted((size for size in divisors if size % dp_size == 0), key=lambda size: abs(size - chosen))[:_SHOWN]
    advice = " or ".join(f"data.num_streams={size}" for size in sorted(legal))
    was = f"data.num_streams={chosen}" + ("" if num_streams else f" (chosen by recipe.global_batch_size={whole})")
    raise ConfigError(
        f"{was} is not a multiple of parallel.dp={dp_size} that divides recipe.global_batch_size={whole}; each replica "
        f"reads whole streams, and each stream gives the same number of samples to every step. "
        f"Use {advice or f'a recipe.global_batch_size that is a multiple of {dp_size}'}. "
        f"It is part of the order of samples: keep it for the length of a run."
    )


def _draws(*words: int) -> np.random.RandomState:
    # RandomState because numpy promises that its stream never changes with numpy's version; Generator's may.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(words)))
