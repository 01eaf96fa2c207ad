"""When are partial sums exchanged? Policy only: a region has two ends, and each cut module lies between them.

`enter` stands before attention or MLP, `leave` in its row linear. A region also says which gradients it leaves partial.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from vit_tp.errors import ConfigError
from vit_tp.parallel.collectives import copy_to_group, reduce_from_group


class Region(Protocol):
    """What a cut module needs of its surroundings."""

    tp_group: ProcessGroup

    @property
    def tp_size(self) -> int: ...

    @property
    def tp_rank(self) -> int: ...

    def enter(self, x: Tensor) -> Tensor:
        """From the residual stream to what every rank's slice of the weights works on."""

    def leave(self, x: Tensor) -> Tensor:
        """From each rank's partial product to the residual stream. Conjugate: `enter`."""

    def total(self, x: Tensor) -> Tensor:
        """Inside the region: the sum of what the ranks hold, for all of them, forward and backward."""


class ExactRegion:
    """Whole activations outside, one all-reduce at each end: forward on leaving, backward on entering.

    Every rank holds the same (B, N, C) residual stream, and each parameter outside cut modules gets its whole gradient.

    Args:
        tp_group: The ranks that share each weight.

    Source: Megatron-LM, arXiv 1909.08053, section 3.
    """

    def __init__(self, tp_group: ProcessGroup) -> None:
        self.tp_group = tp_group
        self.tp_size = tp_group.size()
        self.tp_rank = tp_group.rank()

    def __deepcopy__(self, memo: dict) -> ExactRegion:
        return self  # a copy of a cut model, such as an average of its weights, talks to the same ranks

    def enter(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C), the same tensor; its gradient is the sum over the ranks."""
        return copy_to_group(x, self.tp_group)

    def leave(self, x: Tensor) -> Tensor:
        """(B, N, C) partial -> (B, N, C) summed."""
        return reduce_from_group(x, self.tp_group)

    def total(self, x: Tensor) -> Tensor:
        """Sum over the ranks in both directions: each rank goes on with the sum in its own way."""
        return copy_to_group(reduce_from_group(x.contiguous(), self.tp_group), self.tp_group)


REGIONS = {"exact": ExactRegion}


def build_region(name: str, tp_group: ProcessGroup) -> Region:
    """Return the region of that name over a group.

    Raises:
        ConfigError: If there is none.
    """
    if name not in REGIONS:
        raise ConfigError(f"region={name!r} is not known. Use one of {', '.join(REGIONS)}.")
    return REGIONS[name](tp_group)
