"""The exchanges that divide tokens over a group: (B, N, C) <-> (B, ceil(N/tp), C), each beside its conjugate.

Any number of tokens will do: each rank holds ceil(N/tp), and what is missing at the end of the last ranks is zeros,
which are never gathered. Stateless.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from vit_tp.parallel.collectives import gather, reduce_scatter

ToShards = Callable[[Tensor, ProcessGroup], Tensor]


def shard_length(num_tokens: int, size: int) -> int:
    """Return how many tokens each of `size` ranks holds, padding included."""
    return -(-num_tokens // size)


def gather_tokens(x: Tensor, num_tokens: int, group: ProcessGroup) -> Tensor:
    """Return the tokens of all ranks, outside autograd: (B, ceil(N/tp), C) -> (B, N, C), contiguous."""
    length = x.shape[1]
    left = [min(max(num_tokens - rank * length, 0), length) for rank in range(group.size())]
    pieces = gather(x, group)
    return torch.cat([piece.narrow(1, 0, count) for piece, count in zip(pieces, left)], dim=1)


def sum_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's tokens of the sum over ranks, outside autograd: (B, N, C) -> (B, ceil(N/tp), C)."""
    batch, num_tokens, *rest = x.shape
    length = shard_length(num_tokens, group.size())
    pieces = x.new_empty((group.size(), batch, length, *rest))
    for rank, piece in enumerate(pieces):
        _fill_(piece, x, rank * length)
    return reduce_scatter(pieces, group)


def own_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's tokens of an x that every rank holds: (B, N, C) -> (B, ceil(N/tp), C), a copy."""
    batch, num_tokens, *rest = x.shape
    length = shard_length(num_tokens, group.size())
    return _fill_(x.new_empty((batch, length, *rest)), x, group.rank() * length)


def _fill_(shard: Tensor, x: Tensor, start: int) -> Tensor:
    count = min(max(x.shape[1] - start, 0), shard.shape[1])
    shard.narrow(1, 0, count).copy_(x.narrow(1, min(start, x.shape[1]), count))
    shard.narrow(1, count, shard.shape[1] - count).zero_()
    return shard


class _ToWhole(Function):
    """Gathers forward; backward brings the gradient to shards by `back`, `sum_tokens` or `own_tokens`."""

    @staticmethod
    def forward(ctx, x: Tensor, num_tokens: int, group: ProcessGroup, back: ToShards) -> Tensor:
        ctx.group, ctx.back = group, back
        return gather_tokens(x, num_tokens, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


class _ToShards(Function):
    """Brings x to shards by `to`, `sum_tokens` or `own_tokens`; backward gathers the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, to: ToShards) -> Tensor:
        ctx.group, ctx.num_tokens = group, x.shape[1]
        return to(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_tokens(grad, ctx.num_tokens, ctx.group), None, None


def gather_from_tokens(x: Tensor, num_tokens: int, group: ProcessGroup) -> Tensor:
    """(B, ceil(N/tp), C) -> (B, N, C), for ranks that each go on in their own way. Conjugate: `sum_to_tokens`.

    Source: "g" with its bar in arXiv 2205.05198, section 4.2.2.
    """
    return _ToWhole.apply(x, num_tokens, group, sum_tokens)


def sum_to_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """(B, N, C) partial -> (B, ceil(N/tp), C) of the sum. Conjugate: `gather_from_tokens`.

    Source: arXiv 2205.05198, section 4.2.2.
    """
    return _ToShards.apply(x, group, sum_tokens)


def divide_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """(B, N, C), the same on every rank -> (B, ceil(N/tp), C). Conjugate: `unite_tokens`.

    Backward gathers, so what made x gets its whole gradient on every rank.
    """
    return _ToShards.apply(x, group, own_tokens)


def unite_tokens(x: Tensor, num_tokens: int, group: ProcessGroup) -> Tensor:
    """(B, ceil(N/tp), C) -> (B, N, C), used alike on every rank (the same head and loss). Conjugate: `divide_tokens`.

    Each rank's gradient is the whole one already, so backward takes its tokens and exchanges nothing.
    """
    return _ToWhole.apply(x, num_tokens, group, own_tokens)
