"""Blocks on pipeline ranks: every rank has one, and no other cut makes the dearest rank cheaper."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_tp.errors import ConfigError
from vit_tp.models.partition import explicit, partition, weighted


def all_cuts(num_blocks: int, num_ranks: int):
    """Every way to lay blocks on ranks, as boundaries in the list of stages."""
    for inner in itertools.combinations(range(2, num_blocks + 1), num_ranks - 1):
        yield [0, *inner, num_blocks + 2]


def loads(costs: list, bounds: list[int]) -> list:
    return [sum(costs[start:stop]) for start, stop in zip(bounds, bounds[1:])]


def judge(costs: list, bounds: list[int]) -> tuple:
    own = loads(costs, bounds)
    return max(own), sum(load**2 for load in own)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), num_blocks=st.integers(1, 8))
def test_no_cut_is_better(data, num_blocks):
    costs = data.draw(st.lists(st.integers(0, 20), min_size=num_blocks + 2, max_size=num_blocks + 2))
    num_ranks = data.draw(st.integers(1, num_blocks))
    bounds = partition(costs, num_ranks)
    cuts = list(all_cuts(num_blocks, num_ranks))
    assert bounds in cuts
    assert judge(costs, bounds) == min(judge(costs, cut) for cut in cuts)


@settings(deadline=None, max_examples=50)
@given(num_blocks=st.integers(1, 48), data=st.data())
def test_every_rank_has_a_block_and_every_stage_a_rank(num_blocks, data):
    num_ranks = data.draw(st.integers(1, num_blocks))
    costs = data.draw(st.lists(st.floats(0, 1e12), min_size=num_blocks + 2, max_size=num_blocks + 2))
    bounds = partition(costs, num_ranks)
    assert bounds[0] == 0 and bounds[-1] == num_blocks + 2 and len(bounds) == num_ranks + 1
    blocks = [set(range(start, stop)) & set(range(1, num_blocks + 1)) for start, stop in zip(bounds, bounds[1:])]
    assert all(blocks) and sum(len(held) for held in blocks) == num_blocks


@pytest.mark.parametrize("depth", range(1, 25))
def test_equal_blocks_are_shared_out_evenly_for_every_depth(depth):  # P22
    for pp in range(1, depth + 1):
        bounds = partition([0, *[1] * depth, 0], pp)
        counts = loads([0, *[1] * depth, 0], bounds)
        assert sum(counts) == depth and max(counts) - min(counts) <= 1 and min(counts) >= 1


@pytest.mark.parametrize(("depth", "pp"), [(1, 2), (3, 4), (24, 25)])
def test_more_ranks_than_blocks_are_refused_with_the_largest_number(depth, pp):  # P22
    with pytest.raises(ConfigError) as caught:
        partition([1] * (depth + 2), pp)
    assert f"parallel.pp={pp} is more than the model's {depth} blocks" in str(caught.value)
    assert f"Use parallel.pp={depth} or less." in str(caught.value)


def test_a_dear_end_gets_fewer_blocks():
    assert partition([5, *[1] * 11, 0], 2) == [0, 4, 13]  # 5 + 3 blocks | 8 blocks
    assert partition([0, *[1] * 11, 5], 2) == [0, 9, 13]


@pytest.mark.parametrize(("costs", "pp"), [([8, 3, 13, 1, 1, 30, 1, 30, 30], 4), ([8, 1, 5, 8, 2, 13, 2, 0, 30], 5)])
def test_spare_room_is_shared_out_beside_a_rank_that_is_dear_anyway(costs, pp):
    """A search that first keeps the dearest rank of each beginning cheap would miss these."""
    assert judge(costs, partition(costs, pp)) == min(judge(costs, cut) for cut in all_cuts(len(costs) - 2, pp))


def test_an_end_dearer_than_everything_still_has_one_block():
    assert partition([100, *[1] * 4, 0], 2) == [0, 2, 6]
    assert partition([0, *[1] * 4, 100], 4) == [0, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("first_blocks", "num_blocks", "bounds"),
    [([0], 4, [0, 6]), ([0, 3], 4, [0, 4, 6]), ([0, 1], 4, [0, 2, 6]), ([0, 3, 6], 9, [0, 4, 7, 11])],
)
def test_a_list_gives_the_first_block_of_each_rank(first_blocks, num_blocks, bounds):
    assert explicit(first_blocks, num_blocks, len(first_blocks)) == bounds
    assert bounds in list(all_cuts(num_blocks, len(first_blocks)))


@pytest.mark.parametrize(
    ("first_blocks", "num_blocks", "pp"),
    [([], 4, 1), ([0, 2], 4, 1), ([0], 4, 2), ([1, 2], 4, 2), ([0, 0], 4, 2), ([0, 3, 2], 4, 3), ([0, 4], 4, 2)],
    ids=["empty", "too long", "too short", "not from 0", "empty rank", "falling", "past the end"],
)
def test_a_list_that_does_not_fit_is_refused_with_one_that_does(first_blocks, num_blocks, pp):
    with pytest.raises(ConfigError) as caught:
        explicit(first_blocks, num_blocks, pp)
    text = str(caught.value)
    assert f"parallel.partition={first_blocks} does not lay {num_blocks} blocks on {pp} stages" in text
    advice = text.split("parallel.partition=")[-1].rstrip(".")
    explicit([int(word) for word in advice.strip("[]").split(",")], num_blocks, pp)


def test_weights_are_in_mean_blocks():
    assert weighted([7, 1, 3, 9], None, None) == [7, 1, 3, 9]
    assert weighted([7, 1, 3, 9], 0.5, None) == [1, 1, 3, 9]
    assert weighted([7, 1, 3, 9], None, 0) == [7, 1, 3, 0]
