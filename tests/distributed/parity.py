"""Compare a cut copy of a timm model with the whole one on this rank: outputs and every gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Comparison:
    """What one rank found.

    Args:
        errors: Largest difference relative to the largest value: output, input gradient, each parameter's gradient,
            the norm, the merged state.
        partial: The same of gradients that were summed over tp, before the sum.
        cut: Number of tensors cut.
        total: Number of parameters.
    """

    errors: dict[str, float] = field(default_factory=dict)
    partial: dict[str, float] = field(default_factory=dict)
    cut: int = 0
    total: int = 0


def compare(whole: nn.Module, cut: nn.Module, x: Tensor, shard_: Callable[[nn.Module], object]) -> Comparison:
    """Run both models forward and backward on the same input and compare.

    Args:
        whole: Stock timm, the oracle.
        cut: A copy, cut here.
        x: The input.
        shard_: Cuts the copy in place.
    """
    import vit_tp
    from vit_tp.sharding.placement import Replicated, Sharded, placement_of

    cut.load_state_dict(whole.state_dict())
    shard_(cut)
    generator = torch.Generator().manual_seed(1)
    inputs, outputs = [x.clone().requires_grad_() for _ in range(2)], []
    weights = None
    for model, given in zip((whole, cut), inputs):
        y = model(given)
        if weights is None:
            weights = torch.randn(y.shape, generator=generator, dtype=y.dtype)
        (y * weights).sum().backward()
        outputs.append(y.detach())

    found = Comparison()
    found.errors = {"output": error(outputs[1], outputs[0]), "input": error(inputs[1].grad, inputs[0].grad)}
    references, params = dict(whole.named_parameters()), dict(cut.named_parameters())
    assert params.keys() == references.keys()
    used = {n for n, p in references.items() if p.grad is not None}
    assert used == {n for n, p in params.items() if p.grad is not None}
    norm = torch.stack([references[n].grad.double().square().sum() for n in used]).sum().sqrt()
    summed = [n for n in used if placement_of(params[n]) == Replicated(True)]
    found.partial = {n: error(params[n].grad, references[n].grad) for n in summed}
    found.errors["norm"] = finite(abs(vit_tp.finish_gradients_(cut) / norm - 1).item())
    # softmax does not see a bias of all keys: the gradient of k_norm.bias is rounding only, and has no scale of its own
    floor = 1e-3 * max(references[n].grad.abs().max().item() for n in used)
    for n in used:
        # cut by our own placement: sound because outputs and the merged state are compared with stock timm as well
        wanted = placement_of(params[n]).cut(references[n].grad, dist.get_world_size(), dist.get_rank())
        found.errors[n] = error(params[n].grad, wanted, floor)
    state = whole.state_dict()
    merged = vit_tp.full_state_dict(cut, dist.group.WORLD)
    assert merged.keys() == state.keys()
    found.errors["state"] = max(error(full, state[n]) for n, full in merged.items())
    found.cut = sum(isinstance(placement_of(p), Sharded) for p in params.values())
    found.total = len(params)
    return found


def error(found: Tensor, wanted: Tensor, floor: float = 1e-30) -> float:
    """Largest difference relative to the largest value, or to `floor` where that is larger."""
    assert found.shape == wanted.shape
    if torch.equal(found, wanted):  # infinite clamps, empty tensors
        return 0.0
    return finite(((found - wanted).abs().max() / wanted.abs().max().clamp(min=floor)).item())


def finite(distance: float) -> float:
    """Return a distance, infinite where it is no number: max() and <= would let NaN pass."""
    return math.inf if math.isnan(distance) else distance
