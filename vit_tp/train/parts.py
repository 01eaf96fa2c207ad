"""What a pipeline is made of: stages that are filled and cut where they are held, and a loss that is one number.

Does not know: which rank holds which stage, DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from vit_tp.errors import ConfigError
from vit_tp.models.heap import trim_heap
from vit_tp.models.stages import TABLES, Stage, Tables
from vit_tp.models.weights import Fill, materialise
from vit_tp.parallel.regions import Region
from vit_tp.parallel.rng import Clock
from vit_tp.sharding.cutting import Cutting
from vit_tp.sharding.stages import cut_stage_


@dataclass
class StageBuilder:
    """Makes, fills and cuts the stages of one rank.

    Args:
        model: The whole timm model.
        fill: Where the weights of a model on meta come from.
        region: Where partial sums are exchanged.
        clock: Shared by all stages.
        cutting: The other choices about the cut.
    """

    model: nn.Module
    fill: Fill
    region: Region
    clock: Clock
    cutting: Cutting

    @cached_property
    def tables(self) -> Tables:
        """What all block stages of this rank read."""
        return self._cut(materialise(self.model, TABLES, self.fill, self.clock))

    def build(self, name: str) -> Stage:
        tables = self.tables if name.startswith("blocks.") else None
        return self._cut(materialise(self.model, name, self.fill, self.clock, tables))

    def _cut(self, stage: Stage) -> Stage:
        cut_stage_(stage, self.region, self.cutting)
        trim_heap()
        return stage


class ScalarLoss(nn.Module):
    """A loss function that must give one number; a module, so that a loss with train() and eval() is told of both.

    Args:
        loss_fn: (logits, targets) -> scalar.
    """

    def __init__(self, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss_fn(logits, targets)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ConfigError(
                f"loss_fn returned {found}; the pipeline averages one number over micro-batches and sends it to all "
                f"stages. Return a scalar tensor, for example its mean."
            )
        return loss
