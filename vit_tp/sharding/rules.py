"""THE table: how each timm class is cut.

A rule names every child, parameter and buffer of its class exactly once; whatever it leaves out is refused by name when
a model is cut. Classes are matched by identity, not by `isinstance`: a subclass may add weights that its parent's rule
knows nothing of. timm's forward runs unmodified, because the attributes that it reshapes by become local.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from timm.layers import (
    Attention,
    AttentionPoolLatent,
    AttentionPoolPrr,
    LayerNorm,
    LayerNormFp32,
    LayerScale,
    Mlp,
    PatchEmbed,
    RmsNorm,
)
from timm.layers.activations import PReLU
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from vit_tp.errors import ShardRuleError

Parts = Callable[[nn.Module], tuple[int, ...]]


@dataclass(frozen=True)
class ShardRule:
    """How one class of module is cut, or that it only holds others.

    A child is named in exactly one of the fields; a field may name children that an instance lacks.

    Args:
        column: Linear child whose output is cut -> full sizes of the parts packed along it.
        row: Linear children whose input is cut: they end the region.
        partial: Children that every rank holds whole but uses on its own slice: their gradients are summed over tp.
        inner: Children without weights that act on cut activations; dropouts among them draw per rank.
        whole: Children on complete activations, replicated as they are with all that they hold.
        walk: Children to be looked up in the table in their turn.
        wide: Linear children cut by output and gathered again where that many classes make it worth while.
        absent: Children that must be `nn.Identity`, -> why they cannot be cut.
        own: Parameters and buffers of the module itself, replicated.
        local: Integer attributes that are divided by tp.
        divides: What tp must divide: name for messages -> number.
    """

    column: Mapping[str, Parts] = field(default_factory=dict)
    row: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    walk: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    divides: Mapping[str, Callable[[nn.Module], int]] = field(default_factory=dict)

    @property
    def cuts(self) -> bool:
        return bool(self.row)

    @property
    def names(self) -> tuple[str, ...]:
        return (
            *self.column, *self.row, *self.partial, *self.inner, *self.whole, *self.walk, *self.wide, *self.absent,
            *self.own,
        )  # fmt: skip


_SPANS_THE_CUT = "its mean and variance span the cut axis"

RULES: dict[type[nn.Module], ShardRule] = {
    Attention: ShardRule(
        column={"qkv": lambda m: (m.attn_dim,) * 3, "gate": lambda m: (m.attn_dim,)},
        row=("proj",),
        partial=("q_norm", "k_norm"),  # one weight of width D for all heads
        inner=("attn_drop",),
        whole=("proj_drop",),
        absent={"norm": _SPANS_THE_CUT},
        local=("num_heads", "attn_dim"),
        divides={"num_heads": lambda m: m.num_heads},
    ),
    Mlp: ShardRule(
        column={"fc1": lambda m: (m.fc1.out_features,)},
        row=("fc2",),
        partial=("act",),  # StarReLU and PReLU have weights
        inner=("drop1",),
        whole=("drop2",),
        absent={"norm": _SPANS_THE_CUT},
        divides={"MLP width": lambda m: m.fc1.out_features},
    ),
    Block: ShardRule(
        walk=("attn", "mlp"),
        whole=("norm1", "ls1", "drop_path1", "norm2", "ls2", "drop_path2"),
    ),
    VisionTransformer: ShardRule(
        walk=("blocks",),
        whole=("patch_embed", "pos_drop", "patch_drop", "norm_pre", "norm", "attn_pool", "fc_norm", "head_drop"),
        wide=("head",),
        own=("cls_token", "reg_token", "pos_embed"),
    ),
}

# What may be replicated as it is, with all that it holds, where a rule says `whole` or `partial`.
REPLICABLE: set[type[nn.Module]] = {
    AttentionPoolLatent, AttentionPoolPrr, LayerNorm, LayerNormFp32, LayerScale, PatchEmbed, PReLU, RmsNorm,
    nn.LayerNorm, nn.PReLU,
}  # fmt: skip


def rule_for(module: nn.Module, name: str) -> ShardRule:
    """Return the rule of a module after checking that it covers the module.

    Args:
        module: An uncut module, real or on meta.
        name: Its name in the model, for messages.

    Raises:
        ShardRuleError: If the class has no rule, or the rule leaves a child, parameter or buffer unnamed.
    """
    kind = type(module)
    where = f"{kind.__module__}.{kind.__qualname__} ({name or 'the model'})"
    if kind is nn.Sequential:
        return ShardRule(walk=tuple(child for child, _ in module.named_children()))
    rule = RULES.get(kind)
    if rule is None:
        known = ", ".join(sorted(k.__name__ for k in RULES))
        raise ShardRuleError(
            f"{where} has no sharding rule, and cutting it by guess would give wrong numbers; "
            f"classes with a rule: {known}. Use parallel.tp=1, or add a rule to vit_tp.sharding.rules.RULES."
        )
    present = [child for child, _ in module.named_children()]
    present += [own for own, tensor in (*module._parameters.items(), *module._buffers.items()) if tensor is not None]
    unnamed = [child for child in present if rule.names.count(child) != 1]
    if unnamed:
        raise ShardRuleError(
            f"the sharding rule of {where} does not name {', '.join(unnamed)} exactly once; "
            f"what it does not name it cannot cut. Use parallel.tp=1, or extend the rule."
        )
    for child, reason in rule.absent.items():
        if not isinstance(getattr(module, child, None), (nn.Identity, type(None))):
            raise ShardRuleError(
                f"{name}.{child} ({type(getattr(module, child)).__name__}) cannot be cut: {reason}. "
                f"Use parallel.tp=1, or a model without it."
            )
    for child in (*rule.whole, *rule.partial):
        _require_replicable(getattr(module, child, None), f"{name}.{child}".lstrip("."))
    return rule


def _require_replicable(module: nn.Module | None, name: str) -> None:
    if module is None or type(module) in REPLICABLE or not any(True for _ in module.parameters()):
        return
    raise ShardRuleError(
        f"{name} is a {type(module).__name__}, which is not known to be replicable; replicating what is not understood "
        f"would hide wrong numbers. Use parallel.tp=1, or add the class to vit_tp.sharding.rules.REPLICABLE."
    )
