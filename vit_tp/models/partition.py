"""How many blocks on each pipeline rank? Costs in, boundaries out. Pure.

The flat list is embed, L blocks, head; embed belongs to the first pipeline rank and head to the last, and each rank has
at least one block.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    ends = len(costs)
    # best[r][j]: (dearest, sum of squares, last boundary) of ranks 0..r over stages [0, j)
    best: list[dict[int, tuple[float, float, int]]] = [{j: (total[j], total[j] ** 2, 0) for j in range(2, ends)}]
    if num_ranks == 1:
        return [0, ends]
    for rank in range(1, num_ranks):
        last = rank == num_ranks - 1
        rows = {}
        for j in [ends] if last else range(rank + 2, ends):
            options = (
                (max(dearest, own := total[j] - total[i]), squares + own**2, i)
                for i, (dearest, squares, _) in best[-1].items()
                if i + (1 if not last else 2) <= j
            )
            rows[j] = min(options, default=None)
        best.append({j: row for j, row in rows.items() if row is not None})
    bounds = [ends]
    for rank in reversed(range(num_ranks)):
        bounds.append(best[rank][bounds[-1]][2])
    return bounds[::-1]


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
