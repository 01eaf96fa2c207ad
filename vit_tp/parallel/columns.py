"""Which columns of a cut last dim are this rank's, where tp need not divide them?

Each of tp ranks has ceil(K/tp) columns; behind the K-th they are padding, on the last ranks only. Padding is held and
computed, so that all ranks have tensors of one shape, and is left out before anything reads across columns.

Does not know: what the columns mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vit_tp.parallel.collectives import all_reduce, gather_from_group


def padding_of(total: int, tp_size: int) -> int:
    """Return how many columns are missing until tp divides them."""
    return -total % tp_size


@dataclass(frozen=True)
class Columns:
    """One rank's share of the last dim. Without a group, all of it.

    Args:
        total: Columns of all ranks without padding, K.
        tp_size: Ranks that share them.
        tp_rank: This rank.
        tp_group: These ranks; may be left out where nothing is exchanged.
    """

    total: int
    tp_size: int = 1
    tp_rank: int = 0
    tp_group: ProcessGroup | None = None

    @classmethod
    def over(cls, tp_group: ProcessGroup | None, total: int) -> Columns:
        """Return this rank's share of a group; None stands for one rank."""
        return cls(total) if tp_group is None else cls(total, tp_group.size(), tp_group.rank(), tp_group)

    def __deepcopy__(self, memo: dict) -> Columns:
        return self  # a copy of a cut model talks to the same ranks

    @property
    def held(self) -> int:
        """Columns on each rank with padding, ceil(K/tp)."""
        return (self.total + padding_of(self.total, self.tp_size)) // self.tp_size

    @property
    def first(self) -> int:
        """The first of this rank's columns, counted over all ranks."""
        return self.tp_rank * self.held

    @property
    def own(self) -> int:
        """Columns on this rank without padding, 0 .. ceil(K/tp)."""
        return min(max(self.total - self.first, 0), self.held)

    def without_padding(self, x: Tensor) -> Tensor:
        """(..., held) -> (..., own), a view."""
        return x.narrow(-1, 0, self.own)

    def of(self, full: Tensor) -> Tensor:
        """(..., K) -> (..., own), a view of this rank's columns."""
        return full.narrow(-1, min(self.first, self.total), self.own)

    def gather(self, x: Tensor) -> Tensor:
        """(..., held) -> (..., K) on every rank, padding dropped. Backward: this rank's columns, zeros in the padding.

        The gathered tensor must be used alike on every rank.
        """
        if self.tp_size == 1:
            return x
        return gather_from_group(x, self.tp_group).narrow(-1, 0, self.total).contiguous()

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks, the same bits on each, outside autograd."""
        return x if self.tp_size == 1 else all_reduce(x, self.tp_group)

    def highest(self, x: Tensor) -> Tensor:
        """(..., own) -> (...), the largest value over all K columns, outside autograd; -inf counts for none."""
        x = x.detach()
        highest = x.amax(-1) if self.own else x.new_full(x.shape[:-1], -torch.inf)
        if self.tp_size > 1:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.tp_group)
        return highest

    def pick(self, x: Tensor, index: Tensor) -> Tensor:
        """Return the value in one column of each row where it is this rank's, else 0; summed over ranks it is exact.

        Args:
            x: (B, own).
            index: (B,) int64, counted over all ranks.
        """
        if not self.own:
            return x.new_zeros(len(x))
        place = index - self.first
        found = x.gather(1, place.clamp(0, self.own - 1).unsqueeze(1)).squeeze(1)
        return torch.where(self.has(index), found, 0.0)

    def has(self, index: Tensor) -> Tensor:
        """Return whether columns are this rank's, padding not counted."""
        return (index >= self.first) & (index < self.first + self.own)
