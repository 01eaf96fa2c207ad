"""How many bytes do weights, gradients and optimizer take on one rank, and how many more while a step is taken?

Follows what DeepSpeed 0.19 allocates for the settings of train/engine.py: ZeRO-1 with a contiguous reduction bucket
(fp32, fp16), and its BF16_Optimizer, which accumulates in fp32. Does not know: activations.

Source: deepspeed/runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py, runtime/engine.py (allreduce_bucket).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from vit_tp.config import OptimizerConfig
from vit_tp.plan.live import LiveBytes
from vit_tp.recipe.optimizer import build_optimizer

BUCKET_ELEMENTS = 50_000_000  # what train/engine.py gives to DeepSpeed


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes of an optimizer for each element that it updates.

    Args:
        state: What it keeps from step to step.
        working: What it makes while it updates, at most.
    """

    state: float
    working: float


@dataclass(frozen=True)
class Held:
    """Bytes of one rank beside activations.

    Args:
        resident: Weights, master weights, optimizer state, and what else lies there from step to step.
        gradients: Of all micro-batches so far, from the end of the first backward pass on.
        reserved: A bucket that lies there from the first backward pass on and is written to while gradients are
            averaged only.
        reducing: At most, beyond `resident`, while gradients are averaged over replicas, the bucket included.
        stepping: At most, beyond `resident`, while the optimizer steps.
    """

    resident: int
    gradients: int
    reserved: int
    reducing: int
    stepping: int


def optimizer_cost(config: OptimizerConfig, num_elements: int = 1 << 20) -> OptimizerCost:
    """Return what an optimizer costs, seen on its second step on meta."""
    param = nn.Parameter(torch.empty(num_elements, device="meta"))
    optimizer = build_optimizer(config, [{"params": [param], "weight_decay": 0.05}])
    param.grad = torch.empty_like(param)
    live = LiveBytes([param, param.grad])
    with live:
        optimizer.step()
        state = live.now
        live.restart()
        optimizer.step()
    return OptimizerCost(state / num_elements, (live.peak - state) / num_elements)


def held_bytes(
    groups: Sequence[Sequence[int]],
    frozen: int,
    buffer_bytes: int,
    dp: int,
    dtype: torch.dtype,
    optimizer: OptimizerCost,
    counts_untouched: bool = True,
) -> Held:
    """Return what the replica that holds most holds.

    Args:
        groups: Elements of each trainable parameter of each parameter group, in order; empty groups are left out.
        frozen: Elements that do not train.
        buffer_bytes: Of what is not a parameter.
        dp: Replicas that divide the optimizer.
        dtype: Of weights.
        optimizer: What it costs.
        counts_untouched: Whether memory counts that was allocated and not written to, as on a GPU; the pages of a
            process do so in its address space only.
    """
    size = dtype.itemsize
    groups = [group for group in groups if sum(group)]
    aligned = [-(-sum(group) // (2 * dp)) * 2 * dp for group in groups]
    trained, own = sum(aligned), [elements // dp for elements in aligned]
    resident = size * (trained + frozen) + buffer_bytes + round((4 + optimizer.state) * sum(own))
    updating = round(optimizer.working * max(own, default=0))
    if dtype == torch.bfloat16:
        # fp32 sums stay; bf16 gradients are let go of after the step. Both are flattened to be averaged.
        flattened = (4 * trained if len(groups) > 1 else 0) + size * trained
        gradients = size * trained
        return Held(resident + 4 * trained, gradients, 0, gradients + flattened, gradients + updating)
    bucket = min(trained + frozen, BUCKET_ELEMENTS)
    part = _most_in_partition(groups, own, dp)
    joined = bucket if dp > 1 else 0  # slices that go to several ranks are flattened into a copy
    left = max(trained - bucket, 0)  # gradients that have not moved into the bucket when it is full
    used = min(trained, bucket)
    reducing = max(trained, left + used + max(joined, part), trained + part + joined if left else 0)
    if counts_untouched:  # the bucket of backward is not used, a second one is made
        reducing = max(trained + 2 * bucket, reducing + 2 * bucket - used)
    largest = max(own, default=0)
    flat = largest if size < 4 else 0  # in the gradients' own type first
    stepping = max(size * (part + flat) + 4 * largest, 4 * largest + updating)
    reserved = size * bucket if counts_untouched else 0
    return Held(resident, size * trained, reserved, size * reducing, stepping)


def _most_in_partition(groups: Sequence[Sequence[int]], own: Sequence[int], dp: int) -> int:
    """Return the elements of whole parameters that lie, if in part, in one replica's slices; of the worst replica."""
    totals = [0] * dp
    for group, size in zip(groups, own):
        for end, elements in zip(accumulate(group), group):
            for rank in range((end - elements) // size, (end - 1) // size + 1):
                totals[rank] += elements
    return max(totals)
