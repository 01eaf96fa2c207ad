"""Cut a timm model in place: find the rules, refuse what they do not cover, slice, and put the exchanges in.

Everything that can be refused is refused before the first tensor changes.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vit_tp.errors import ConfigError, ShardRuleError
from vit_tp.parallel.regions import Region
from vit_tp.parallel.rng import PrivateStream
from vit_tp.sharding.classifier import cut_classifier_
from vit_tp.sharding.contracts import keep_contracts_
from vit_tp.sharding.cutting import CUT_HEAD_FROM, DEFAULT_CUTTING, Cutting
from vit_tp.sharding.edits import edit_
from vit_tp.sharding.indivisible import require_cut
from vit_tp.sharding.layers import (
    DrawApart,
    Enter,
    HeldRowLinear,
    JoinedRowLinear,
    MixLinear,
    Pause,
    RowLinear,
)
from vit_tp.sharding.matches import Match, plan_cut
from vit_tp.sharding.norms import SPANNING
from vit_tp.sharding.placement import Placement, Replicated, Sharded, mark
from vit_tp.sharding.rule import Parts, ShardRule, divide_, find, own_tensors
from vit_tp.sharding.saving import Saving
from vit_tp.sharding.stream import build_savings_, join_ends_


def cut_(module: nn.Module, region: Region, cutting: Cutting = DEFAULT_CUTTING, *, name: str = "") -> list[Match]:
    """Cut a module and what its rule walks, in place, real or on meta.

    Args:
        module: A timm model, or the part of one that a pipeline stage holds. Its weights must be whole.
        region: Where partial sums are exchanged.
        cutting: The other choices; "block" as recompute means that the caller checkpoints blocks whole.
        name: The module's name in the timm model.

    Returns:
        The modules found, with their rules.

    Raises:
        ConfigError: If a choice is unknown; nothing was changed.
        ShardRuleError: If a module is not covered by its rule; nothing was changed.
        TopologyError: If tp does not divide it; nothing was changed.
    """
    matches = plan_cut(module, region.tp_size, name, cutting.indivisible)
    _cut_matches_(matches, region, cutting)
    return matches


def shard_(
    model: nn.Module,
    tp_group: ProcessGroup,
    region: str = "exact",
    *,
    fraction: float = 1.0,
    cut_head_from: int = CUT_HEAD_FROM,
    gather_logits: bool = True,
    indivisible: str = "refuse",
    recompute: str = "none",
) -> nn.Module:
    """Cut a timm model in place, so that each rank of `tp_group` holds its share of attention and MLP.

    Every rank must hold the same weights before, and see the same input in every forward. Make the optimizer
    afterwards; call `finish_gradients_` between backward and step.

    Args:
        model: A whole timm model with real weights (or on meta).
        tp_group: The ranks that share each weight.
        region: "exact"; "sequence" to divide tokens between blocks over the ranks; "partial" to sum only some channels
            of each product, which is another model.
        fraction: Of "partial": share of the channels that is summed.
        cut_head_from: Number of classes from which on the classifier is cut too.
        gather_logits: Let a cut classifier return whole logits (B, K), for any loss. False cuts the classifier whatever
            its number of classes and returns this rank's columns (B, ceil(K/tp)), for `vit_tp.ShardedCrossEntropy`.
        indivisible: Where the number of ranks does not divide heads or MLP width: "refuse", or "mlp_only" to keep
            such modules whole on every rank.
        recompute: "none", or "norm_act" to make outputs of norms and activations again in backward. To recompute whole
            blocks call timm's `model.set_grad_checkpointing()`.

    Returns:
        The same model.

    Raises:
        ConfigError: If the region, `indivisible` or `recompute` is unknown.
        ShardRuleError: If the model holds a class without a rule, nothing that can be cut, no stream of tokens for a
            region that needs one, or no classifier whose logits could be left ungathered.
        TopologyError: If the number of ranks does not divide heads or MLP width.
    """
    if hasattr(model, "tp_cut"):
        raise ShardRuleError("this model is cut already; cutting a slice again would lose weights. Call shard_ once.")
    if recompute not in ("none", "norm_act"):
        raise ConfigError(
            f"recompute={recompute!r} is not for shard_, which leaves blocks to your loop: timm recomputes them whole. "
            f"Use 'none' or 'norm_act', and for whole blocks model.set_grad_checkpointing()."
        )
    cutting = Cutting(region, fraction, recompute, cut_head_from, gather_logits, indivisible)
    exchange = cutting.build_region(tp_group)
    matches = cutting.require(model, exchange.tp_size)
    require_cut(model, matches, exchange.tp_size)  # over one rank too: who asks for a cut expects one
    _cut_matches_(matches, exchange, cutting)
    join_ends_(matches, exchange)
    root = matches[0].rule

    def cut_classifiers_(model: nn.Module) -> None:
        for path in root.wide:
            cut_classifier_(model, path, exchange, cutting.wide_from, gather_logits)

    keep_contracts_(model, exchange, cut_classifiers_)
    return model


def _cut_matches_(matches: list[Match], region: Region, cutting: Cutting) -> None:
    savings = build_savings_(matches, region, cutting.recompute)
    for match in matches:
        for path in match.rule.wide:
            cut_classifier_(match.module, path, region, cutting.wide_from, cutting.gather_logits)
        around = region.outside if match.block is None else region
        _cut_match_(match, around, savings.get(match.block))


def _cut_match_(match: Match, region: Region, saving: Saving | None) -> None:
    module, rule = match.module, match.rule
    _cut_tensors_(module, rule, region)
    if not rule.cuts or region.tp_size == 1:
        return
    for path in rule.column:
        if linear := find(module, path):
            linear.out_features //= region.tp_size
    for attribute in rule.local:
        divide_(module, attribute, region.tp_size)
    for path in rule.spans:
        norm = find(module, path)
        if type(norm) not in (nn.Identity, type(None)):
            module.set_submodule(path, SPANNING[type(norm)](norm, region))
    for path in rule.mixes:
        module.set_submodule(path, MixLinear(find(module, path), region))
    edit_(module, rule.edits)
    if rule.row:
        _put_exchanges_(match, region, saving)


def _cut_tensors_(module: nn.Module, rule: ShardRule, region: Region) -> None:
    partial = Replicated(grad_sum=region.tp_size > 1)
    whole = Replicated(grad_sum=region.grad_sum and region.tp_size > 1)
    for name in rule.own:
        _replace_(module, name, whole, region)
    for path in rule.whole:
        _replicate_(find(module, path), whole)
    for path in rule.partial:
        _replicate_(find(module, path), partial)
        _replace_(module, path, partial, region)
    for name, dim in rule.cut.items():
        if (tensor := own_tensors(module).get(name)) is not None:
            _replace_(module, name, Sharded(dim, (tensor.shape[dim],)), region)
    for path, parts in rule.column.items():
        if linear := find(module, path):
            for name in ("weight", "bias"):
                _replace_(linear, name, Sharded(0, _sizes(parts, module, linear.out_features)), region)
    for path, parts in rule.row.items():
        if linear := find(module, path):
            _replace_(linear, "weight", Sharded(1, _sizes(parts, module, linear.in_features)), region)
            _replace_(linear, "bias", whole, region)
    for path in rule.mixes:
        if linear := find(module, path):
            _replace_(linear, "weight", Sharded(1, (linear.in_features,)), region)
            _replace_(linear, "bias", Sharded(0, (linear.out_features,)), region)
    for path in rule.spans:
        if norm := find(module, path):
            for name, tensor in own_tensors(norm).items():
                _replace_(norm, name, Sharded(0, (len(tensor),)), region)


def _put_exchanges_(match: Match, region: Region, saving: Saving | None) -> None:
    module, rule = match.module, match.rule
    stream = PrivateStream(match.name, region.tp_rank)
    dropouts = [d for path in rule.inner if isinstance(d := find(module, path), nn.Dropout)]
    entrance = Enter(region, stream, dropouts, saving)
    if rule.enter_after is None:
        module.register_forward_pre_hook(entrance)
    else:
        find(module, rule.enter_after).register_forward_hook(entrance.after)
    _put_rows_(module, rule, region, stream)
    for path in rule.shared:
        if child := find(module, path):
            pause = Pause(stream)
            child.register_forward_pre_hook(pause.before)
            child.register_forward_hook(pause.after)
    for path in rule.whole if region.divides_tokens else ():
        if isinstance(dropout := find(module, path), nn.Dropout):
            apart = DrawApart(PrivateStream(f"{match.name}.{path}", region.tp_rank))
            dropout.register_forward_pre_hook(apart.before)
            dropout.register_forward_hook(apart.after)


def _put_rows_(module: nn.Module, rule: ShardRule, region: Region, stream: PrivateStream) -> None:
    *earlier, last = [path for path in rule.row if find(module, path) is not None]
    if earlier and rule.joins_rows:
        (first,) = earlier
        held = HeldRowLinear(find(module, first), region, None)
        module.set_submodule(first, held)
        module.set_submodule(last, JoinedRowLinear(find(module, last), region, stream, held))
        return
    for path in earlier:
        module.set_submodule(path, RowLinear(find(module, path), region, None))
    module.set_submodule(last, RowLinear(find(module, last), region, stream))


def _sizes(parts: Parts, module: nn.Module, width: int) -> tuple[int, ...]:
    return (width // parts,) * parts if isinstance(parts, int) else parts(module)


def _replicate_(module: nn.Module | None, placement: Placement) -> None:
    for param in module.parameters() if module is not None else ():
        mark(param, placement)


def _replace_(module: nn.Module, name: str, placement: Placement, region: Region) -> None:
    """Put this rank's slice of a parameter or buffer in its place, if there is one; the whole tensor is let go."""
    tensor: Tensor | None = own_tensors(module).get(name)
    if tensor is None:
        return
    local = placement.cut(tensor.detach(), region.tp_size, region.tp_rank)
    if not isinstance(tensor, nn.Parameter):
        module._buffers[name] = local.contiguous()
        return
    if local.shape != tensor.shape:
        tensor = nn.Parameter(local.contiguous(), requires_grad=tensor.requires_grad)
        module._parameters[name] = tensor
    mark(tensor, placement)
