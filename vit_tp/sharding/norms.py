"""Norms whose axis is cut: each rank normalises its slice by the statistics of the whole.

The ranks exchange a mean and a sum of squared deviations for each token, once in each direction; those are joined
without the cancellation that a sum of squares would bring (Chan, Golub and LeVeque 1979).
"""

from __future__ import annotations

import torch
from timm.layers import LayerNorm, LayerNormFp32, RmsNorm, RmsNormFp32
from torch import Tensor, nn

from vit_tp.errors import ShardRuleError
from vit_tp.parallel.regions import Region


class SpanningNorm(nn.Module):
    """A norm over (..., F) on (..., F/tp). Takes over the parameters of the layer that it replaces.

    Args:
        norm: The layer to replace; its weight and bias are cut already.
        region: Where statistics are exchanged.
    """

    def __init__(self, norm: nn.Module, region: Region) -> None:
        super().__init__()
        self.weight = norm.weight
        self.bias = getattr(norm, "bias", None)
        self.eps, self.region = norm.eps, region
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        y = self.normalise(wide)
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype)

    def normalise(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class SpanningLayerNorm(SpanningNorm):
    """Mean and variance over the whole axis."""

    def normalise(self, x: Tensor) -> Tensor:
        tp_size, own_mean = self.region.tp_size, x.mean(-1, keepdim=True)
        own = torch.cat([own_mean, (x - own_mean).square().mean(-1, keepdim=True)], -1)  # (..., 2)
        slots = [own if rank == self.region.tp_rank else torch.zeros_like(own) for rank in range(tp_size)]
        means, variances = self.region.total(torch.stack(slots, -1)).unbind(-2)  # (..., tp) each
        mean = means.mean(-1, keepdim=True)
        variance = (variances + (means - mean).square()).mean(-1, keepdim=True)
        return (x - mean) * (variance + self.eps).rsqrt()


class SpanningRmsNorm(SpanningNorm):
    """Mean square over the whole axis."""

    def normalise(self, x: Tensor) -> Tensor:
        mean_square = self.region.total(x.square().mean(-1, keepdim=True)) / self.region.tp_size
        return x * (mean_square + self.eps).rsqrt()


SPANNING: dict[type[nn.Module], type[SpanningNorm]] = {
    LayerNorm: SpanningLayerNorm,
    LayerNormFp32: SpanningLayerNorm,
    nn.LayerNorm: SpanningLayerNorm,
    RmsNorm: SpanningRmsNorm,
    RmsNormFp32: SpanningRmsNorm,
}


def require_spannable(norm: nn.Module, name: str) -> None:
    """Raise unless the statistics of a norm can be exchanged.

    Raises:
        ShardRuleError: If it is of another class.
    """
    if type(norm) not in SPANNING:
        raise ShardRuleError(
            f"{name} is a {type(norm).__name__} over a cut axis, and only the statistics of "
            f"{', '.join(sorted(k.__name__ for k in SPANNING))} are known to be exchanged right. Use one of these."
        )
