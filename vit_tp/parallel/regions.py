"""When are partial sums exchanged? Policy only: what the stream between blocks is, and what happens at the ends.

Blocks pass on a residual *stream*. `start` and `finish` stand before the first block and after the last; around each
cut module inside, `enter` stands before attention or MLP and `leave` in its row linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from vit_tp.errors import ConfigError
from vit_tp.parallel.collectives import all_reduce, copy_to_group, reduce_from_group
from vit_tp.parallel.tokens import (
    divide_tokens,
    gather_from_tokens,
    gather_tokens,
    shard_length,
    sum_to_tokens,
    unite_tokens,
)


class Region:
    """What a cut module needs of its surroundings.

    Args:
        tp_group: The ranks that share each weight, or a `StandIn` on meta.

    Attributes:
        has_ends: Whether `start` and `finish` do anything, so that blocks must form one list with known ends.
        grad_sum: Whether parameters that are whole on every rank but used on the stream get partial gradients.
        divides_tokens: Whether each rank has tokens of its own on the stream: dropout there draws per rank.
        knob: How it is asked for, and how it is not, for messages.
        is_one_model: Whether the slices of all ranks, merged, are a model that gives the same on any number of ranks.
    """

    knob: ClassVar[tuple[str, str]] = ("", "")
    has_ends: ClassVar[bool] = False
    grad_sum: ClassVar[bool] = False
    divides_tokens: ClassVar[bool] = False
    is_one_model: bool = True

    def __init__(self, tp_group: ProcessGroup) -> None:
        self.tp_group = tp_group
        self.tp_size = tp_group.size()
        self.tp_rank = tp_group.rank()

    def __deepcopy__(self, memo: dict) -> Region:
        return self  # a copy of a cut model, such as an average of its weights, talks to the same ranks

    @property
    def outside(self) -> Region:
        """The region of cut modules that stand outside of the stream, such as class attention in a head."""
        return ExactRegion(self.tp_group)

    def start(self, x: Tensor) -> Tensor:
        """(B, N, C), the same on every rank -> the stream. Inverse: `finish`."""
        return x

    def finish(self, x: Tensor) -> Tensor:
        """The stream -> (B, N, C), the same on every rank and used alike there. Inverse: `start`."""
        return x

    def resume(self, num_tokens: int) -> None:
        """Go on with a stream of N tokens that another pipeline stage started."""

    def require(self, num_tokens: int) -> None:
        """Raise if a stream of another length was started meanwhile."""

    def enter(self, x: Tensor) -> Tensor:
        """From the stream to what every rank's slice of the weights works on, (B, N, C)."""
        raise NotImplementedError

    def leave(self, x: Tensor) -> Tensor:
        """From each rank's partial product (B, N, C) to the stream. Conjugate: `enter`."""
        raise NotImplementedError

    def total(self, x: Tensor) -> Tensor:
        """Inside the region: the sum of what the ranks hold, for all of them, forward and backward."""
        return copy_to_group(reduce_from_group(x.contiguous(), self.tp_group), self.tp_group)

    def again(self) -> Callable[[Tensor], Tensor] | None:
        """Return what makes an entered tensor from the stream once more, where `enter` made a new one."""
        return None


class ExactRegion(Region):
    """The stream is whole on every rank; one all-reduce at each end: forward on leaving, backward on entering.

    Source: Megatron-LM, arXiv 1909.08053, section 3.
    """

    def enter(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C), the same tensor; its gradient is the sum over the ranks."""
        return copy_to_group(x, self.tp_group)

    def leave(self, x: Tensor) -> Tensor:
        """(B, N, C) partial -> (B, N, C) summed."""
        return reduce_from_group(x, self.tp_group)


class SequenceRegion(Region):
    """Each rank holds ceil(N/tp) tokens of the stream: gathered on entering, summed and divided on leaving.

    Source: arXiv 2205.05198, section 4.2.2; there N must be a multiple of tp.
    """

    knob = ("parallel.sequence=true", "parallel.sequence=false")
    has_ends = True
    grad_sum = True
    divides_tokens = True

    def __init__(self, tp_group: ProcessGroup) -> None:
        super().__init__(tp_group)
        self.num_tokens = 0

    def start(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, ceil(N/tp), C)."""
        self.resume(x.shape[1])
        return divide_tokens(x, self.tp_group)

    def finish(self, x: Tensor) -> Tensor:
        """(B, ceil(N/tp), C) -> (B, N, C)."""
        return unite_tokens(x, self.num_tokens, self.tp_group)

    def resume(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def require(self, num_tokens: int) -> None:
        if self.num_tokens != num_tokens:
            raise ConfigError(
                f"images make {self.num_tokens} tokens and the stages were laid out for {num_tokens}; later stages "
                f"would gather another number than there are. Use images of the model's size."
            )

    def enter(self, x: Tensor) -> Tensor:
        """(B, ceil(N/tp), C) -> (B, N, C).

        Raises:
            ConfigError: If the stream that goes on here is not the one that started last.
        """
        if x.shape[1] != shard_length(self.num_tokens, self.tp_size):
            raise ConfigError(
                f"a block was given {x.shape[1]} tokens on each of {self.tp_size} ranks, and the stream that started "
                f"last has {self.num_tokens}; another number would be gathered than there are. Go backward through one "
                f"image size before the next goes forward, and through pipelines send one size."
            )
        return gather_from_tokens(x, self.num_tokens, self.tp_group)

    def leave(self, x: Tensor) -> Tensor:
        """(B, N, C) partial -> (B, ceil(N/tp), C) summed."""
        return sum_to_tokens(x, self.tp_group)

    def again(self) -> Callable[[Tensor], Tensor]:
        num_tokens = self.num_tokens
        return lambda x: gather_tokens(x, num_tokens, self.tp_group)


class PartialRegion(Region):
    """Each rank has a stream of its own; of each product only the first channels are summed over the ranks.

    The rest stay private and are scaled by sqrt(tp), for each is one of tp terms instead of their sum. What comes out
    of the last block is the mean of all streams. A model trained so is another model for each tp.

    Args:
        tp_group: The ranks that share each weight.
        fraction: Share of the channels that is summed, p; of C channels the first floor(p C).

    Source: CAAT-Net, arXiv 2506.19645; the mean at the end is ours, there the head is cut too.
    """

    knob = ("recipe.sync=partial", "recipe.sync=exact")
    has_ends = True
    grad_sum = True

    def __init__(self, tp_group: ProcessGroup, fraction: float) -> None:
        super().__init__(tp_group)
        self.fraction = fraction
        self.is_one_model = fraction == 1

    def num_shared(self, width: int) -> int:
        """Return how many of so many channels are summed."""
        return math.floor(self.fraction * width + 1e-9)  # 0.29 * 100 is 28.999...

    def start(self, x: Tensor) -> Tensor:
        """The same tensor; its gradient is the sum over the streams, once in the whole model."""
        return _Start.apply(x, self.tp_group)

    def finish(self, x: Tensor) -> Tensor:
        """(B, N, C) of each rank -> their mean."""
        return _Mean.apply(x, self.tp_group, self.is_one_model)

    def enter(self, x: Tensor) -> Tensor:
        """The same tensor, and the same gradient: streams meet in `leave` and `start` only."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """(B, N, C) partial -> (B, N, C), the first channels summed, the others scaled."""
        return _PartialSum.apply(x, self.num_shared(x.shape[-1]), self.tp_group)


class _PartialSum(Function):
    @staticmethod
    def forward(ctx, x: Tensor, num_shared: int, group: ProcessGroup) -> Tensor:
        ctx.num_shared, ctx.group = num_shared, group
        return _sum_first(x, num_shared, group, all_reduce)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sum_first(grad, ctx.num_shared, ctx.group, _sum_wide), None, None


def _sum_first(x: Tensor, num_shared: int, group: ProcessGroup, total: Callable) -> Tensor:
    """Return x with its first channels summed over the group and the others scaled. Its own transpose."""
    shared, private = x.split((num_shared, x.shape[-1] - num_shared), dim=-1)
    if num_shared:
        shared = total(shared, group)
    return torch.cat((shared, private * math.sqrt(group.size())), dim=-1)


def _sum_wide(grad: Tensor, group: ProcessGroup) -> Tensor:
    """Sum in fp32: a stream's gradient adds up over all blocks behind it, and half types would lose small terms."""
    wide = grad if grad.dtype == torch.float64 else grad.float()
    return all_reduce(wide, group).to(grad.dtype)


class _Start(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_wide(grad, ctx.group), None


class _Mean(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, are_equal: bool) -> Tensor:
        # Of all channels: a norm behind a sum, as in post-norm blocks, makes summed ones differ between ranks.
        ctx.tp_size = group.size()
        return x.view_as(x) if are_equal else all_reduce(x, group) / ctx.tp_size

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad / ctx.tp_size, None, None


def build_region(name: str, tp_group: ProcessGroup, fraction: float = 1.0) -> Region:
    """Return the region of that name over a group. All are the same over a single rank.

    Args:
        name: "exact", "sequence" or "partial".
        tp_group: The ranks that share each weight.
        fraction: Of "partial": share of the channels that is summed.

    Raises:
        ConfigError: If there is none, or the fraction is none.
    """
    if name == "partial":
        if not 0 <= fraction <= 1:
            raise ConfigError(f"fraction={fraction} is no share of the channels. Use a number from 0 to 1.")
        return PartialRegion(tp_group, fraction) if tp_group.size() > 1 else ExactRegion(tp_group)
    known = {"exact": ExactRegion, "sequence": SequenceRegion}
    if name not in known:
        raise ConfigError(f"region={name!r} is not known. Use one of {', '.join(known)}, partial.")
    return known[name](tp_group) if tp_group.size() > 1 else ExactRegion(tp_group)
