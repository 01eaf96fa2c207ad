"""Cross-entropy over logits whose classes are cut over ranks, without ever gathering them.

Per micro-batch one exchange of the largest logit of each row and one of a few sums, and none backward: each rank's
gradient is that of its own columns. The gradient is worked out in forward, in the place of the probabilities, so one
tensor of (B, ceil(K/tp)) is all that is kept.

Does not know: tasks, models, where the targets come from.

Source: Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py, extended by soft targets and padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from vit_tp.errors import ConfigError
from vit_tp.parallel.columns import Columns

IGNORED = -100
"""The hard target of a row that does not count, as in torch."""


class _CutCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, columns: Columns, smoothing: float) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        x = columns.without_padding(logits.detach()).to(wide)  # (B, own)
        x = x - columns.highest(x).unsqueeze(1)
        is_soft, even = targets.is_floating_point(), smoothing / columns.total
        if is_soft:
            soft = columns.of(targets).to(wide)
            sums = [(soft * x).sum(1), soft.sum(1)]
        else:
            sums = [columns.pick(x, targets)]
        if smoothing:
            sums.append(x.sum(1))
        probabilities = x.exp_()
        total, at_target, *others = columns.sum(torch.stack([probabilities.sum(1), *sums]))
        if is_soft:
            weight = (1 - smoothing) * others[0] + smoothing
        else:  # a target that is no class makes loss and gradient NaN; raising would make the host wait for the device
            total = torch.where((targets >= 0) & (targets < columns.total), total, torch.nan)
            weight = torch.ones_like(total)
        losses = total.log() * weight - (1 - smoothing) * at_target
        if smoothing:
            losses -= even * others[-1]
        if ctx.needs_input_grad[0]:
            grad = probabilities.mul_((weight / total).unsqueeze(1))
            if is_soft:
                grad.sub_(soft, alpha=1 - smoothing)
            elif columns.own:
                place = (targets - columns.first).clamp(0, columns.own - 1).unsqueeze(1)
                grad.scatter_add_(1, place, (smoothing - 1) * columns.has(targets).to(wide).unsqueeze(1))
            if smoothing:
                grad.sub_(even)
            ctx.save_for_backward(grad)
            ctx.dtype, ctx.padding = logits.dtype, columns.held - columns.own
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        grad = (grad * grad_losses.unsqueeze(1)).to(ctx.dtype)
        return F.pad(grad, (0, ctx.padding)) if ctx.padding else grad, None, None, None


def cross_entropy(
    logits: Tensor, targets: Tensor, columns: Columns, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Return what `torch.nn.functional.cross_entropy` would of the gathered logits, the same bits on every rank.

    Collective over the ranks of `columns`: one MAX of B numbers and one SUM of (B, 2), with smoothing (B, 3), with soft
    targets (B, 3), with both (B, 4). On one rank it is torch's own.

    Args:
        logits: This rank's, (B, ceil(K/tp)), padding included. Half types are computed in float32.
        targets: The same on every rank: classes (B,) int64, -100 for a row that does not count; or soft (B, K) float,
            of which each rank reads its own columns.
        columns: Which classes are this rank's.
        label_smoothing: As torch has it, for soft targets too.
        reduction: "mean" over the rows that count, or "none".

    Returns:
        Scalar, or (B,) with "none"; float32, float64 for float64 logits. NaN where a target is no class.

    Raises:
        ConfigError: If the shapes are not those of cut logits and their targets.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_soft = targets.is_floating_point()
    if columns.tp_size == 1:
        targets = targets.to(logits.dtype) if is_soft else targets
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction=reduction)
    _require_cut(logits, targets, columns)
    if is_soft:
        losses = _CutCrossEntropy.apply(logits, targets, columns, label_smoothing)
        return losses.mean() if reduction == "mean" else losses
    is_counted = targets != IGNORED
    losses = _CutCrossEntropy.apply(logits, targets.masked_fill(~is_counted, 0), columns, label_smoothing)
    losses = torch.where(is_counted, losses, 0.0)
    return losses.sum() / is_counted.sum() if reduction == "mean" else losses


class ShardedCrossEntropy(nn.Module):
    """The loss of a classifier whose classes are cut: `torch.nn.CrossEntropyLoss` that never sees the whole logits.

    For models cut by `vit_tp.shard_` or `vit_tp.pipeline` with `gather_logits=False`. Every rank of `tp_group` must
    call it, with its own columns and the same targets, and each gets the same loss, to the bit.

    Args:
        tp_group: The ranks that the classifier is cut over.
        num_classes: Classes of all ranks, K.
        smoothing: Label smoothing, as torch has it.
    """

    def __init__(self, tp_group: ProcessGroup, num_classes: int, smoothing: float = 0.0) -> None:
        super().__init__()
        self.columns = Columns.over(tp_group, num_classes)
        self.smoothing = smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar in float32 (float64 for float64 logits); see `cross_entropy`.

        Args:
            logits: This rank's columns, (B, ceil(K/tp)).
            targets: Classes (B,) int64, -100 for a row that does not count; or soft (B, K) float.

        Raises:
            ConfigError: If the logits are whole, or the targets do not fit.
        """
        return cross_entropy(logits, targets, self.columns, self.smoothing)


def _require_cut(logits: Tensor, targets: Tensor, columns: Columns) -> None:
    if logits.dim() != 2 or logits.shape[1] != columns.held:
        raise ConfigError(
            f"the loss was given logits of {tuple(logits.shape)}, and each of {columns.tp_size} ranks holds "
            f"{columns.held} columns of {columns.total} classes; it would compare other classes than its targets mean. "
            f"Cut the classifier with gather_logits=False, and give the loss its num_classes."
        )
    wanted = (len(logits), columns.total) if targets.is_floating_point() else (len(logits),)
    if tuple(targets.shape) != wanted:
        raise ConfigError(
            f"the loss was given {targets.dtype} targets of {tuple(targets.shape)} for {len(logits)} rows; each row "
            f"needs its class or the weights of all {columns.total} classes. Give it targets of {wanted}."
        )
