"""How would one of timm's models be cut? Built on meta and looked at; no rank, no bytes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import timm
import torch
from torch import Tensor, nn

from vit_tp.models.build import input_shape
from vit_tp.models.layouts import layout_of
from vit_tp.sharding.matches import legal_tp_sizes, plan_cut

MAX_TP = 64


@dataclass(frozen=True)
class Survey:
    """What a person asks before choosing a model.

    Args:
        name: timm's.
        cut: Classes of attention and MLP that are cut; and whether the model only encodes.
        tp_sizes: Ranks that could share each weight, up to MAX_TP.
        num_params: Of the whole model.
        num_tokens: Sequence length in the first block at the model's own input size; None where it has no blocks.
        stages: "yes" where it can be laid out on pipeline stages; else why not, in a word.
    """

    name: str
    cut: str
    tp_sizes: list[int]
    num_params: int
    num_tokens: int | None
    stages: str


def survey(name: str) -> Survey:
    """Build a timm model on meta and say how it would be cut.

    Raises:
        ShardRuleError: If it has a module that no rule covers; a model of a plugin may.
    """
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # initialisers on meta warn that they do nothing
        model = timm.create_model(name)
    num_params = sum(p.numel() for p in model.parameters())
    matches = plan_cut(model, tp_size=1)
    kinds = dict.fromkeys(type(match.module).__name__ for match in matches if match.rule.row)
    legal = [tp for tp in legal_tp_sizes(matches) if tp <= MAX_TP]
    streams = _streams(model)
    stages = "yes" if layout_of(model) else "two streams" if len(streams) > 1 else "no layout"
    cut = " + ".join(kinds) + ("" if hasattr(model, "reset_classifier") else ", no classifier")
    return Survey(name, cut, legal, num_params, max(streams, default=None), stages)


class _Stop(Exception):
    """Ends a forward that has shown what it was run for."""


@torch.no_grad()
def _streams(model: nn.Module) -> list[int]:
    """Return the length of each sequence that enters the first block, prefix tokens included."""
    found: list[int] = []

    def note(block: nn.Module, args: tuple) -> None:
        streams = args[0] if isinstance(args[0], (list, tuple)) else args
        found.extend(x.shape[1:-1].numel() for x in streams if isinstance(x, Tensor) and x.ndim > 2)
        raise _Stop

    blocks = getattr(getattr(model, "encoder", model), "blocks", None)
    if not blocks:
        return []
    hook = blocks[0].register_forward_pre_hook(note)
    try:
        model.eval()(torch.empty(input_shape(model, 2), device="meta"))
    except _Stop:
        pass
    finally:
        hook.remove()
    return found
