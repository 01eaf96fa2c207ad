"""The proofs must fail when the code is wrong: each mutant is a mistake that has been made in public."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.parity import Comparison
from tests.distributed.test_block_parity import gradients_of
from tests.distributed.test_cut_head import gradients_of_families
from tests.distributed.test_cut_loss import against_torch
from tests.distributed.test_families import compare_all
from tests.tolerances import BLOCK_FLOAT64, CUT_LOSS_FLOAT64, FAMILY_FLOAT64, LANES_FLOAT64
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


def statistics_of_the_slice_alone() -> None:
    from vit_tp.parallel.regions import ExactRegion

    ExactRegion.total = lambda self, x: x * self.tp_size


def statistics_not_exchanged_backward() -> None:
    from vit_tp.parallel import collectives, regions

    regions.ExactRegion.total = lambda self, x: collectives.reduce_from_group(x.contiguous(), self.tp_group)


def position_tables_left_partial() -> None:
    from vit_tp.sharding import rules
    from vit_tp.sharding.rule import ShardRule

    for kind, rule in rules.RULES.items():
        moved = tuple(name for name in rule.partial if name in ("rel_pos_h", "rel_pos_w", "mlp.fc1"))
        own, whole = (tuple(n for n in moved if ("." in n) == has_dot) for has_dot in (False, True))
        partial = tuple(name for name in rule.partial if name not in moved)
        rules.RULES[kind] = ShardRule(
            **{**vars(rule), "partial": partial, "own": rule.own + own, "whole": rule.whole + whole}
        )


def padding_among_the_classes() -> None:
    from vit_tp.parallel.columns import Columns

    Columns.own = Columns.held


def largest_logit_of_the_slice_alone() -> None:
    from vit_tp.parallel.columns import Columns

    Columns.highest = lambda self, x: x.amax(-1) if self.own else x.new_full(x.shape[:-1], -10.0)


def target_taken_on_every_rank() -> None:
    from vit_tp.parallel.columns import Columns

    Columns.has = lambda self, index: index >= 0


def input_of_the_classifier_not_summed() -> None:
    from vit_tp.sharding import classifier

    classifier.copy_to_group = lambda x, group: x


MUTANTS = [
    backward_exchange_removed,
    forward_exchange_removed,
    row_bias_added_before_the_sum,
    packed_parts_cut_as_one,
    partial_gradients_not_summed,
]
OF_FAMILIES = [
    (statistics_of_the_slice_alone, "eva02_base_patch16_clip_224"),  # LayerNorm over heads and over the MLP's width
    (statistics_not_exchanged_backward, "eva02_base_patch16_clip_224"),
    (statistics_not_exchanged_backward, "cait_s24_224"),  # talking heads
    (position_tables_left_partial, "samvit_base_patch16"),
    (position_tables_left_partial, "vit_relpos_base_patch16_224"),
]


def gathered_tokens_get_their_own_gradient_only() -> None:
    from vit_tp.parallel import regions

    regions.gather_from_tokens = regions.unite_tokens


def products_divided_without_a_sum() -> None:
    from vit_tp.parallel import regions, tokens

    regions.SequenceRegion.leave = lambda self, x: tokens.divide_tokens(x, self.tp_group)


def norms_on_divided_tokens_left_partial() -> None:
    from vit_tp.parallel.regions import SequenceRegion

    SequenceRegion.grad_sum = False


def another_norm_made_again() -> None:
    from vit_tp.sharding.saving import Saving

    original = Saving.can_make
    Saving.can_make = lambda self, made, make, source: original(self, made, lambda x: make(x) * 1.001, source)


def private_channels_not_scaled_backward() -> None:
    from vit_tp.parallel import regions

    def backward(ctx, grad):
        shared, private = grad.split((ctx.num_shared, grad.shape[-1] - ctx.num_shared), dim=-1)
        return torch.cat((regions.all_reduce(shared, ctx.group), private), -1), None, None

    regions._PartialSum.backward = staticmethod(backward)


def streams_not_summed_at_their_start() -> None:
    from vit_tp.parallel.regions import PartialRegion

    PartialRegion.start = lambda self, x: x


OF_SEQUENCE = [
    gathered_tokens_get_their_own_gradient_only,
    products_divided_without_a_sum,
    norms_on_divided_tokens_left_partial,
    another_norm_made_again,
]
OF_PARTIAL = [private_channels_not_scaled_backward, streams_not_summed_at_their_start]


def mutated_sequence(mutate) -> float:
    from tests.distributed.test_regions import compare_all

    mutate()
    return max(compare_all("sequence", [("qk-norm, two registers", "norm_act")]).popitem()[1].errors.values())


@pytest.mark.parametrize("mutate", OF_SEQUENCE, ids=lambda mutate: mutate.__name__)
def test_a_mutant_of_divided_tokens_fails_the_proof(mutate):
    assert max(run_world(mutated_sequence, 2, mutate)) > 1e5 * BLOCK_FLOAT64


def mutated_partial(mutate) -> float:
    from tests.distributed.test_partial import against_lanes

    mutate()
    return max(against_lanes("biases, LayerScale, qk-norm", 0.5, "none").values())


@pytest.mark.parametrize("mutate", OF_PARTIAL, ids=lambda mutate: mutate.__name__)
def test_a_mutant_of_partial_sums_fails_the_proof(mutate):
    assert max(run_world(mutated_partial, 2, mutate)) > 1e5 * LANES_FLOAT64


def mutated(mutate) -> Comparison:
    mutate()
    return gradients_of("qk_norm, LayerScale, registers")


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_mutant_fails_the_proof(mutate):
    found = run_world(mutated, 2, mutate)
    assert max(max(f.errors.values()) for f in found) > 1e6 * BLOCK_FLOAT64


def mutated_family(mutate, name: str) -> Comparison:
    mutate()
    return compare_all([name])[name]


@pytest.mark.parametrize(("mutate", "name"), OF_FAMILIES, ids=lambda value: getattr(value, "__name__", value))
def test_a_mutant_of_a_family_fails_its_proof(mutate, name):
    found = run_world(mutated_family, 2, mutate, name)
    assert max(max(f.errors.values()) for f in found) > 1e5 * FAMILY_FLOAT64


def mutated_loss(mutate) -> dict[str, tuple[float, float, float]]:
    mutate()
    return against_torch(["hard", "smoothed"])


@pytest.mark.parametrize(
    "mutate",
    [padding_among_the_classes, largest_logit_of_the_slice_alone, target_taken_on_every_rank],
    ids=lambda mutate: mutate.__name__,
)
def test_a_mutant_of_the_loss_fails_its_proof(mutate):
    found = run_world(mutated_loss, 2, mutate)
    assert max(max(errors) for rank in found for errors in rank.values()) > 1e6 * CUT_LOSS_FLOAT64


def mutated_classifier(mutate) -> dict[str, dict[str, float]]:
    mutate()
    return gradients_of_families(["vit_base_patch16_224"])


def test_a_mutant_of_the_classifier_fails_its_proof():
    found = run_world(mutated_classifier, 2, input_of_the_classifier_not_summed)
    for rank in found:
        errors = rank["vit_base_patch16_224"]
        assert errors["loss"] <= FAMILY_FLOAT64 and errors["input"] > 1e5 * FAMILY_FLOAT64


def test_silent_mutants_leave_the_output_exact():
    """Why every parameter's gradient is compared on every rank."""
    for mutate in (backward_exchange_removed, partial_gradients_not_summed):
        assert run_world(mutated, 2, mutate)[0].errors["output"] <= BLOCK_FLOAT64
