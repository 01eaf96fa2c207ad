"""The classifier, cut by classes: each rank has ceil(K/tp) rows, zeros behind the K-th, whatever tp and K.

It stands behind the blocks, on activations that every rank holds whole, so its exchange is always the exact one,
whatever region the blocks use: nothing forward, the sum of the input's gradient backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from vit_tp.errors import ShardRuleError
from vit_tp.parallel.collectives import copy_to_group
from vit_tp.parallel.columns import Columns, padding_of
from vit_tp.parallel.regions import Region
from vit_tp.sharding.matches import Match
from vit_tp.sharding.placement import Placement, Replicated, Sharded, mark
from vit_tp.sharding.rule import find


class ColumnLinear(nn.Linear):
    """A classifier whose classes are cut: (B, C) -> (B, ceil(K/tp)), this rank's columns, zeros in the padding.

    Takes over the parameters of the layer that it replaces.

    Args:
        linear: The layer to replace; weight (ceil(K/tp), C) and bias (ceil(K/tp),) are cut already.
        columns: Which classes are this rank's.
    """

    def __init__(self, linear: nn.Linear, columns: Columns) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would draw weights
        self.in_features, self.out_features = linear.weight.shape[1], linear.weight.shape[0]
        self.weight, self.bias = linear.weight, linear.bias
        self.columns = columns
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(copy_to_group(x, self.columns.tp_group), self.weight, self.bias)


class GatheredLinear(ColumnLinear):
    """A classifier whose classes are cut, for any loss: (B, C) -> (B, K) through (B, ceil(K/tp))."""

    def forward(self, x: Tensor) -> Tensor:
        return self.columns.gather(super().forward(x))


def cut_classifier_(module: nn.Module, path: str, region: Region, cut_head_from: int, gather_logits: bool) -> None:
    """Cut a classifier in place where it has enough classes; else every rank holds it whole.

    Args:
        module: The module that holds it.
        path: Where; there may be none, or an identity.
        region: Says who shares it. Only the group is taken from it.
        cut_head_from: Number of classes from which on it is cut.
        gather_logits: Whether it then gives whole logits, or this rank's columns.
    """
    linear = find(module, path)
    if not _is_wide(linear, cut_head_from):
        for param in linear.parameters() if linear is not None else ():
            mark(param, Replicated())
        return
    columns = Columns(linear.out_features, region.tp_size, region.tp_rank, region.tp_group)
    placement = Sharded(0, (columns.total,), padding_of(columns.total, columns.tp_size))
    for name, param in list(linear.named_parameters(recurse=False)):
        linear._parameters[name] = _cut(param, placement, columns)
    if columns.tp_size > 1:
        module.set_submodule(path, (GatheredLinear if gather_logits else ColumnLinear)(linear, columns))


def is_classifier_cut(matches: Sequence[Match], tp_size: int, cut_head_from: int) -> bool:
    """Return whether `cut_classifier_` will cut what gives the logits. Changes nothing.

    Args:
        matches: From `plan_cut` of the whole model.
        tp_size: Ranks that share each weight.
        cut_head_from: Number of classes from which on it is cut.
    """
    return tp_size > 1 and any(_is_wide(linear, cut_head_from) for linear in _classifiers(matches))


def require_classifier(model: nn.Module, matches: Sequence[Match]) -> None:
    """Raise unless the model has a classifier that can be cut.

    Raises:
        ShardRuleError: If it has none, or one that is whole on every rank.
    """
    if not any(_is_wide(linear, 1) for linear in _classifiers(matches)):
        raise ShardRuleError(
            f"gather_logits=False, but {type(model).__name__} has no linear classifier that its sharding rule cuts "
            f"(field `wide`); every rank would have the whole logits. Use gather_logits=True, or a model with such a "
            f"classifier and num_classes above 0."
        )


def _classifiers(matches: Sequence[Match]) -> Iterator[nn.Module | None]:
    return (find(match.module, path) for match in matches for path in match.rule.wide)


def _is_wide(linear: nn.Module | None, cut_head_from: int) -> bool:
    return isinstance(linear, nn.Linear) and linear.out_features >= cut_head_from


def _cut(param: nn.Parameter, placement: Placement, columns: Columns) -> nn.Parameter:
    if columns.tp_size > 1:
        local = placement.cut(param.detach(), columns.tp_size, columns.tp_rank)
        param = nn.Parameter(local.contiguous(), requires_grad=param.requires_grad)
    mark(param, placement)
    return param
