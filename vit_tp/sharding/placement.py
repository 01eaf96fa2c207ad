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
    """

    dim: int
    parts: tuple[int, ...]

    def cut(self, full: Tensor, tp_size: int, tp_rank: int) -> Tensor:
        """Return one rank's slice of the full tensor. Inverse: `merge`.

        Raises:
            ValueError: If tp_size does not divide every part, or the parts do not add up to the dim.
        """
        if sum(self.parts) != full.shape[self.dim] or any(part % tp_size for part in self.parts):
            raise ValueError(f"{self} does not cut dim {self.dim} of {tuple(full.shape)} into {tp_size} equal shares.")
        shares = [part.chunk(tp_size, self.dim)[tp_rank] for part in full.split(self.parts, self.dim)]
        return torch.cat(shares, self.dim)

    def merge(self, locals_: Sequence[Tensor]) -> Tensor:
        """Return the full tensor from the slices of all ranks, in rank order. Inverse: `cut`."""
        tp_size = len(locals_)
        shares = [local.split([part // tp_size for part in self.parts], self.dim) for local in locals_]
        return torch.cat([share for part in zip(*shares) for share in part], self.dim)


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
