"""Where a stage's weights come from, one stage at a time.

A stage is made real while all others stay on meta, so a model larger than a process's memory can be built. First
weights are what timm's constructor would have given, seeded by each tensor's name, so they are the same however the
model is cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container

import timm
import torch
from torch import nn

from vit_tp.errors import ConfigError
from vit_tp.models.stages import Stage, Tables, build_stage
from vit_tp.models.tape import Tape, is_unset, unset_
from vit_tp.models.video_build import rebuild_video
from vit_tp.models.video_start import origin_of
from vit_tp.parallel.rng import Clock

Fill = Callable[[nn.Module, Stage], None]
"""Sets every tensor of a stage in place, given the whole model (on meta) and the stage (real, whole, NaN)."""


class FirstWeights:
    """A fill with timm's own first weights, for models that `timm.create_model` made.

    Args:
        seed: With a tensor's name, what its random numbers follow from.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._model: nn.Module | None = None
        self._tape: Tape | None = None

    def __call__(self, model: nn.Module, stage: Stage, skip: Container[str] = ()) -> None:
        """Set the tensors of a stage, buffers that no checkpoint holds included.

        Args:
            model: The whole model.
            stage: The stage.
            skip: Names that something else sets.

        Raises:
            ConfigError: If the model cannot be constructed again.
        """
        if self._model is not model:
            self._model, self._tape = model, record(model)
        for name, tensor in (*stage.inner.named_parameters(), *stage.inner.named_buffers()):
            if name not in skip:
                source = origin_of(model, name) or name  # a copy has the random numbers of what it copies
                tensor.copy_(self._tape.replay(source, self.seed, source))


def record(model: nn.Module) -> Tape:
    """Construct a model again, on meta, and return how.

    Raises:
        ConfigError: If timm did not make it, or would make another one.
    """
    cfg, arguments = getattr(model, "pretrained_cfg", None), getattr(model, "_model_args", None)
    name = (cfg or {}).get("architecture")
    if name is None or arguments is None:
        raise ConfigError(
            f"this {type(model).__name__} lies on meta and was not made by timm.create_model, so its first weights are "
            f"not known. Make it with timm.create_model, or with real weights."
        )
    tape = Tape(lambda: rebuild_video(model, timm.create_model(name, **arguments)))
    made, wanted = (
        {n: tuple(t.shape) for n, t in (*m.named_parameters(), *m.named_buffers())} for m in (tape.model, model)
    )
    if made != wanted:
        changed = sorted(n for n in made.keys() | wanted.keys() if made.get(n) != wanted.get(n))
        raise ConfigError(
            f"{', '.join(changed[:5])} of this {type(model).__name__} on meta are not as timm.create_model made them, "
            f"so their first weights are not known. Give create_model what you changed, or use real weights."
        )
    return tape


@torch.no_grad()
def materialise(
    model: nn.Module, name: str, fill: Fill, clock: Clock | None = None, tables: Tables | None = None
) -> Stage:
    """Return one stage with whole, real weights, in memory of its own.

    Args:
        model: The whole timm model: on meta (`fill` sets the weights), or real (they are copied).
        name: One of `stage_names(model)`, or "tables".
        fill: Where the weights of a model on meta come from.
        clock: See `Stage`.
        tables: Real ones, for a block to share.

    Raises:
        RuntimeError: If `fill` leaves a tensor of the stage unset.
    """
    stage = build_stage(model, name, clock, tables)
    stage.inner = copy.deepcopy(stage.inner)
    if not any(p.is_meta for p in (*stage.inner.parameters(), *stage.inner.buffers())):
        return stage
    stage.inner.to_empty(device="cpu")
    tensors = {n: t for n, t in (*stage.inner.named_parameters(), *stage.inner.named_buffers())}
    for tensor in tensors.values():
        unset_(tensor)
    fill(model, stage)
    unset = [name for name, tensor in tensors.items() if is_unset(tensor)]
    if unset:
        raise RuntimeError(f"{', '.join(unset)} of stage {stage.name} were left without a value.")
    return stage
