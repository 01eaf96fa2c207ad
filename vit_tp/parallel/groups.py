"""The handles to a rank's peers, made once and handed down as an argument.

The only caller of `new_group` in this package. DeepSpeed makes its own groups for the pipeline and ZeRO; ours carry the
exchanges inside a cut block and, apart from them, the feed of samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from vit_tp.parallel.topology import Coordinates, Topology

DEFAULT_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Groups:
    """One rank's groups.

    Args:
        topology: The grid.
        rank: This rank.
        tp_group: Exchanges inside cut attention and MLP.
        pp_group: The stages of one replica at one tp rank: gradients of tables that all of them hold.
        image_group: The tp peers of a first stage: samples go from tp rank 0 to the others.
        target_group: Both ends of one replica's pipeline (gloo, on GPUs too): step headers and targets. Middle stages
            hold no handle (None).
    """

    topology: Topology
    rank: int
    tp_group: ProcessGroup
    pp_group: ProcessGroup
    image_group: ProcessGroup
    target_group: ProcessGroup | None

    @property
    def place(self) -> Coordinates:
        return self.topology.coordinates(self.rank)


@dataclass(frozen=True)
class StandIn:
    """One rank of a group that does not exist, for planning on meta, where nothing is exchanged.

    Args:
        num_ranks: Of the group.
        own_rank: Whose place is taken.
    """

    num_ranks: int
    own_rank: int = 0

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.own_rank


def build_groups(topology: Topology, timeout: timedelta = DEFAULT_TIMEOUT) -> Groups:
    """Make the groups of this rank. Collective: every rank of the world must call it.

    Args:
        topology: The grid; its size must be the world's.
        timeout: How long an exchange may wait. `new_group` does not inherit the world's.

    Raises:
        TopologyError: If the world has another size.
    """
    topology.require_world(dist.get_world_size())
    rank = dist.get_rank()

    def mine(memberships: list[list[int]], backend: str | None = None) -> ProcessGroup | None:
        own = None
        # Every rank makes every group, in the same order. With use_local_synchronization a rank would make its own
        # only, but middle stages would have made fewer than the others, and DeepSpeed's next group would wait for ever.
        for ranks in memberships:
            group = dist.new_group(ranks, timeout=timeout, backend=backend)
            if rank in ranks:
                own = group
        return own

    tp_peers = topology.all_peers("tp")
    return Groups(
        topology=topology,
        rank=rank,
        tp_group=mine(tp_peers),
        pp_group=mine(topology.all_peers("pp")),
        image_group=mine(tp_peers),
        target_group=mine([feed_ranks(topology, dp) for dp in range(topology.dp)], backend="gloo"),
    )


def feed_ranks(topology: Topology, dp_rank: int) -> list[int]:
    """Return the ranks that samples of one replica reach: all of its first and of its last stage."""
    ends = sorted({0, topology.pp - 1})
    return [topology.rank(pp, dp_rank, tp) for pp in ends for tp in range(topology.tp)]


def limit_waiting(timeout: timedelta) -> None:
    """Give every group of this process, DeepSpeed's included, the same time limit.

    torch gives groups made without a limit 30 minutes, whatever `init_process_group` was told.
    """
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # public since torch 2.14
    for group in list(distributed_c10d._world.pg_map):
        set_timeout(timeout, group)
