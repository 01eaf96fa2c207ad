"""Which parameters train, which decay, and by which optimizer?

The rule of decay is timm's, asked of the whole model once, by name: a pipeline stage or a cut weight cannot be asked,
since it knows neither no_weight_decay() nor its own timm name. Does not know: learning-rate schedules, ZeRO, ranks.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from torch import nn

from vit_tp.config import OptimizerConfig
from vit_tp.config.limits import NAMES
from vit_tp.errors import ConfigError


def no_decay_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that weight decay leaves alone.

    Those with at most one dimension, biases, and what the model's no_weight_decay() names, frozen or not.

    Args:
        model: The whole timm model before it is cut; may lie on the meta device.

    Source:
        timm.optim.param_groups_weight_decay, which works on trainable parameters only.
    """
    named = getattr(model, "no_weight_decay", set)()
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim <= 1 or name.endswith(".bias") or _matches(name, named)
    }


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Return whether recipe.freeze names a parameter.

    Args:
        name: timm's name of the parameter, for example "blocks.0.attn.qkv.weight".
        patterns: Shell patterns, for example "blocks.0.*"; case counts.
    """
    return _matches(name, patterns)


def param_groups(
    named_params: Iterable[tuple[str, nn.Parameter]], no_decay: set[str], weight_decay: float
) -> list[dict[str, Any]]:
    """Sort trainable parameters into a group without and a group with weight decay, in timm's order.

    Args:
        named_params: timm's name and this rank's parameter, of one pipeline stage or of the whole model.
        no_decay: Names that do not decay, from no_decay_names.
        weight_decay: Decay of the others.

    Returns:
        At most two groups {"params", "weight_decay"}; an empty one is left out, so stages may differ in number.
    """
    without: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    for name, parameter in named_params:
        if parameter.requires_grad:
            (without if name in no_decay else decayed).append(parameter)
    groups = [{"params": without, "weight_decay": 0.0}, {"params": decayed, "weight_decay": weight_decay}]
    return [group for group in groups if group["params"]]


def build_optimizer(cfg: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the optimizer from timm's registry, in the plain form that computes one parameter after the other.

    Args:
        cfg: The optimizer group of the recipe.
        groups: From param_groups; not empty.

    Raises:
        ConfigError: The optimizer is not elementwise, or nothing trains.
    """
    # ZeRO hands the optimizer one flat slice per group. Elementwise updates do not notice; LAMB, LARS, Adafactor and
    # Muon would take the slice for a layer and learn something else on each grid, without an error.
    elementwise = NAMES["recipe.optimizer.name"]
    if cfg.name not in elementwise:
        raise ConfigError(
            f"recipe.optimizer.name={cfg.name} is not one of {', '.join(elementwise)}; the optimizer sees flat slices "
            f"of many layers, so only elementwise ones compute what they should. Use recipe.optimizer.name=adamw."
        )
    if not groups:
        raise ConfigError(
            "No parameter trains here: recipe.freeze names all of them, and an optimizer needs at least one. "
            "Use fewer patterns in recipe.freeze, or parallel.pp=1 where only this pipeline stage is frozen."
        )
    return create_optimizer_v2(
        groups,
        opt=cfg.name,
        lr=cfg.lr,
        betas=tuple(cfg.betas),
        eps=cfg.eps,
        momentum=cfg.momentum,
        foreach=False,  # torch's default depends on the device, and so would the last bits of the numbers
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
