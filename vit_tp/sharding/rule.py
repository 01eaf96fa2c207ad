"""What a sharding rule says, and whether it covers a module.

Does not know: timm's classes (rules_layers.py, rules_models.py), ranks, how a cut is made (convert.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from vit_tp.config.types import close_names
from vit_tp.errors import ShardRuleError

Parts = int | Callable[[nn.Module], tuple[int, ...]]
"""Parts packed along a cut axis: so many equal ones, or their sizes."""


@dataclass(frozen=True)
class Edit:
    """A change of timm's own text, where a method reshapes by the width of its input instead of its attributes.

    Args:
        old: What stands there.
        new: What is put in its place.
        count: How often it stands there; another number means another timm, and is refused.
        method: The method.
    """

    old: str
    new: str
    count: int = 1
    method: str = "forward"


@dataclass(frozen=True)
class ShardRule:
    """How one class of module is cut, or that it only holds others.

    Every child, parameter and buffer of the class is named exactly once; a field may name what an instance lacks.
    A name may be a path such as "mlp.fc1"; all else under "mlp" must then be named too.

    Args:
        column: Linear children whose output is cut -> parts packed along it.
        row: Linear children whose input is cut, in the order of their calls -> parts. They end the region.
        cut: Parameters and buffers of the module itself -> the dim that is cut.
        spans: Norms over a cut axis; their statistics are exchanged.
        mixes: Linear children from all heads to all heads, on cut ones.
        partial: Children and own parameters that every rank holds whole but uses on its own slice: gradients are
            summed over tp.
        inner: Children without weights that act on cut activations; dropouts among them draw per rank.
        shared: Inner modules that draw random numbers all the same on every rank.
        whole: Children on complete activations, replicated as they are with all that they hold.
        walk: Children to be looked up in the table in their turn.
        wide: Classifiers, cut by output and gathered again where that many classes make it worth while.
        own: Parameters and buffers of the module itself, replicated.
        local: Attributes that are divided by tp: numbers, sequences, or one place of a sequence as "name[-1]".
        divides: What tp must divide: name for messages -> attribute, as in `local`.
        enter_after: Child whose output enters the region; None: the module's first argument does.
        joins_rows: The outputs of two row layers are added to one another at once: one exchange does for both.
        stream: The child of `walk` whose own children are blocks, each a map of (B, N, C) tokens in which only cut
            modules look from one token to another. What they pass on may then be divided or kept apart over tp.
        edits: Changes of timm's text.
    """

    column: Mapping[str, Parts] = field(default_factory=dict)
    row: Mapping[str, Parts] = field(default_factory=dict)
    cut: Mapping[str, int] = field(default_factory=dict)
    spans: tuple[str, ...] = ()
    mixes: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    walk: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    divides: Mapping[str, str] = field(default_factory=dict)
    enter_after: str | None = None
    joins_rows: bool = False
    stream: str | None = None
    edits: tuple[Edit, ...] = ()

    @property
    def cuts(self) -> bool:
        return bool(self.column or self.row or self.cut)

    @property
    def names(self) -> list[str]:
        return [
            *self.column, *self.row, *self.cut, *self.spans, *self.mixes, *self.partial, *self.inner, *self.whole,
            *self.walk, *self.wide, *self.own,
        ]  # fmt: skip

    def numbers(self, module: nn.Module) -> dict[str, int]:
        """Return what tp must divide in a module, by name."""
        return {what: read(module, path) for what, path in self.divides.items()}


def replicated(module: nn.Module) -> ShardRule:
    """Return the rule that leaves a module whole on every rank."""
    return ShardRule(whole=tuple(dict(module.named_children())), own=tuple(own_tensors(module)))


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that belong to the module itself."""
    tensors = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in tensors if tensor is not None}


def find(module: nn.Module, path: str) -> nn.Module | None:
    """Return the child at a path, or None where the module has none."""
    for name in path.split("."):
        module = module._modules.get(name)
        if module is None:
            return None
    return module


def read(module: nn.Module, path: str) -> Any:
    """Return the attribute at a path such as "fc2.in_features" or "in_split[0]"."""
    value: Any = module
    for name in path.split("."):
        name, _, index = name.partition("[")
        value = getattr(value, name)
        value = value[int(index.rstrip("]"))] if index else value
    return value


def divide_(module: nn.Module, path: str, divisor: int) -> None:
    """Divide an attribute of the module: a number, each place of a sequence, or one place of it as in "name[-1]"."""
    name, index = re.fullmatch(r"(\w+)(?:\[(-?\d+)\])?", path).groups()
    value = getattr(module, name)
    if index is not None:
        places = list(value)
        places[int(index)] //= divisor
        value = type(value)(places)
    elif isinstance(value, (list, tuple)):
        value = type(value)(place // divisor for place in value)
    else:
        value //= divisor
    setattr(module, name, value)


def require_covered(rule: ShardRule, module: nn.Module, where: str) -> None:
    """Raise unless a rule names every child, parameter and buffer of a module exactly once.

    Args:
        rule: The rule of the module's class.
        module: An uncut module, real or on meta.
        where: What to call it in messages.

    Raises:
        ShardRuleError: With all that it does not name, or names twice, or takes for a linear layer.
    """
    unnamed = [path for path in _paths(module, rule.names) if rule.names.count(path) != 1]
    if unnamed:
        held = set(_paths(module, rule.names))
        misspelt = [other for name in unnamed for other in close_names(name, set(rule.names) - held)]
        hint = f" It names {', '.join(misspelt)}, which the module does not have." if misspelt else ""
        raise ShardRuleError(
            f"the sharding rule of {where} does not name {', '.join(unnamed)} exactly once; what it does not name it "
            f"cannot cut.{hint} Use a model without it, or a rule that names it, with vit_tp.register_rule."
        )
    for path in (*rule.column, *rule.row, *rule.mixes):
        child = find(module, path)
        if child is not None and type(child) is not nn.Linear:
            raise ShardRuleError(
                f"{path} of {where} is a {type(child).__name__}, and only torch.nn.Linear is known to be cut right. "
                f"Use a model with plain linear layers there."
            )
    saved = [name for name in rule.cut if name in module._buffers and name not in module._non_persistent_buffers_set]
    if saved:
        raise ShardRuleError(
            f"the sharding rule of {where} cuts {', '.join(saved)}, buffers that are saved, and only parameters are "
            f"merged again; a checkpoint would hold slices. Make them parameters, or register with persistent=False."
        )
    for path in rule.inner:
        child = find(module, path)
        if child is not None and any(True for _ in child.parameters()):
            raise ShardRuleError(
                f"{path} of {where} has weights, which its rule does not expect; their gradients would be lost. "
                f"Use a model without them there."
            )


def _paths(module: nn.Module, names: list[str], prefix: str = "") -> Iterator[str]:
    """Yield the paths of what a module holds, going into children only where a name does."""
    for name in own_tensors(module):
        yield prefix + name
    for name, child in module._modules.items():
        if child is None:
            continue
        path = prefix + name
        if any(other.startswith(f"{path}.") for other in names):
            yield from _paths(child, names, f"{path}.")
        else:
            yield path
