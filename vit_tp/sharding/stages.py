"""One pipeline stage cut over tp: its weights, the ends of the stream, and what its block keeps for backward."""

from __future__ import annotations

from dataclasses import replace

from vit_tp.models.stages import BlockStage, EmbedStage, HeadStage, Stage
from vit_tp.parallel.regions import Region
from vit_tp.sharding.convert import cut_
from vit_tp.sharding.cutting import DEFAULT_CUTTING, Cutting
from vit_tp.sharding.stream import finish_before_, start_after_


def cut_stage_(stage: Stage, region: Region, cutting: Cutting = DEFAULT_CUTTING) -> Stage:
    """Cut a stage in place and return it, real or on meta. Its tables are cut apart from it.

    Args:
        stage: A whole stage.
        region: Where partial sums are exchanged, the same for all stages of a rank.
        cutting: The other choices.
    """
    kind = recompute_of_block(cutting.recompute, stage.index) if isinstance(stage, BlockStage) else "none"
    cut_(stage.inner, region, replace(cutting, recompute=kind))
    if isinstance(stage, BlockStage):
        stage.is_recomputed = kind == "block"
    elif isinstance(stage, EmbedStage):
        start_after_(stage, region)
    elif isinstance(stage, HeadStage):
        finish_before_(stage, region)
    return stage


def recompute_of_block(recompute: str | int, index: int) -> str:
    """Return what one block recomputes: "none", "norm_act" or "block".

    Args:
        recompute: As `cut_stage_` takes it; 0 recomputes nothing, N the blocks 0, N, 2 N ...
        index: Of the block in the model.
    """
    if isinstance(recompute, str):
        return recompute
    return "block" if recompute and index % recompute == 0 else "none"
