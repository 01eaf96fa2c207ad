"""The few layers of ours that hold slices: the two ends at which a cut weight meets whole activations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vit_tp.parallel.regions import Region
from vit_tp.parallel.rng import PrivateStream


class Enter:
    """Forward pre-hook of a cut module: its first argument enters the region.

    Args:
        region: Where partial sums are exchanged.
        stream: The random numbers of this rank alone, for dropout inside.
        dropouts: Dropout layers on cut activations; the stream is only switched while one of them is active.
    """

    def __init__(self, region: Region, stream: PrivateStream, dropouts: list[nn.Module]) -> None:
        self.region, self.stream, self.dropouts = region, stream, dropouts

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = args
        return self.enter(x), *rest

    def after(self, module: nn.Module, args: tuple[Tensor, ...], x: Tensor) -> Tensor:
        """The same as a forward hook of the last module outside."""
        return self.enter(x)

    def enter(self, x: Tensor) -> Tensor:
        if any(dropout.training and dropout.p > 0 for dropout in self.dropouts):
            self.stream.enter(x.device)
        return self.region.enter(x)


class Pause:
    """Forward hooks of a module inside a region that draws random numbers all the same on every rank.

    Args:
        stream: The random numbers of this rank alone, left for so long.
    """

    def __init__(self, stream: PrivateStream) -> None:
        self.stream = stream

    def before(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.stream.pause(args[0].device)

    def after(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        self.stream.resume(args[0].device)


class RowLinear(nn.Linear):
    """A linear layer whose input columns are cut, at the end of a region.

    (B, N, M/tp) -> (B, N, C): each rank multiplies its columns, the region sums, and the bias is added once, after the
    sum. Takes over the parameters of the layer that it replaces.

    Args:
        linear: The layer to replace; its weight is cut already, (C, M/tp).
        region: Where partial sums are exchanged.
        stream: The random numbers of this rank alone, left here; None where another row linear follows.
    """

    def __init__(self, linear: nn.Linear, region: Region, stream: PrivateStream | None) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would draw weights
        self.in_features, self.out_features = linear.weight.shape[1], linear.weight.shape[0]
        self.weight, self.bias = linear.weight, linear.bias
        self.region, self.stream = region, stream
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.stream is not None:
            self.stream.leave(x.device)
        x = self.region.leave(F.linear(x, self.weight))
        return x if self.bias is None else x + self.bias.to(x.dtype)  # under autocast x is of a half type


class MixLinear(nn.Linear):
    """A linear layer from all heads to all heads, on cut heads: (..., H/tp) -> (..., H/tp) through (..., H).

    Each rank multiplies the columns of its heads, the sum is exchanged, and each keeps the rows of its heads.

    Args:
        linear: The layer to replace; weight (H, H/tp) and bias (H/tp,) are cut already.
        region: Where sums are exchanged.
    """

    def __init__(self, linear: nn.Linear, region: Region) -> None:
        nn.Module.__init__(self)
        self.in_features = self.out_features = linear.weight.shape[1]
        self.weight, self.bias = linear.weight, linear.bias
        self.region = region
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.region.total(F.linear(x, self.weight))
        own = mixed.narrow(-1, self.region.tp_rank * self.out_features, self.out_features)
        return own if self.bias is None else own + self.bias.to(own.dtype)
