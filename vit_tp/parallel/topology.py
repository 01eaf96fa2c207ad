"""Which rank sits where in the (pp, dp, tp) grid? Integers only.

The order is DeepSpeed's `PipeModelDataParallelTopology`: tp varies fastest, then dp, then pp, so that the ranks of one
tensor-parallel group are neighbours on one host. Does not know: process groups, devices, models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from vit_tp.errors import TopologyError

Axis = Literal["pp", "dp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "tp")


class Coordinates(NamedTuple):
    """Place of one rank in the grid."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Topology:
    """A grid of pp pipeline stages, dp replicas and tp tensor-parallel ranks.

    Args:
        pp: Number of pipeline stages.
        dp: Number of data-parallel replicas.
        tp: Number of ranks that share each weight.

    Raises:
        TopologyError: If a size is below 1.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if size < 1:
                raise TopologyError(f"{axis}={size} is not a number of ranks; use 1 or more.")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def rank(self, pp: int, dp: int, tp: int) -> int:
        """Return the rank at these coordinates. Inverse: `coordinates`."""
        return (pp * self.dp + dp) * self.tp + tp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the place of a rank. Inverse: `rank`."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is not in a grid of {self.world_size} ranks ({self}).")
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp, dp, tp)

    def peers(self, axis: Axis, rank: int) -> list[int]:
        """Return the ranks that differ from `rank` along one axis only, itself included, in axis order."""
        here = self.coordinates(rank)
        return [self.rank(**{**here._asdict(), axis: i}) for i in range(getattr(self, axis))]

    def all_peers(self, axis: Axis) -> list[list[int]]:
        """Return every group of peers along an axis; each rank is in exactly one."""
        return [self.peers(axis, r) for r in range(self.world_size) if getattr(self.coordinates(r), axis) == 0]

    def require_world(self, world_size: int) -> None:
        """Raise if the number of processes is not the number of ranks in the grid.

        Raises:
            TopologyError: With the sizes that would fit.
        """
        if world_size != self.world_size:
            raise TopologyError(
                f"{world_size} processes were started, but parallel.pp={self.pp} * parallel.dp={self.dp} * "
                f"parallel.tp={self.tp} = {self.world_size}; every rank needs one place in the grid. "
                f"Start {self.world_size} processes, or change parallel.tp, parallel.pp or parallel.dp."
            )
