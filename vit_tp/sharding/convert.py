"""Cut a timm model in place: find the rules, refuse what they do not cover, slice, and put the exchanges in.

Everything that can be refused is refused before the first tensor changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed import ProcessGroup

from vit_tp.errors import ShardRuleError, TopologyError
from vit_tp.parallel.regions import Region, build_region
from vit_tp.parallel.rng import PrivateStream
from vit_tp.sharding.layers import Enter, GatheredLinear, RowLinear
from vit_tp.sharding.placement import Placement, Replicated, Sharded, mark
from vit_tp.sharding.rules import ShardRule, rule_for

CUT_HEAD_FROM = 4096


@dataclass(frozen=True)
class Match:
    """A module and the rule that cuts it."""

    name: str
    module: nn.Module
    rule: ShardRule


def find_matches(module: nn.Module, name: str = "") -> Iterator[Match]:
    """Yield a module and all that its rule says to walk, each with its rule.

    Raises:
        ShardRuleError: At the first module that no rule covers.
    """
    rule = rule_for(module, name)
    yield Match(name, module, rule)
    for child in rule.walk:
        if getattr(module, child, None) is not None:
            yield from find_matches(getattr(module, child), f"{name}.{child}".lstrip("."))


def require_divisible(matches: list[Match], tp_size: int) -> None:
    """Raise if tp does not divide the heads and hidden widths of every cut module.

    Raises:
        TopologyError: With every number in the way, and the tp sizes that would do.
    """
    numbers = {(what, count(m.module)) for m in matches for what, count in m.rule.divides.items()}
    wrong = sorted((what, n) for what, n in numbers if n % tp_size)
    if wrong:
        whole = math.gcd(*(n for _, n in numbers))
        legal = ", ".join(str(d) for d in range(1, whole + 1) if whole % d == 0)
        raise TopologyError(
            f"parallel.tp={tp_size} does not divide {' and '.join(f'{what}={n}' for what, n in wrong)}; "
            f"heads and columns cannot be shared between ranks. Use parallel.tp={legal}."
        )


def cut_(module: nn.Module, region: Region, *, name: str = "", cut_head_from: int = CUT_HEAD_FROM) -> list[Match]:
    """Cut a module and what its rule walks, in place, real or on meta.

    Args:
        module: A timm model, or the part of one that a pipeline stage holds. Its weights must be whole.
        region: Where partial sums are exchanged.
        name: The module's name in the timm model.
        cut_head_from: Number of classes from which on the classifier is cut too, where tp divides it.

    Returns:
        The modules found, with their rules.

    Raises:
        ShardRuleError: If a module is not covered by its rule; nothing was changed.
        TopologyError: If tp does not divide it; nothing was changed.
    """
    matches = list(find_matches(module, name))
    require_divisible(matches, region.tp_size)
    for match in matches:
        _cut_match_(match, region, cut_head_from)
    return matches


def shard_(
    model: nn.Module, tp_group: ProcessGroup, region: str = "exact", *, cut_head_from: int = CUT_HEAD_FROM
) -> nn.Module:
    """Cut a timm model in place, so that each rank of `tp_group` holds its share of attention and MLP.

    Every rank must hold the same weights before, and see the same input in every forward. Make the optimizer
    afterwards; call `finish_gradients_` between backward and step.

    Args:
        model: A whole timm model with real weights (or on meta).
        tp_group: The ranks that share each weight.
        region: Where partial sums are exchanged: "exact".
        cut_head_from: Number of classes from which on the classifier is cut too.

    Returns:
        The same model.

    Raises:
        ConfigError: If the region is unknown.
        ShardRuleError: If the model holds a class without a rule, or nothing that can be cut.
        TopologyError: If the number of ranks does not divide heads or MLP width.
    """
    if hasattr(model, "tp_region"):
        raise ShardRuleError("this model is cut already; cutting a slice again would lose weights. Call shard_ once.")
    exchange = build_region(region, tp_group)
    matches = cut_(model, exchange, cut_head_from=cut_head_from)
    if not any(match.rule.cuts for match in matches):
        raise ShardRuleError(f"nothing in {type(model).__name__} can be cut; tensor parallelism would only copy it.")
    model.tp_region = exchange
    return model


def _cut_match_(match: Match, region: Region, cut_head_from: int) -> None:
    module, rule = match.module, match.rule
    _replace_own_(module, rule.own, Replicated(), region)
    for child in rule.whole:
        _replicate_(getattr(module, child, None), Replicated())
    for child in rule.partial:
        _replicate_(getattr(module, child, None), Replicated(grad_sum=region.tp_size > 1))
    for child in rule.wide:
        _cut_classifier_(module, child, region, cut_head_from)
    parts = {
        child: parts_of(module) for child, parts_of in rule.column.items() if getattr(module, child, None) is not None
    }
    for child, sizes in parts.items():
        _replace_own_(getattr(module, child), ("weight", "bias"), Sharded(0, sizes), region)
    for child in rule.row:
        linear = getattr(module, child)
        _replace_own_(linear, ("weight",), Sharded(1, (linear.weight.shape[1],)), region)
        _replace_own_(linear, ("bias",), Replicated(), region)
    if not rule.cuts or region.tp_size == 1:
        return
    for child in parts:
        getattr(module, child).out_features //= region.tp_size
    for attribute in rule.local:
        setattr(module, attribute, getattr(module, attribute) // region.tp_size)
    stream = PrivateStream(match.name, region.tp_rank)
    dropouts = [d for child in rule.inner if isinstance(d := getattr(module, child, None), nn.Dropout)]
    module.register_forward_pre_hook(Enter(region, stream, dropouts))
    for child in rule.row:
        setattr(module, child, RowLinear(getattr(module, child), region, stream))


def _cut_classifier_(module: nn.Module, child: str, region: Region, cut_head_from: int) -> None:
    linear = getattr(module, child, None)
    if not isinstance(linear, nn.Linear) or linear.out_features < cut_head_from or linear.out_features % region.tp_size:
        _replicate_(linear, Replicated())
    else:
        _replace_own_(linear, ("weight", "bias"), Sharded(0, (linear.out_features,)), region)
        if region.tp_size > 1:
            setattr(module, child, GatheredLinear(linear, region))


def _replicate_(module: nn.Module | None, placement: Placement) -> None:
    for param in module.parameters() if module is not None else ():
        mark(param, placement)


def _replace_own_(module: nn.Module, names: tuple[str, ...], placement: Placement, region: Region) -> None:
    """Put this rank's slice of each named parameter in its place; the whole tensor is let go."""
    for name in names:
        param = module._parameters.get(name)
        if param is None:
            continue
        local = placement.cut(param.detach(), region.tp_size, region.tp_rank)
        if local.shape != param.shape:
            param = nn.Parameter(local.contiguous(), requires_grad=param.requires_grad)
            module._parameters[name] = param
        mark(param, placement)
