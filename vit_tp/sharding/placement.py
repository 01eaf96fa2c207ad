"""How is this parameter cut? One small record on the parameter itself, read by everything that slices or merges.

Does not know: timm, process groups. Only sizes and tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Replicated:
    """Every tensor-parallel rank holds the whole tensor.

    Args:
        grad_sum: Each rank's gradient covers only its own heads or columns and must be summed over tp before use.
    """

    grad_sum: bool = False

    def cut(self, full: Tensor, tp_size: int, tp_rank: int) -> Tensor:
        return full

    def merge(self, locals_: Sequence[Tensor]) -> Tensor:
        return locals_[0]


@dataclass(frozen=True)
class Sharded:
    """One dim is a row of packed parts, and each rank holds its equal share of every part.

    A fused qkv has three parts; cutting it as one would give rank 0 all of q and half of k.

    Args:
        dim: The dim that is cut.
        parts: Full sizes of the parts along `dim`, in order.
        padding: Zeros behind the last part, so that the ranks divide it; the last ranks hold them.
    """

    dim: int
    parts: tuple[int, ...]
    padding: int = 0

    def cut(self, full: Tensor, tp_size: int, tp_rank: int) -> Tensor:
        """Return one rank's slice of the full tensor. Inverse: `merge`.

        Raises:
            ValueError: If tp_size does not divide every part, padding included, or the parts do not add up to the dim.
        """
        widths = self._widths(tp_size)
        if sum(self.parts) != full.shape[self.dim] or sum(widths) * tp_size != full.shape[self.dim] + self.padding:
            raise ValueError(f"{self} does not cut dim {self.dim} of {tuple(full.shape)} into {tp_size} equal shares.")
        shares = []
        for part, width in zip(full.split(self.parts, self.dim), widths):
            first = min(tp_rank * width, part.shape[self.dim])
            shares.append(part.narrow(self.dim, first, _held(part.shape[self.dim], width, tp_rank)))
        shape = list(full.shape)
        shape[self.dim] = sum(widths) - sum(share.shape[self.dim] for share in shares)
        return torch.cat([*shares, full.new_zeros(shape)] if shape[self.dim] else shares, self.dim)

    def merge(self, locals_: Sequence[Tensor]) -> Tensor:
        """Return the full tensor from the slices of all ranks, in rank order. Inverse: `cut`."""
        widths = self._widths(len(locals_))
        shares = [local.split(widths, self.dim) for local in locals_]
        pieces = [
            share.narrow(self.dim, 0, _held(size, width, rank))
            for size, width, of_part in zip(self.parts, widths, zip(*shares))
            for rank, share in enumerate(of_part)
        ]
        return torch.cat(pieces, self.dim)

    def _widths(self, tp_size: int) -> list[int]:
        """Return what each rank holds of each part, padding included."""
        *parts, last = self.parts
        return [size // tp_size for size in (*parts, last + self.padding)]


def _held(size: int, width: int, rank: int) -> int:
    """Return how much of a part a rank holds, padding not counted."""
    return min(max(size - rank * width, 0), width)


Placement = Replicated | Sharded


def mark(param: nn.Parameter, placement: Placement) -> None:
    """Write the record on a parameter, and the flags by which DeepSpeed counts cut parameters in its norm.

    Without the flags DeepSpeed leaves the shares of tp ranks above 0 out of the gradient norm.
    """
    param.placement = placement
    if isinstance(placement, Sharded):
        param.model_parallel = True
        param.tensor_model_parallel = True


def counts_in_norm(param: nn.Parameter, tp_rank: int) -> bool:
    """Return whether a rank counts a parameter in the gradient norm: its own slices, and whole tensors once.

    A table that several pipeline stages hold is counted by one of them.
    """
    return not getattr(param, "ds_pipe_replicated", False) and _is_counted_over_tp(param, tp_rank)


def count_elsewhere(param: nn.Parameter) -> None:
    """Mark a parameter that another pipeline stage holds too and counts in the norm, in DeepSpeed's own way."""
    param.ds_pipe_replicated = True


def _is_counted_over_tp(param: nn.Parameter, tp_rank: int) -> bool:
    return tp_rank == 0 or isinstance(placement_of(param), Sharded)


def placement_of(param: nn.Parameter) -> Placement:
    """Return the record of a parameter; one that was never marked is whole on every rank."""
    return getattr(param, "placement", Replicated())
