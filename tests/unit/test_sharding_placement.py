"""Slices put together again are the whole; packed parts are cut one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vit_tp.sharding.placement import Replicated, Sharded, mark, placement_of


@st.composite
def cuts(draw) -> tuple[torch.Tensor, Sharded, int]:
    """A tensor, a placement of unequal parts along one of its dims, and a tp size that divides the parts."""
    tp_size = draw(st.integers(1, 6))
    parts = tuple(tp_size * share for share in draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(parts)
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return numbers, Sharded(dim, parts), tp_size


@settings(deadline=None)
@given(case=cuts())
def test_merge_is_the_inverse_of_cut(case):
    full, placement, tp_size = case
    locals_ = [placement.cut(full, tp_size, rank) for rank in range(tp_size)]
    assert torch.equal(placement.merge(locals_), full)
    assert len({local.shape for local in locals_}) == 1
    assert sum(local.numel() for local in locals_) == full.numel()


@settings(deadline=None)
@given(case=cuts())
def test_each_rank_holds_its_share_of_every_part(case):
    full, placement, tp_size = case
    index = torch.arange(full.shape[placement.dim])
    for rank in range(tp_size):
        held = Sharded(0, placement.parts).cut(index, tp_size, rank).tolist()
        wanted, start = [], 0
        for part in placement.parts:
            share = part // tp_size
            wanted += range(start + rank * share, start + (rank + 1) * share)
            start += part
        assert held == wanted
        assert torch.equal(placement.cut(full, tp_size, rank), full.index_select(placement.dim, torch.tensor(held)))


@pytest.mark.parametrize("tp_size", [2, 3, 6])
def test_fused_qkv_is_cut_by_heads_of_q_k_and_v(tp_size):  # P34
    """timm reshapes the output to (3, heads, D): each rank needs its heads of all three."""
    num_heads, head_dim = 6, 4
    width = num_heads * head_dim
    weight = torch.arange(3 * width * width, dtype=torch.float32).view(3 * width, width)
    as_timm_reads_it = weight.view(3, num_heads, head_dim, width)
    share = num_heads // tp_size
    for rank in range(tp_size):
        wanted = as_timm_reads_it[:, rank * share : (rank + 1) * share].reshape(-1, width)
        assert torch.equal(Sharded(0, (width,) * 3).cut(weight, tp_size, rank), wanted)
        assert not torch.equal(weight.chunk(tp_size)[rank], wanted)
        assert not torch.equal(Sharded(0, (3 * width,)).cut(weight, tp_size, rank), wanted)


@pytest.mark.parametrize(("parts", "tp_size"), [((4, 4), 2), ((5, 4), 2), ((3, 6), 2)])
def test_what_does_not_divide_or_add_up_is_refused(parts, tp_size):
    with pytest.raises(ValueError, match="does not cut dim 0 of"):
        Sharded(0, parts).cut(torch.zeros(9, 2), tp_size, 0)


@pytest.mark.parametrize("placement", [Replicated(), Replicated(grad_sum=True)])
def test_a_replicated_tensor_is_whole_everywhere(placement):
    full = torch.randn(3, 2)
    assert all(torch.equal(placement.cut(full, 4, rank), full) for rank in range(4))
    assert torch.equal(placement.merge([full] * 4), full)


def test_marking_sets_the_flags_that_deepspeed_counts_by():  # P28
    cut, whole = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    mark(cut, Sharded(0, (4,)))
    mark(whole, Replicated(grad_sum=True))
    assert cut.model_parallel is True and cut.tensor_model_parallel is True
    assert not hasattr(whole, "model_parallel") and not hasattr(whole, "tensor_model_parallel")
    assert placement_of(cut) == Sharded(0, (4,)) and placement_of(whole) == Replicated(True)
    assert placement_of(nn.Parameter(torch.zeros(1))) == Replicated()


@settings(deadline=None)
@given(rows=st.integers(1, 40), tp_size=st.integers(1, 7), dim=st.integers(0, 2), whole_part=st.booleans())
def test_padding_makes_any_divisor_do(rows, tp_size, dim, whole_part):
    """The first ranks hold ceil(rows / tp) each, the last ones zeros behind the end, and merging drops them."""
    head = (tp_size,) if whole_part else ()  # a part before the padded one
    placement = Sharded(dim, (*head, rows), padding=-rows % tp_size)
    shape = [2, 3, 2]
    shape[dim] = rows + sum(head)
    full = torch.randn(shape)
    locals_ = [placement.cut(full, tp_size, rank) for rank in range(tp_size)]
    assert torch.equal(placement.merge(locals_), full) and placement.merge(locals_).is_contiguous()
    assert {local.shape[dim] for local in locals_} == {-(-rows // tp_size) + len(head)}
    own = [local.narrow(dim, len(head), local.shape[dim] - len(head)) for local in locals_]
    padded = torch.cat(own, dim)
    assert not padded.narrow(dim, rows, placement.padding).any()
    assert torch.equal(padded.narrow(dim, 0, rows), full.narrow(dim, sum(head), rows))
    assert sum(local.square().sum().item() for local in locals_) == pytest.approx(full.square().sum().item(), rel=1e-5)


def test_padding_that_does_not_fill_up_is_refused():
    with pytest.raises(ValueError, match="does not cut dim 0 of"):
        Sharded(0, (9,), padding=2).cut(torch.zeros(9, 2), 2, 0)
