"""A constructor is replayed for one tensor at a time: constants, views, copies, and what is left unset."""

import pytest
import torch
from torch import nn

from vit_tp.models.tape import Tape, is_unset, unset_


class Odd(nn.Module):
    """Does to its tensors what constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("order", torch.tensor([3, 1, 2]).float())
        self.register_buffer("zero", torch.tensor(0, dtype=torch.long))
        self.register_buffer("angles", torch.outer(torch.arange(4), torch.linspace(0, 1, 3)).sin())
        self.weight = nn.Parameter(torch.empty(6, 4))
        nn.init.normal_(self.weight)  # in vain
        nn.init.uniform_(self.weight, 1, 2)
        nn.init.zeros_(self.weight[:2])  # a view
        self.copy = nn.Parameter(torch.empty(6, 4))
        self.copy.data.copy_(self.weight.data)
        self.weight.data.mul_(3)  # after the copy was taken
        self.packed = nn.Parameter(torch.empty(2, 4))
        first, second = self.packed.data.chunk(2)
        first.fill_(1), second.fill_(2)
        self.forgotten = nn.Parameter(torch.empty(3))


def test_constants_and_tables_are_the_constructors_own():
    real, tape = Odd(), Tape(Odd)
    for name in ("mask", "order", "zero", "angles", "packed"):
        found = tape.replay(name, 0, name)
        assert found.dtype == getattr(real, name).dtype and torch.equal(found, getattr(real, name)), name


def test_the_order_of_what_is_done_is_kept():
    tape = Tape(Odd)
    weight, copy = (tape.replay(name, 0, "the same") for name in ("weight", "copy"))
    assert torch.equal(weight, copy * 3) and not weight[:2].any()
    assert (copy[2:] >= 1).all() and (copy[2:] <= 2).all() and copy[2:].std() > 0.1


def test_what_is_done_in_vain_is_left_out():
    tape = Tape(Odd)
    names = [operation.function._schema.name for operation in tape.leading_to("weight")]
    assert "aten::uniform_" in names and "aten::normal_" not in names


def test_what_is_left_unset_is_seen():
    assert is_unset(Tape(Odd).replay("forgotten", 0))
    assert is_unset(unset_(torch.zeros(3, dtype=torch.int64))) and not is_unset(torch.zeros(3))


def test_seeds_decide_and_the_default_generator_is_left_alone():
    tape, state = Tape(Odd), torch.get_rng_state()
    first, again, other = (tape.replay("weight", seed, "weight") for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(KeyError):
        tape.replay("nothing", 0)
