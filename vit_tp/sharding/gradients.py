"""What must happen to gradients between backward and step, and what their true norm is.

A parameter that every rank holds whole but uses on its own heads has only a part of its gradient on each rank: the
parts are summed. In the norm a cut parameter counts on every rank, a whole one once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vit_tp.errors import ShardRuleError
from vit_tp.sharding.placement import Replicated, counts_in_norm, placement_of


def partial_parameters(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the trainable parameters whose gradients each tensor-parallel rank holds only in part."""
    return [p for p in params if p.requires_grad and placement_of(p) == Replicated(grad_sum=True)]


def sum_partial_(
    params: Iterable[nn.Parameter], tp_group: ProcessGroup, grad_of: Callable[[nn.Parameter], Tensor]
) -> None:
    """Complete partial gradients in place with one exchange for all of them. Call once a step.

    Args:
        params: The parameters of this rank; those that are partial must have gradients.
        tp_group: The ranks that share each weight.
        grad_of: Where the gradient of a parameter lies.
    """
    sum_(partial_parameters(params), tp_group, grad_of)


def sum_(params: Iterable[nn.Parameter], group: ProcessGroup, grad_of: Callable[[nn.Parameter], Tensor]) -> None:
    """Sum the gradients of trainable parameters over a group, in place, with one exchange.

    Args:
        params: The same on every rank of the group, in the same order.
        group: The ranks that each have a part.
        grad_of: Where the gradient of a parameter lies.
    """
    grads = [grad_of(p) for p in params if p.requires_grad]
    if not grads or group.size() == 1:
        return
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([g.numel() for g in grads])):
        grad.copy_(total.view_as(grad))


def finish_gradients_(model: nn.Module, max_norm: float | None = None) -> Tensor:
    """Complete the gradients of a model cut by `shard_`, return their true norm, and clip by it.

    Call once a step, between backward and `optimizer.step()`; after data-parallel averaging where there is any. Do not
    use `torch.nn.utils.clip_grad_norm_` on a cut model: it sees this rank's slices only, and ranks would drift apart.

    Args:
        model: The model, after backward.
        max_norm: Scale gradients so that their norm is at most this, as `clip_grad_norm_` does; None leaves them.

    Returns:
        The norm before clipping, a scalar equal on every rank, in float32 (float64 where gradients are).

    Raises:
        ShardRuleError: If the model is not cut.
    """
    if not hasattr(model, "tp_cut"):
        raise ShardRuleError("this model is not cut, so its gradients need no finishing. Call vit_tp.shard_ first.")
    region = model.tp_cut.region
    params = [p for p in model.parameters() if p.grad is not None]
    sum_partial_(params, region.tp_group, lambda p: p.grad)
    norm = squared_norm(((p, p.grad) for p in params), region.tp_rank)
    dist.all_reduce(norm, group=region.tp_group)
    norm = norm.sqrt()
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for param in params:
            param.grad.mul_(scale)
    return norm


def squared_norm(grads: Iterable[tuple[nn.Parameter, Tensor]], tp_rank: int) -> Tensor:
    """Return this rank's contribution to the squared norm: its shares, and the whole tensors on tp rank 0 only.

    Args:
        grads: Parameters with their gradients.
        tp_rank: This rank.
    """
    grads = list(grads)
    wide = torch.float64 if any(g.dtype == torch.float64 for _, g in grads) else torch.float32
    device = grads[0][1].device if grads else None
    counted = [g for p, g in grads if counts_in_norm(p, tp_rank)]
    return sum((g.detach().to(wide).pow(2).sum() for g in counted), torch.zeros((), dtype=wide, device=device))
