"""One pipeline stage cut over tp: its weights, the ends of the stream, and what its block keeps for backward."""

from __future__ import annotations

from vit_tp.models.stages import BlockStage, EmbedStage, HeadStage, Stage
from vit_tp.parallel.regions import Region
from vit_tp.sharding.convert import CUT_HEAD_FROM, cut_
from vit_tp.sharding.stream import finish_before_, start_after_


def cut_stage_(
    stage: Stage,
    region: Region,
    cut_head_from: int = CUT_HEAD_FROM,
    gather_logits: bool = True,
    indivisible: str = "refuse",
    recompute: str | int = "none",
) -> Stage:
    """Cut a stage in place and return it, real or on meta. Its tables are cut apart from it.

    Args:
        stage: A whole stage.
        region: Where partial sums are exchanged, the same for all stages of a rank.
        cut_head_from: See `cut_`.
        gather_logits: See `cut_`.
        indivisible: See `plan_cut`.
        recompute: "none", "norm_act", "block", or N to recompute every Nth block.
    """
    kind = recompute_of_block(recompute, stage.index) if isinstance(stage, BlockStage) else "none"
    cut_(
        stage.inner,
        region,
        cut_head_from=cut_head_from,
        gather_logits=gather_logits,
        indivisible=indivisible,
        recompute=kind,
    )
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
