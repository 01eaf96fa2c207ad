"""What timm lets one do with a whole model, kept true for a cut one.

`no_weight_decay`, `group_matcher`, `set_grad_checkpointing`, `forward_features` and `forward_intermediates` need
nothing: names and blocks are timm's. `reset_classifier` and `set_input_size` make new parameters, which would be drawn
differently on each rank and carry no record of how they are cut. Tokens between blocks that are divided or kept apart
over tp are no features that one could ask for.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from vit_tp.errors import ShardRuleError
from vit_tp.parallel.collectives import broadcast_from_first_
from vit_tp.parallel.regions import Region
from vit_tp.sharding.placement import Placement, Replicated, mark, placement_of

REMAKING = ("reset_classifier", "set_input_size")
"""Methods of timm models that put new parameters in place of old ones."""

WHOLE_STREAM = {
    "forward_intermediates": "return a part of them",
    "prune_intermediate_layers": "take away the block behind which they are put together",
}
"""What needs whole tokens behind each block -> what it would do without."""


@dataclass(frozen=True)
class Cut:
    """How a whole model was cut; kept on the model as `tp_cut`.

    Args:
        region: Where partial sums are exchanged.
        cut_classifiers_: Cuts the classifiers of the model, where they are wide enough.
    """

    region: Region
    cut_classifiers_: Callable[[nn.Module], None]


def keep_contracts_(model: nn.Module, region: Region, cut_classifiers_: Callable[[nn.Module], None]) -> None:
    """Let the methods that make new parameters give them their place on every rank.

    Args:
        model: A whole model, cut.
        region: Where partial sums are exchanged.
        cut_classifiers_: Cuts the classifiers of the model, where they are wide enough.
    """
    model.tp_cut = Cut(region, cut_classifiers_)
    for name in REMAKING:
        if hasattr(type(model), name):
            setattr(model, name, types.MethodType(_settling(type(model), name), model))
    for name, why in WHOLE_STREAM.items():
        if region.has_ends and hasattr(type(model), name):
            setattr(model, name, _refusing(name, why))


def _refusing(name: str, why: str) -> Callable[..., None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ShardRuleError(
            f"between its blocks this model passes on tokens that are divided or kept apart over tensor-parallel "
            f"ranks, so {name} would {why}. Cut a model with region='exact' for it."
        )

    return refuse


def _settling(kind: type[nn.Module], name: str) -> Callable[..., Any]:
    def method(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = {name: placement_of(param) for name, param in model.named_parameters()}
        result = getattr(kind, name)(model, *args, **kwargs)
        if name == "set_input_size":
            _keep_placements_(model, before)
        else:
            _place_new_(model)
        return result

    method.__name__, method.__doc__ = name, getattr(kind, name).__doc__
    return method


def _keep_placements_(model: nn.Module, before: dict[str, Placement]) -> None:
    """Mark parameters that were resampled from old ones, slice by slice."""
    for name, param in model.named_parameters():
        mark(param, before.get(name, Replicated()))


def _place_new_(model: nn.Module) -> None:
    """Make parameters that each rank drew for itself the same on all, and cut classifiers that are wide enough.

    Collective over tp.
    """
    new = [param for param in model.parameters() if not hasattr(param, "placement")]
    for param in new:
        broadcast_from_first_(param.data, model.tp_cut.region.tp_group)
        mark(param, Replicated())
    if new:
        model.tp_cut.cut_classifiers_(model)
