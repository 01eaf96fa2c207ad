"""The exchanges that autograd sees, each beside its conjugate. Stateless.

An exchange and its conjugate are one another's backward, so a cut block has exactly the gradient of the whole one.
Gradients may be strided in any way; what goes on the wire is made contiguous first. On meta nothing is exchanged:
shapes are right and there are no numbers, so the group may be a stand-in (`groups.StandIn`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

# torch 2.14 renamed them, and warns at each call of the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce_(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum a contiguous x over the group in place, outside autograd."""
    if not x.is_meta:
        dist.all_reduce(x, group=group)
    return x


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of x over the group in a new tensor, outside autograd."""
    return all_reduce_(x.detach().clone(memory_format=torch.contiguous_format), group)


def gather(x: Tensor, group: ProcessGroup) -> tuple[Tensor, ...]:
    """Return what each rank of the group holds, in rank order, outside autograd."""
    pieces = x.new_empty((group.size(), *x.shape))
    if not x.is_meta:
        _all_gather_single(pieces.view(-1), x.contiguous().view(-1), group=group)
    return pieces.unbind(0)


def reduce_scatter(pieces: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's piece of the sum of a contiguous (tp, ...) over the group, outside autograd."""
    own = pieces.new_empty(pieces.shape[1:])
    if not pieces.is_meta:
        _reduce_scatter_single(own.view(-1), pieces.view(-1), group=group)
    return own


def broadcast_from_first_(x: Tensor, group: ProcessGroup) -> None:
    """Give every rank of the group what its first rank holds, in place, outside autograd."""
    dist.broadcast(x, src=dist.get_global_rank(group, 0), group=group)


class _CopyToGroup(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _ReduceFromGroup(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce_(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromGroup(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        return torch.cat(gather(x, group), dim=-1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.group.rank() * ctx.width, ctx.width).contiguous(), None


def copy_to_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Identity forward, sum over the group backward. Conjugate: `reduce_from_group`.

    Source: "f" in Megatron-LM, arXiv 1909.08053, section 3.
    """
    return _CopyToGroup.apply(x, group)


def reduce_from_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group forward, in place of a contiguous x; identity backward. Conjugate: `copy_to_group`.

    Source: "g" in Megatron-LM, arXiv 1909.08053, section 3.
    """
    return _ReduceFromGroup.apply(x, group)


def gather_from_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate the last dim over the group: (..., K/tp) -> (..., K). Backward: this rank's slice.

    The gathered tensor must be used alike on every rank (the same loss): each rank's gradient is then the whole one.
    """
    return _GatherFromGroup.apply(x, group)
