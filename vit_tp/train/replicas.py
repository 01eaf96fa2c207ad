"""Do the tensor-parallel replicas of every whole parameter still agree, bit for bit?

They get the same gradients and the same updates, so any difference is a fault: a lost exchange, another mask, another
sample. Left alone it would spoil a run without a sign in its loss.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vit_tp.sharding.placement import Replicated, placement_of
from vit_tp.train.pipeline import VitPipeline

DIGEST_BYTES = 1 << 22
"""Bytes digested at a time: each takes 8 bytes of memory meanwhile."""


def require_equal_replicas(pipe: VitPipeline, step: int) -> None:
    """Raise if a parameter that tp ranks hold whole differs between them. Collective over the tp group.

    Raises:
        RuntimeError: With the name of the first parameter that differs.
    """
    group = pipe.groups.tp_group
    if group.size() == 1:
        return
    named = [(name, p) for name, p in pipe.named_timm_parameters() if isinstance(placement_of(p), Replicated)]
    if not named:
        return
    digests = torch.stack([digest(p) for _, p in named])
    lowest, highest = digests.clone(), digests.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    differing = torch.nonzero(lowest != highest).flatten().tolist()
    if differing:
        raise RuntimeError(
            f"after step {step}, {named[differing[0]][0]} and {len(differing) - 1} more parameters that "
            f"tensor-parallel ranks hold whole differ between ranks; their updates should be the same to the bit. The "
            f"weights since the last check cannot be trusted; please report this with config.yaml."
        )


def digest(tensor: Tensor) -> Tensor:
    """Return one int64 that depends on every bit of a tensor and on its place."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for index, piece in enumerate(tensor.detach().contiguous().view(-1).view(torch.uint8).split(DIGEST_BYTES)):
        places = torch.arange(1, len(piece) + 1, device=piece.device)
        total = total * 31 + index + (piece * (places * 2654435761 % 4294967311)).sum()
    return total
