"""The exchanges that autograd sees, each beside its conjugate. Stateless.

An exchange and its conjugate are one another's backward, so a cut block has exactly the gradient of the whole one.
Gradients may be strided in any way; what goes on the wire is made contiguous first.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of x over the group in a new tensor, outside autograd."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


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
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromGroup(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, dim=-1)

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
