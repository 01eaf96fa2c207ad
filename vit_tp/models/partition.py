"""How many blocks on each pipeline rank? Costs in, boundaries out. Pure.

The flat list is embed, L blocks, head; embed belongs to the first pipeline rank and head to the last, and each rank has
at least one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from vit_tp.errors import ConfigError


def partition(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Return the boundaries that make the dearest pipeline rank as cheap as possible.

    Among equally good cuts it takes the one with the smallest sum of squares, so that spare room is shared out.

    Args:
        costs: Cost of each stage: embed, L blocks, head.
        num_ranks: Pipeline ranks, pp.

    Returns:
        num_ranks + 1 indices into the flat list; rank r holds stages [b[r], b[r + 1]).

    Raises:
        ConfigError: If there are fewer blocks than ranks.
    """
    num_blocks = len(costs) - 2
    if num_ranks > num_blocks:
        raise ConfigError(
            f"parallel.pp={num_ranks} is more than the model's {num_blocks} blocks, and every stage needs a block. "
            f"Use parallel.pp={num_blocks} or less."
        )
    total = [0.0, *accumulate(costs)]
    # Two searches: in one, a beginning with a cheap dearest rank would hide one that is more even beside a dear rank.
    dearest, _ = _least(total, num_ranks, max)
    _, bounds = _least(total, num_ranks, lambda squares, own: squares + own**2 if own <= dearest else math.inf)
    return bounds


def _least(total: Sequence[float], num_ranks: int, join: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """Return the least value that `join`, run over the costs of the ranks, can have, and boundaries that have it.

    Args:
        total: Running sums of the stages' costs, from 0.
        num_ranks: Pipeline ranks, pp.
        join: (value of the ranks before, cost of a rank) -> value with it.
    """
    ends = len(total) - 1
    # best[r][j]: (value of the first r ranks over stages [0, j), where the last of them begins)
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for rank in range(num_ranks):
        is_last = rank == num_ranks - 1
        fewest = 1 + (rank == 0) + is_last  # embed and head come on top of a block
        row = {}
        for j in [ends] if is_last else range(rank + 2, ends):
            row[j] = min((join(value, total[j] - total[i]), i) for i, (value, _) in best[-1].items() if i + fewest <= j)
        best.append(row)
    bounds = [ends]
    for row in reversed(best[1:]):
        bounds.append(row[bounds[-1]][1])
    return best[-1][ends][0], bounds[::-1]


def explicit(first_blocks: Sequence[int], num_blocks: int, num_ranks: int) -> list[int]:
    """Return the boundaries for a list of the first block of each pipeline rank, for example [0, 3, 6].

    Raises:
        ConfigError: If the list does not give every rank at least one block of those that exist.
    """
    wanted = list(first_blocks)
    rising = all(a < b for a, b in zip(wanted, wanted[1:]))
    if len(wanted) != num_ranks or wanted[:1] != [0] or not rising or wanted[-1] >= num_blocks:
        raise ConfigError(
            f"parallel.partition={wanted} does not lay {num_blocks} blocks on {num_ranks} stages; it needs "
            f"{num_ranks} rising numbers from 0 to {num_blocks - 1}, the first block of each stage. "
            f"Use for example parallel.partition={[num_blocks * r // num_ranks for r in range(num_ranks)]}."
        )
    return [0, *(first + 1 for first in wanted[1:]), num_blocks + 2]


def weighted(costs: Sequence[float], embed_weight: float | None, head_weight: float | None) -> list[float]:
    """Return costs with those of embed and head replaced by so many mean blocks, where a weight is given."""
    blocks = list(costs[1:-1])
    mean = sum(blocks) / len(blocks)
    embed = costs[0] if embed_weight is None else embed_weight * mean
    head = costs[-1] if head_weight is None else head_weight * mean
    return [embed, *blocks, head]
