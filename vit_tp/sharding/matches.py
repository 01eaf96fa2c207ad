"""Which modules of a model does the table cut, and does tp divide them? Changes nothing.

Does not know: how a cut is made (convert.py), stages, groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from vit_tp.config.limits import NAMES
from vit_tp.errors import ConfigError, TopologyError
from vit_tp.sharding.rule import ShardRule, find, replicated
from vit_tp.sharding.rules import is_replicable, rule_for


@dataclass(frozen=True)
class Match:
    """A module and the rule that cuts it.

    Args:
        name: Of the module in the timm model.
        module: The module, whole.
        rule: How it is cut.
        kept_whole: What tp does not divide, where the module is replicated for that reason.
        block: Name of the block of the stream that holds it; None outside of the stream.
    """

    name: str
    module: nn.Module
    rule: ShardRule
    kept_whole: tuple[tuple[str, int], ...] = ()
    block: str | None = None


def plan_cut(module: nn.Module, tp_size: int, name: str = "", indivisible: str = "refuse") -> list[Match]:
    """Return all modules that the table has a say in, each with its rule. Changes nothing.

    Args:
        module: A timm model, or the part of one that a pipeline stage holds; real or on meta.
        tp_size: Ranks that share each weight.
        name: The module's name in the timm model.
        indivisible: What to do where tp does not divide heads or MLP width: "refuse", or "mlp_only" to keep such
            modules whole on every rank and cut the rest, which is as a rule the MLPs.

    Raises:
        ConfigError: If `indivisible` is unknown.
        ShardRuleError: At the first module that no rule covers.
        TopologyError: If tp does not divide what it must.
    """
    known = NAMES["parallel.indivisible"]
    if indivisible not in known:
        raise ConfigError(
            f"indivisible={indivisible!r} is not known; it says what happens where tp does not divide heads or MLP "
            f"width. Use one of {', '.join(known)}."
        )
    matches = list(_find(module, name, tp_size, indivisible == "mlp_only"))
    if indivisible == "refuse":
        _require_divisible(matches, tp_size)
    return matches


def _find(
    module: nn.Module,
    name: str,
    tp_size: int,
    keep_indivisible: bool,
    block: str | None = None,
    is_stream: bool = False,
) -> Iterator[Match]:
    rule = rule_for(module, name)
    wrong = tuple((what, n) for what, n in rule.numbers(module).items() if n % tp_size)
    if wrong and keep_indivisible:
        yield Match(name, module, replicated(module), kept_whole=wrong, block=block)
        return
    yield Match(name, module, rule, block=block)
    for child_name in rule.walk:
        child, path = find(module, child_name), f"{name}.{child_name}".lstrip(".")
        if child is None:
            continue
        own_block = path if is_stream else block
        if is_replicable(child):
            yield Match(path, child, replicated(child), block=own_block)
        else:
            yield from _find(child, path, tp_size, keep_indivisible, own_block, child_name == rule.stream)


def legal_tp_sizes(matches: list[Match]) -> list[int]:
    """Return the tp sizes that divide the heads and hidden widths of every cut module."""
    whole = math.gcd(*(n for match in matches for n in match.rule.numbers(match.module).values()))
    return [tp for tp in range(1, whole + 1) if whole % tp == 0]


def _require_divisible(matches: list[Match], tp_size: int) -> None:
    numbers = {item for match in matches for item in match.rule.numbers(match.module).items()}
    wrong = sorted((what, n) for what, n in numbers if n % tp_size)
    if wrong:
        mlp_only = ", or parallel.indivisible=mlp_only, which keeps whole what tp does not divide and cuts the rest"
        raise TopologyError(
            f"parallel.tp={tp_size} does not divide {' and '.join(f'{what}={n}' for what, n in wrong)}; "
            f"heads and columns cannot be shared between ranks. "
            f"Use parallel.tp={', '.join(map(str, legal_tp_sizes(matches)))}"
            f"{mlp_only if any(_is_divided(match, tp_size) for match in matches) else ''}."
        )


def _is_divided(match: Match, tp_size: int) -> bool:
    return match.rule.cuts and not any(n % tp_size for n in match.rule.numbers(match.module).values())
