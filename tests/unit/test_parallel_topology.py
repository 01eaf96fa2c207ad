"""Our grid is DeepSpeed's: the same rank at every place, the same peers on every axis."""

import itertools

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_tp.errors import TopologyError
from vit_tp.parallel.groups import feed_ranks
from vit_tp.parallel.topology import AXES, Coordinates, Topology

DEEPSPEED_AXES = {"pp": "pipe", "dp": "data", "tp": "model"}
GRIDS = list(itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 4), (1, 2, 3, 4)))
sizes = st.integers(1, 6)
grids = st.builds(Topology, pp=sizes, dp=sizes, tp=sizes)


@pytest.mark.parametrize(("pp", "dp", "tp"), GRIDS)
def test_ranks_and_peers_are_those_of_deepspeed(pp, dp, tp):
    ours, theirs = Topology(pp, dp, tp), PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
    assert ours.world_size == theirs.world_size()
    for rank in range(ours.world_size):
        coord = theirs.get_coord(rank)
        assert ours.coordinates(rank) == Coordinates(pp=coord.pipe, dp=coord.data, tp=coord.model)
        assert ours.rank(coord.pipe, coord.data, coord.model) == rank
    for axis, name in DEEPSPEED_AXES.items():
        if getattr(ours, axis) > 1:  # DeepSpeed makes no groups of one
            assert sorted(ours.all_peers(axis)) == sorted(theirs.get_axis_comm_lists(name))


@settings(deadline=None)
@given(topology=grids)
def test_coordinates_are_the_inverse_of_rank(topology):
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert len(set(places)) == topology.world_size
    assert [topology.rank(*place) for place in places] == list(range(topology.world_size))


@settings(deadline=None)
@given(topology=grids, axis=st.sampled_from(AXES))
def test_the_peers_of_an_axis_partition_the_world(topology, axis):
    groups = topology.all_peers(axis)
    assert sorted(itertools.chain(*groups)) == list(range(topology.world_size))
    others = [other for other in AXES if other != axis]
    for group in groups:
        places = [topology.coordinates(rank) for rank in group]
        assert [getattr(place, axis) for place in places] == list(range(getattr(topology, axis)))
        assert all(len({getattr(place, other) for place in places}) == 1 for other in others)
        assert all(topology.peers(axis, rank) == group for rank in group)


def test_tensor_parallel_peers_are_neighbours():
    assert Topology(pp=2, dp=2, tp=2).all_peers("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Topology(pp=2, dp=2, tp=2).all_peers("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_samples_reach_the_first_and_the_last_stage_of_their_replica():
    topology = Topology(pp=3, dp=2, tp=2)
    assert feed_ranks(topology, 0) == [0, 1, 8, 9]
    assert feed_ranks(topology, 1) == [2, 3, 10, 11]
    assert feed_ranks(Topology(pp=1, dp=2, tp=2), 1) == [2, 3]


def test_a_world_of_another_size_is_refused_with_the_arithmetic():
    with pytest.raises(TopologyError) as caught:
        Topology(pp=2, dp=3, tp=4).require_world(16)
    text = str(caught.value)
    assert text.startswith("16 processes were started")
    assert "parallel.pp=2 * parallel.dp=3 * parallel.tp=4 = 24" in text and "Start 24 processes" in text
    Topology(pp=2, dp=3, tp=4).require_world(24)


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_without_ranks_is_refused_by_name(axis):
    with pytest.raises(TopologyError, match=f"{axis}=0 "):
        Topology(**{axis: 0})


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_grid_is_refused(rank):
    with pytest.raises(TopologyError, match=f"rank {rank} is not in a grid of 8 ranks"):
        Topology(pp=2, dp=2, tp=2).coordinates(rank)
