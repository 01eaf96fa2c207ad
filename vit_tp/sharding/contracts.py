"""What timm lets one do with a whole model, kept true for a cut one.

`no_weight_decay`, `group_matcher`, `set_grad_checkpointing`, `forward_features` and `forward_intermediates` need
nothing: names and blocks are timm's. `reset_classifier` and `set_input_size` make new parameters, which would be drawn
differently on each rank and carry no record of how they are cut.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from vit_tp.parallel.collectives import broadcast_from_first_
from vit_tp.parallel.regions import Region
from vit_tp.sharding.placement import Placement, Replicated, mark, placement_of

REMAKING = ("reset_classifier", "set_input_size")
"""Methods of timm models that put new parameters in place of old ones."""


@dataclass(frozen=True)
class Cut:
    """How a whole model was cut; kept on the model as `tp_cut`.

    Args:
        region: Where partial sums are exchanged.
        placements: Record of each parameter, by name.
        cut_classifiers_: Cuts the classifiers of the model, where they are wide enough.
    """

    region: Region
    placements: dict[str, Placement]
    cut_classifiers_: Callable[[nn.Module], None]


def keep_contracts_(model: nn.Module, region: Region, cut_classifiers_: Callable[[nn.Module], None]) -> None:
    """Let the methods that make new parameters give them their place on every rank.

    Args:
        model: A whole model, cut.
        region: Where partial sums are exchanged.
        cut_classifiers_: Cuts the classifiers of the model, where they are wide enough.
    """
    placements = {name: placement_of(param) for name, param in model.named_parameters()}
    model.tp_cut = Cut(region, placements, cut_classifiers_)
    for name in REMAKING:
        if hasattr(type(model), name):
            setattr(model, name, types.MethodType(_settling(type(model), name), model))


def _settling(kind: type[nn.Module], name: str) -> Callable[..., Any]:
    def method(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = getattr(kind, name)(model, *args, **kwargs)
        _settle_(model, is_resized=name == "set_input_size")
        return result

    method.__name__, method.__doc__ = name, getattr(kind, name).__doc__
    return method


def _settle_(model: nn.Module, is_resized: bool) -> None:
    """Mark new parameters. Collective over tp.

    Args:
        model: The cut model.
        is_resized: Whether they are resampled from old ones, slice by slice; else they are whole and drawn anew.
    """
    cut: Cut = model.tp_cut
    new = {name: param for name, param in model.named_parameters() if not hasattr(param, "placement")}
    for name, param in new.items():
        if not is_resized:
            broadcast_from_first_(param.data, cut.region.tp_group)
        mark(param, cut.placements.get(name, Replicated()) if is_resized else Replicated())
    if new and not is_resized:
        cut.cut_classifiers_(model)
    cut.placements.update({name: placement_of(param) for name, param in model.named_parameters() if name in new})
