"""The few layers of ours that hold slices: the two ends at which a cut weight meets whole activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_tp.parallel.regions import Region
from vit_tp.parallel.rng import PrivateStream
from vit_tp.sharding.saving import Saving


class Enter:
    """Forward pre-hook of a cut module: its first argument enters the region.

    Args:
        region: Where partial sums are exchanged.
        stream: The random numbers of this rank alone, for dropout inside.
        dropouts: Dropout layers on cut activations; the stream is only switched while one of them is active.
        saving: What the block saves, to be told of what is gathered here; None where it does not ask.
    """

    def __init__(
        self, region: Region, stream: PrivateStream, dropouts: list[nn.Module], saving: Saving | None = None
    ) -> None:
        self.region, self.stream, self.dropouts, self.saving = region, stream, dropouts, saving

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = args
        return self.enter(x), *rest

    def after(self, module: nn.Module, args: tuple[Tensor, ...], x: Tensor) -> Tensor:
        """The same as a forward hook of the last module outside."""
        return self.enter(x)

    def enter(self, x: Tensor) -> Tensor:
        if any(dropout.training and dropout.p > 0 for dropout in self.dropouts):
            self.stream.enter(x.device)
        else:
            self.stream.forget()
        again = self.region.again()
        if again is not None and _is_autocast(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # else the copy that autocast makes would be kept whole
        entered = self.region.enter(x)
        if again is not None and self.saving is not None:
            self.saving.can_make(entered, again, x)
        return entered


def _is_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


class DrawApart:
    """Forward hooks of a dropout on tokens that are divided over tp: each rank draws for its own.

    Args:
        stream: The random numbers of this rank alone, of this dropout.
    """

    def __init__(self, stream: PrivateStream) -> None:
        self.stream = stream

    def before(self, module: nn.Dropout, args: tuple[Tensor, ...]) -> None:
        if module.training and module.p > 0:
            self.stream.enter(args[0].device)
        else:
            self.stream.forget()

    def after(self, module: nn.Dropout, args: tuple[Tensor, ...], out: Tensor) -> None:
        self.stream.leave(args[0].device)


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
        return self.finish(F.linear(x, self.weight))

    def finish(self, partial: Tensor) -> Tensor:
        """Sum over the ranks and add the bias: (B, N, C) partial -> the stream."""
        x = self.region.leave(partial)
        return x if self.bias is None else x + self.bias.to(x.dtype)  # under autocast x is of a half type


class HeldRowLinear(RowLinear):
    """A row linear whose product is added to that of a later one, so that both are summed in one exchange.

    Its output is a scalar zero: timm adds the outputs of both at once, and the later one's holds all.
    """

    held: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.held = F.linear(x, self.weight)
        return x.new_zeros(())

    def take(self) -> Tensor:
        """Return the product, once."""
        held, self.held = self.held, None
        return held


class JoinedRowLinear(RowLinear):
    """The later one of two row linears: sums its product and the held one's, and adds both biases.

    Args:
        linear: See `RowLinear`.
        region: See `RowLinear`.
        stream: See `RowLinear`.
        earlier: The layer that is called before it.
    """

    def __init__(self, linear: nn.Linear, region: Region, stream: PrivateStream | None, earlier: HeldRowLinear) -> None:
        super().__init__(linear, region, stream)
        self._earlier = (earlier,)  # a tuple, or its parameters would be counted here too

    def forward(self, x: Tensor) -> Tensor:
        (earlier,) = self._earlier
        held = earlier.take()  # before anything may stop this pass, or it would be held until the next
        if self.stream is not None:
            self.stream.leave(x.device)
        x = self.finish(held + F.linear(x, self.weight))
        return x if earlier.bias is None else x + earlier.bias.to(x.dtype)


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
