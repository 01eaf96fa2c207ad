"""Where a stage's weights come from, one stage at a time.

A stage is made real while all others stay on meta, so a model larger than a process's memory can be built. First
weights are timm's own initialiser, seeded by the stage's name, so they are the same however the model is cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from vit_tp.models.stages import Stage, build_stage, initialiser
from vit_tp.parallel.rng import Clock, seeded

Fill = Callable[[nn.Module, Stage], None]
"""Sets every tensor of a stage in place, given the whole model (on meta) and the stage (real, whole, NaN)."""


def initialise(seed: int) -> Fill:
    """Return a fill that runs timm's initialiser, seeded by (seed, the stage's name)."""

    def fill(model: nn.Module, stage: Stage) -> None:
        with seeded(seed, stage.name):
            if model.weight_init_mode == "reset":
                # timm then leaves what only has init_weights, such as a latent query, as its constructor drew it.
                for child in stage.inner.children():
                    if hasattr(child, "init_weights"):
                        child.init_weights()
            initialiser(model, stage).init_weights()

    return fill


@torch.no_grad()
def materialise(model: nn.Module, name: str, fill: Fill, clock: Clock | None = None) -> Stage:
    """Return one stage with whole, real weights, in memory of its own.

    Args:
        model: The whole timm model: on meta (`fill` sets the weights), or real (they are copied).
        name: One of `stage_names(model)`.
        fill: Where the weights of a model on meta come from.
        clock: See `Stage`.

    Raises:
        RuntimeError: If `fill` leaves a tensor of the stage unset.
    """
    stage = build_stage(model, name, clock)
    stage.inner = copy.deepcopy(stage.inner)
    if not any(p.is_meta for p in stage.parameters()):
        return stage
    stage.inner.to_empty(device="cpu")
    tensors = {name: t for name, t in (*stage.named_parameters(), *stage.named_buffers()) if t.is_floating_point()}
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    fill(model, stage)
    unset = [name for name, tensor in tensors.items() if tensor.isnan().any()]
    if unset:
        raise RuntimeError(f"{', '.join(unset)} of stage {stage.name} were left without a value.")
    return stage
