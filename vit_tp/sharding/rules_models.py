"""THE table, second half: blocks and models, which hold what is cut, and what is replicated.

`walk` names the children that the table is asked about in their turn; everything else acts on complete activations, the
same on every rank, and is replicated.
"""

from __future__ import annotations

from timm.layers import (
    AttentionPoolLatent,
    AttentionPoolPrr,
    ClassifierHead,
    HybridEmbed,
    LayerNorm,
    LayerNorm2d,
    LayerNormFp32,
    LayerScale,
    NormMlpClassifierHead,
    PatchEmbed,
    RmsNorm,
    RmsNormFp32,
)
from timm.layers.activations import PReLU
from timm.models import beit, cait, convit, crossvit, mlp_mixer, tnt, vision_transformer_sam, xcit
from timm.models.deepseek_vit import DeepseekVitAligner, DeepseekVitBlock, DeepseekVitClassifier, DeepseekVitEncoder
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaBlock, EvaBlockPostNorm
from timm.models.gemma4_vit import Gemma4Block, Gemma4PatchEmbed, Gemma4VitClassifier, Gemma4VitEncoder
from timm.models.metaformer import StarReLU
from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit
from timm.models.qwen3_vit import Qwen3VitClassifier, Qwen3VitEncoder, Qwen3VitPatchMerger
from timm.models.vision_transformer import Block, ParallelThingsBlock, ResPostBlock, VisionTransformer
from timm.models.vision_transformer_relpos import RelPosBlock, ResPostRelPosBlock, VisionTransformerRelPos
from torch import nn

from vit_tp.models.video import FactorisedVisionTransformer, VideoEva, VideoVisionTransformer
from vit_tp.models.video_attention import DividedBlock
from vit_tp.models.video_embed import TubeletEmbed
from vit_tp.sharding.rule import ShardRule


def holder(walk: str, whole: str = "", own: str = "", wide: str = "", stream: str | None = None) -> ShardRule:
    """Return the rule of a class that is not cut itself, from the names in each field."""
    names = {"walk": walk, "whole": whole, "own": own, "wide": wide}
    return ShardRule(**{field: tuple(text.split()) for field, text in names.items()}, stream=stream)


def encoder(walk: str, whole: str = "", own: str = "", wide: str = "") -> ShardRule:
    """Return the rule of a model whose blocks pass on a stream of tokens."""
    return holder(walk, whole, own, wide, stream="blocks")


_NORMS_AND_DROPS = "norm1 drop_path1 norm2 drop_path2"
_VIT_ENDS = "patch_embed pos_drop patch_drop norm_pre norm attn_pool fc_norm head_drop"
_EMBEDDINGS = "cls_token reg_token pos_embed"

MODELS: dict[type[nn.Module], ShardRule] = {
    # -- blocks ---------------------------------------------------------------------------------------------------
    Block: holder("attn mlp", f"{_NORMS_AND_DROPS} ls1 ls2"),
    DividedBlock: holder("attn_time attn mlp", f"norm_time {_NORMS_AND_DROPS} ls1 ls2"),
    ResPostBlock: holder("attn mlp", _NORMS_AND_DROPS),
    ParallelThingsBlock: holder("attns ffns"),
    EvaBlock: holder("attn mlp", _NORMS_AND_DROPS, "gamma_1 gamma_2"),
    EvaBlockPostNorm: holder("attn mlp", _NORMS_AND_DROPS),
    beit.Block: holder("attn mlp", _NORMS_AND_DROPS, "gamma_1 gamma_2"),
    RelPosBlock: holder("attn mlp", f"{_NORMS_AND_DROPS} ls1 ls2"),
    ResPostRelPosBlock: holder("attn mlp", _NORMS_AND_DROPS),
    vision_transformer_sam.Block: holder("attn mlp", f"{_NORMS_AND_DROPS} ls1 ls2"),
    DeepseekVitBlock: holder("attn mlp", _NORMS_AND_DROPS),
    Gemma4Block: holder("attn mlp", "norm1 norm2 norm3 norm4 drop_path"),
    cait.LayerScaleBlock: holder("attn mlp", "norm1 norm2 drop_path", "gamma_1 gamma_2"),
    cait.LayerScaleBlockClassAttn: holder("attn mlp", "norm1 norm2 drop_path", "gamma_1 gamma_2"),
    xcit.XCABlock: holder("attn mlp", f"{_NORMS_AND_DROPS} norm3 local_mp drop_path3", "gamma1 gamma2 gamma3"),
    xcit.ClassAttentionBlock: holder("attn mlp", _NORMS_AND_DROPS, "gamma1 gamma2"),
    convit.Block: holder("attn mlp", "norm1 norm2 drop_path"),
    mlp_mixer.MixerBlock: holder("mlp_tokens mlp_channels", "norm1 norm2 drop_path"),
    mlp_mixer.ResBlock: holder("mlp_channels", "norm1 linear_tokens norm2 drop_path", "ls1 ls2"),
    mlp_mixer.SpatialGatingBlock: holder("mlp_channels", "norm drop_path"),
    tnt.Block: holder(
        "attn_in mlp_in attn_out mlp",
        "norm_in norm_mlp_in norm1_proj proj norm2_proj norm_out drop_path norm_mlp",
    ),
    crossvit.MultiScaleBlock: holder("blocks fusion", "projs revert_projs"),
    crossvit.CrossAttentionBlock: holder("attn", "norm1 drop_path"),
    # -- models ---------------------------------------------------------------------------------------------------
    VisionTransformer: encoder("blocks", _VIT_ENDS, _EMBEDDINGS, "head"),
    VisionTransformerDistilled: encoder("blocks", _VIT_ENDS, f"{_EMBEDDINGS} dist_token", "head head_dist"),
    Eva: encoder("blocks rope", _VIT_ENDS, _EMBEDDINGS, "head"),
    VideoVisionTransformer: encoder("blocks", _VIT_ENDS, f"{_EMBEDDINGS} time_embed", "head"),
    FactorisedVisionTransformer: encoder("blocks time_blocks", _VIT_ENDS, f"{_EMBEDDINGS} time_embed", "head"),
    VideoEva: encoder("blocks rope", _VIT_ENDS, f"{_EMBEDDINGS} time_embed", "head"),
    beit.Beit: encoder("blocks rel_pos_bias", "patch_embed pos_drop norm fc_norm head_drop", _EMBEDDINGS, "head"),
    VisionTransformerRelPos: encoder(
        "blocks shared_rel_pos", "patch_embed norm fc_norm head_drop", "cls_token", "head"
    ),
    vision_transformer_sam.VisionTransformerSAM: holder(
        "blocks rope_global rope_window", "patch_embed pos_drop patch_drop norm_pre neck head", "pos_embed"
    ),
    NaFlexVit: encoder("blocks rope", "embeds patch_drop norm_pre norm attn_pool fc_norm head_drop", wide="head"),
    DeepseekVitEncoder: encoder("blocks rope", "patch_embed norm aligner", "pos_embed"),
    DeepseekVitClassifier: holder("encoder", "norm head_drop", wide="head"),
    Qwen3VitEncoder: encoder("blocks rope", "patch_embed merger", "pos_embed"),
    Qwen3VitClassifier: holder("encoder", "norm head_drop", wide="head"),
    Gemma4VitEncoder: encoder("blocks rotary_emb", "patch_embed pooler", "std_bias std_scale"),
    Gemma4VitClassifier: holder("encoder", "norm head_drop", wide="head"),
    cait.Cait: encoder(
        "blocks blocks_token_only", "patch_embed pos_drop norm head_drop", "cls_token pos_embed", "head"
    ),
    xcit.Xcit: holder(
        "blocks cls_attn_blocks", "patch_embed pos_embed pos_drop norm head_drop", "cls_token", "head"
    ),
    convit.ConVit: holder("blocks", "patch_embed pos_drop norm head_drop", "cls_token pos_embed", "head"),
    mlp_mixer.MlpMixer: holder("blocks", "stem norm head_drop", wide="head"),
    tnt.TNT: holder(
        "blocks", "pixel_embed norm1_proj proj norm2_proj pos_drop norm head_drop", "cls_token patch_pos pixel_pos",
        "head",
    ),
    crossvit.CrossVit: holder(
        "blocks", "patch_embed pos_drop norm head_drop head", "pos_embed_0 cls_token_0 pos_embed_1 cls_token_1"
    ),
}  # fmt: skip

# What may be replicated as it is, with all that it holds, where a rule says `whole` or `partial`.
REPLICABLE: set[type[nn.Module]] = {
    # norms, scales and activations
    LayerNorm, LayerNorm2d, LayerNormFp32, LayerScale, PReLU, RmsNorm, RmsNormFp32, StarReLU, mlp_mixer.Affine,
    nn.LayerNorm, nn.PReLU,
    # stems
    Gemma4PatchEmbed, HybridEmbed, crossvit.PatchEmbed, NaFlexEmbeds, PatchEmbed, tnt.PixelEmbed, xcit.ConvPatchEmbed,
    xcit.PositionalEncodingFourier, xcit.LPI, TubeletEmbed, nn.Conv2d, nn.Linear,
    # pools, projectors and heads
    AttentionPoolLatent, AttentionPoolPrr, ClassifierHead, DeepseekVitAligner, NormMlpClassifierHead,
    Qwen3VitPatchMerger,
}  # fmt: skip
