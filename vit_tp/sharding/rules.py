"""Which rule cuts this module? Looks it up in the table, and checks that it covers the module.

The table is in two files: layers that are cut (rules_layers.py), blocks and models that hold them (rules_models.py).
Classes are matched by identity, not by `isinstance`: a subclass may add weights that its parent's rule knows nothing
of. `register_rule` adds to the table.
"""

from __future__ import annotations

from torch import nn

from vit_tp.errors import ShardRuleError
from vit_tp.sharding.catalogue import why_refused
from vit_tp.sharding.norms import require_spannable
from vit_tp.sharding.rule import ShardRule, find, require_covered
from vit_tp.sharding.rules_layers import LAYERS
from vit_tp.sharding.rules_models import MODELS, REPLICABLE

RULES: dict[type[nn.Module], ShardRule] = {**LAYERS, **MODELS}
CONTAINERS = (nn.Sequential, nn.ModuleList)


def register_rule(kind: type[nn.Module], rule: ShardRule | None = None) -> None:
    """Add a class of an outside package to the table.

    Args:
        kind: The class; its subclasses need rules of their own.
        rule: How it is cut; None for a class that is replicated as it is, with all that it holds.

    Raises:
        ShardRuleError: If the class has another place already, or the rule cuts without saying what tp must divide.
    """
    where = f"{kind.__module__}.{kind.__qualname__}"
    if kind in RULES and RULES[kind] != rule or kind in REPLICABLE and rule is not None:
        raise ShardRuleError(
            f"{where} has a place in the table already, and two would contradict each other. "
            f"Register a class once, and one of your own."
        )
    if rule is None:
        REPLICABLE.add(kind)
        return
    if rule.cuts and not rule.divides:
        raise ShardRuleError(
            f"the rule of {where} cuts but does not say what tp must divide; a width that it does not would be found "
            f"halfway. Add for example divides={{'MLP width': 'fc2.in_features'}}."
        )
    RULES[kind] = rule


def rule_for(module: nn.Module, name: str) -> ShardRule:
    """Return the rule of a module after checking that it covers the module.

    Args:
        module: An uncut module, real or on meta.
        name: Its name in the model, for messages.

    Raises:
        ShardRuleError: If the class has no rule, or the rule does not fit the module.
    """
    kind = type(module)
    where = f"{kind.__module__}.{kind.__qualname__} ({name or 'the model'})"
    if kind in CONTAINERS:
        return ShardRule(walk=tuple(dict(module.named_children())))
    rule = RULES.get(kind)
    if rule is None:
        raise ShardRuleError(_unknown(module, name, where))
    require_covered(rule, module, where)
    for path in (*rule.whole, *rule.partial):
        child = find(module, path)
        if child is not None and not is_replicable(child):
            full_name, child_kind = f"{name}.{path}".lstrip("."), type(child).__name__
            raise ShardRuleError(
                f"{full_name} is a {child_kind}, which is not known to be replicable; replicating what is not "
                f"understood would hide wrong numbers. Use a model without it, or, if each rank may hold it whole, "
                f"vit_tp.register_rule({child_kind})."
            )
    for path in rule.spans:
        child = find(module, path)
        if type(child) not in (nn.Identity, type(None)):
            require_spannable(child, f"{path} of {where}")
    return rule


def is_replicable(module: nn.Module) -> bool:
    """Return whether each rank may hold a module whole: one known to, or one without weights."""
    if type(module) in CONTAINERS:
        return all(is_replicable(child) for child in module.children())
    return type(module) in REPLICABLE or not any(True for _ in module.parameters())


def _unknown(module: nn.Module, name: str, where: str) -> str:
    uncovered = sorted(
        f"{path}.{own}".lstrip(".") for path, child in module.named_modules() for own in child._parameters
    )
    if not name and (reason := why_refused(type(module))):
        return f"{type(module).__name__} {reason}"
    if not name:
        return (
            f"{type(module).__name__} is not a transformer that vit_tp can cut: it has no sharding rule, and cutting "
            f"it by guess would give wrong numbers. Use a model that `vit-tp doctor --models` lists, or give your own "
            f"class a rule with vit_tp.register_rule."
        )
    shown = ", ".join(uncovered[:6]) + (f" and {len(uncovered) - 6} more" if len(uncovered) > 6 else "")
    return (
        f"{where} has no sharding rule, so {shown} would not be covered, and cutting it by guess would give wrong "
        f"numbers. Use a model without it, or give the class a rule with vit_tp.register_rule."
    )
