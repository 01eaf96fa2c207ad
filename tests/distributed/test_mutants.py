"""The proofs must fail when the code is wrong: each mutant is a mistake that has been made in public."""

from __future__ import annotations

import dataclasses

import pytest
import torch.nn.functional as F

from tests.distributed.test_block_parity import gradients_of
from tests.tolerances import BLOCK_FLOAT64
from tests.worlds import run_world


def backward_exchange_removed() -> None:
    from vit_tp.parallel.regions import ExactRegion

    ExactRegion.enter = lambda self, x: x


def forward_exchange_removed() -> None:
    from vit_tp.parallel.regions import ExactRegion

    ExactRegion.leave = lambda self, x: x


def row_bias_added_before_the_sum() -> None:
    from vit_tp.sharding.layers import RowLinear

    RowLinear.forward = lambda self, x: self.region.leave(F.linear(x, self.weight, self.bias))


def packed_parts_cut_as_one() -> None:
    from vit_tp.sharding.placement import Sharded

    cut = Sharded.cut
    Sharded.cut = lambda self, *args: cut(dataclasses.replace(self, parts=(sum(self.parts),)), *args)


def partial_gradients_not_summed() -> None:
    from vit_tp.sharding import gradients

    gradients.sum_partial_ = lambda *args: None


MUTANTS = [
    backward_exchange_removed,
    forward_exchange_removed,
    row_bias_added_before_the_sum,
    packed_parts_cut_as_one,
    partial_gradients_not_summed,
]


def mutated(mutate) -> dict:
    mutate()
    return gradients_of("qk_norm, LayerScale, registers")


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_mutant_fails_the_proof(mutate):
    found = run_world(mutated, 2, mutate)
    assert max(max(f["errors"].values()) for f in found) > 1e6 * BLOCK_FLOAT64


def test_silent_mutants_leave_the_output_exact():
    """Why every parameter's gradient is compared on every rank."""
    for mutate in (backward_exchange_removed, partial_gradients_not_summed):
        assert run_world(mutated, 2, mutate)[0]["errors"]["output"] <= BLOCK_FLOAT64
