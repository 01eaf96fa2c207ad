"""What one may choose about how a model is cut, beside the ranks, and whether a model can be cut so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed import ProcessGroup

from vit_tp.config import Config, ParallelConfig
from vit_tp.errors import ShardRuleError
from vit_tp.models.stages import WHOLE, stage_names
from vit_tp.parallel.groups import StandIn
from vit_tp.parallel.regions import Region, build_region
from vit_tp.sharding.classifier import is_classifier_cut, require_classifier
from vit_tp.sharding.indivisible import require_cut
from vit_tp.sharding.matches import Match, plan_cut
from vit_tp.sharding.stream import require_stream

CUT_HEAD_FROM = ParallelConfig().cut_head_from


@dataclass(frozen=True)
class Cutting:
    """The choices, as `vit_tp.shard_` and `vit_tp.pipeline` take them.

    Args:
        region: Where partial sums are exchanged: "exact", "sequence" or "partial".
        fraction: Of "partial": share of the channels that is summed.
        recompute: What backward makes again: "none", "norm_act", "block", or N for every Nth block.
        cut_head_from: Number of classes from which on the classifier is cut too.
        gather_logits: Whether a cut classifier gives whole logits, or this rank's columns.
        indivisible: See `plan_cut`.
    """

    region: str = "exact"
    fraction: float = 1.0
    recompute: str | int = "none"
    cut_head_from: int = CUT_HEAD_FROM
    gather_logits: bool = True
    indivisible: str = "refuse"

    def build_region(self, tp_group: ProcessGroup | StandIn) -> Region:
        """Return the region over a group.

        Raises:
            ConfigError: If there is none of that name, or the fraction is none.
        """
        return build_region(self.region, tp_group, self.fraction)

    def require(self, model: nn.Module, tp_size: int) -> list[Match]:
        """Return what will be cut of a whole model. Changes nothing.

        Raises:
            ConfigError: If a choice is unknown.
            ShardRuleError: If a module has no rule, or the model not what a choice needs.
            TopologyError: If tp does not divide what it must, or divides nothing.
        """
        matches = plan_cut(model, tp_size, indivisible=self.indivisible)
        if tp_size > 1:
            require_cut(model, matches, tp_size)
        if not self.gather_logits:
            require_classifier(model, matches)
        require_stream(model, matches, self.build_region(StandIn(tp_size)), self.recompute)
        if self.recompute not in ("none", "norm_act", 0) and stage_names(model) == [WHOLE]:
            raise ShardRuleError(
                f"{type(model).__name__} runs whole, not block by block, so there are no blocks to recompute one by "
                f"one. Use compute.recompute=none."
            )
        return matches

    def with_columns(self, matches: Sequence[Match], tp_size: int) -> Cutting:
        """Return the same for a loss that takes columns of whatever classifier is cut.

        Args:
            matches: From `require`.
            tp_size: Ranks that share each weight.
        """
        return replace(self, gather_logits=not is_classifier_cut(matches, tp_size, self.cut_head_from))

    @property
    def wide_from(self) -> int:
        """Number of classes from which on the classifier is really cut; one that gives columns always is."""
        return self.cut_head_from if self.gather_logits else 1


DEFAULT_CUTTING = Cutting()


def cutting_of(config: Config) -> Cutting:
    """Return what a configuration chooses."""
    return Cutting(
        region="sequence" if config.parallel.sequence else config.recipe.sync,
        fraction=config.recipe.sync_fraction,
        recompute=config.compute.recompute,
        cut_head_from=config.parallel.cut_head_from,
        indivisible=config.parallel.indivisible,
    )
