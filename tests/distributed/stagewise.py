"""A pipeline's stages in float64, driven by hand: DeepSpeed's engine keeps gradients in fp32.

The stages, cuts, regions and sums are the product's; only the schedule is not: one micro-batch forward, one back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.parity import error


def gradients(pipe: nn.Module, x: Tensor, loss_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits (on the last stage) and this rank's gradients by timm's names, sums over tp and stages made."""
    from vit_tp.sharding.gradients import sum_, sum_partial_

    place, topology = pipe.groups.place, pipe.groups.topology
    is_first, is_last = place.pp == 0, place.pp == topology.pp - 1
    before, after = (topology.rank(place.pp + step, place.dp, place.tp) if end else None for step, end in (
        (-1, not is_first), (1, not is_last)))  # fmt: skip
    given = x if is_first else _receive(before).requires_grad_()
    out = pipe(given)
    if is_last:
        loss_of(out).backward()
    else:
        _send(out.detach(), after)
        out.backward(_receive(after))
    if not is_first:
        _send(given.grad, before)
    sum_partial_(pipe.parameters(), pipe.groups.tp_group, lambda p: p.grad)
    sum_(pipe.table_parameters(), pipe.groups.pp_group, lambda p: p.grad)
    return out.detach(), {n: p.grad for n, p in pipe.named_timm_parameters() if p.grad is not None}


def _send(x: Tensor, peer: int) -> None:
    dist.send(torch.tensor(x.shape), peer)
    dist.send(x.contiguous(), peer)


def _receive(peer: int) -> Tensor:
    shape = torch.empty(3, dtype=torch.int64)
    dist.recv(shape, peer)
    x = torch.empty(*shape.tolist())
    dist.recv(x, peer)
    return x


def compare_stages(
    whole: nn.Module, x: Tensor, pp: int, tp: int, oracle: nn.Module | None = None, **cut: Any
) -> dict[str, float]:
    """Cut a stock model over a grid and return how far this rank's logits and gradients are from the model's own.

    Args:
        whole: Stock timm, real.
        x: (B, 3, Y, X).
        pp: Pipeline stages.
        tp: Tensor-parallel ranks.
        oracle: Another copy of it to compare with; None takes it itself.
        cut: Arguments of `vit_tp.pipeline`.
    """
    import vit_tp
    from vit_tp.sharding.placement import placement_of

    targets = torch.arange(len(x)) % whole.num_classes

    def loss_of(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, targets)

    pipe = vit_tp.pipeline(whole, vit_tp.Topology(pp=pp, dp=1, tp=tp), loss_of, **cut)
    pipe.train(whole.training)
    logits, found = gradients(pipe, x, loss_of)
    oracle = oracle or whole
    wanted = oracle(x)
    loss_of(wanted).backward()
    references = {n: p.grad for n, p in oracle.named_parameters() if p.grad is not None}
    floor = 1e-3 * max(grad.abs().max().item() for grad in references.values())
    place = pipe.groups.place
    errors = {
        name: error(grad, placement_of(param).cut(references[name], tp, place.tp), floor)
        for name, param in pipe.named_timm_parameters()
        if (grad := found.get(name)) is not None
    }
    assert errors
    if place.pp == pp - 1:
        errors["logits"] = error(logits, wanted.detach())
    return errors
