"""Every column belongs to one rank, in order, and padding to none."""

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vit_tp.parallel.columns import Columns, padding_of
from vit_tp.sharding.placement import Sharded


@given(total=st.integers(1, 60), tp_size=st.integers(1, 9))
def test_ranks_share_the_columns_as_the_placement_cuts_them(total, tp_size):
    ranks = [Columns(total, tp_size, rank) for rank in range(tp_size)]
    full = torch.arange(total)
    assert torch.equal(torch.cat([columns.of(full) for columns in ranks]), full)
    placement = Sharded(0, (total,), padding_of(total, tp_size))
    for columns in ranks:
        local = placement.cut(full, tp_size, columns.tp_rank)
        assert len(local) == columns.held == -(-total // tp_size)
        assert torch.equal(columns.without_padding(local), columns.of(full))
        assert columns.has(full).tolist() == [i in columns.of(full).tolist() for i in range(total)]
    beyond = torch.tensor([-1, total, total + 1])
    assert not any(columns.has(beyond).any() for columns in ranks)


@given(total=st.integers(1, 20), tp_size=st.integers(1, 6))
def test_each_row_is_picked_once(total, tp_size):
    x = torch.randn(total, total, dtype=torch.float64)
    index = torch.randperm(total)
    ranks = [Columns(total, tp_size, rank) for rank in range(tp_size)]
    picked = sum(columns.pick(columns.of(x), index) for columns in ranks)
    assert torch.equal(picked, x.gather(1, index.unsqueeze(1)).squeeze(1))


def test_alone_nothing_is_exchanged_and_a_copy_talks_to_the_same_ranks():
    columns = Columns.over(None, 5)
    x = torch.randn(2, 5)
    assert torch.equal(columns.highest(x), x.amax(1)) and columns.sum(x) is x and columns.gather(x) is x
    holder = nn.Identity()
    holder.columns = columns
    assert copy.deepcopy(holder).columns is columns
