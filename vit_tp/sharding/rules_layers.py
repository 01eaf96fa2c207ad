"""THE table, first half: attention and MLP classes, how each is cut.

A number behind a linear layer says how many equal parts are packed along its cut axis: a fused qkv has 3, a gated MLP
2. Cutting such a layer as one would give rank 0 all of q and half of k. timm's forward runs as it is where it reshapes
by attributes, which become local; elsewhere an edit replaces the input's width.
"""

from __future__ import annotations

from timm.layers import (
    Attention,
    AttentionRope,
    DiffAttention,
    GatedMlp,
    GluMlp,
    Mlp,
    RelPosBias,
    RelPosMlp,
    RotaryEmbeddingMixed,
    SwiGLU,
)
from timm.models import beit, cait, convit, crossvit, tnt, vision_transformer_sam, xcit
from timm.models.eva import EvaAttention
from timm.models.gemma4_vit import Gemma4Attention, Gemma4GatedMlp
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock
from timm.models.vision_transformer_relpos import RelPosAttention
from timm.models.vitamin import GeGluMlp
from torch import nn

from vit_tp.models.video_attention import JointAttention, SpaceAttention, TimeAttention
from vit_tp.models.video_positions import VideoRopeMixed
from vit_tp.sharding.rule import Edit, ShardRule

HEADS = {"num_heads": "num_heads"}
KV_HEADS = {"num_heads": "num_heads", "num_kv_heads": "num_kv_heads"}
DROPS = {"inner": ("attn_drop",), "whole": ("proj_drop",)}
QK_NORMS = ("q_norm", "k_norm")  # one weight of width D for all heads
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "lambda_a", "lambda_b")
CLAMPS = ("input_min", "input_max", "output_min", "output_max")

BY_WIDTH = Edit("reshape(B, N, C)", "reshape(B, N, -1)")
BY_HEAD = Edit("C // self.num_heads", "-1")
# Parallel blocks count tokens before they enter the region, where another number may have come together.
BY_TOKENS = Edit("y = self.in_proj(y)", "y = self.in_proj(y); N = y.shape[1]")


def _clamps(*linears: str) -> tuple[str, ...]:
    return tuple(f"{linear}.{clamp}" for linear in linears for clamp in CLAMPS)


LAYERS: dict[type[nn.Module], ShardRule] = {
    # -- attention ------------------------------------------------------------------------------------------------
    Attention: ShardRule(
        column={"qkv": 3, "gate": 1}, row={"proj": 1}, spans=("norm",), partial=QK_NORMS, **DROPS,
        local=("num_heads", "attn_dim"), divides=HEADS,
    ),
    AttentionRope: ShardRule(
        column={"qkv": 3, "q_proj": 1, "k_proj": 1, "v_proj": 1, "gate": 1}, row={"proj": 1}, spans=("norm",),
        partial=QK_NORMS, **DROPS, local=("num_heads", "num_kv_heads", "attn_dim", "kv_dim"), divides=KV_HEADS,
    ),
    EvaAttention: ShardRule(
        column={"qkv": 3, "q_proj": 1, "k_proj": 1, "v_proj": 1, "gate": 1}, row={"proj": 1}, spans=("norm",),
        cut={"q_bias": 0, "k_bias": 0, "v_bias": 0}, partial=QK_NORMS, **DROPS, local=("num_heads",), divides=HEADS,
        edits=(BY_WIDTH,),
    ),
    beit.Attention: ShardRule(
        column={"qkv": 3}, row={"proj": 1}, own=("relative_position_index",), **DROPS, local=("num_heads",),
        cut={"q_bias": 0, "k_bias": 0, "v_bias": 0, "relative_position_bias_table": 1}, divides=HEADS,
        edits=(BY_WIDTH,),
    ),
    RelPosAttention: ShardRule(
        column={"qkv": 3}, row={"proj": 1}, partial=QK_NORMS, walk=("rel_pos",), shared=("rel_pos.mlp",), **DROPS,
        local=("num_heads",), divides=HEADS, edits=(BY_WIDTH,),
    ),
    vision_transformer_sam.Attention: ShardRule(
        column={"qkv": 3}, row={"proj": 1}, partial=(*QK_NORMS, "rel_pos_h", "rel_pos_w"),
        inner=("attn_drop", "rope"), whole=("proj_drop",), local=("num_heads",), divides=HEADS,
    ),
    Gemma4Attention: ShardRule(
        column={"q_proj.linear": 1, "k_proj.linear": 1, "v_proj.linear": 1}, row={"o_proj.linear": 1},
        own=_clamps("q_proj", "k_proj", "v_proj", "o_proj"), partial=QK_NORMS, inner=("v_norm", "attn_drop"),
        whole=("proj_drop",), local=("num_heads", "num_kv_heads"), divides=KV_HEADS,
    ),
    DiffAttention: ShardRule(
        column={"qkv": 3}, row={"proj": 1}, spans=("norm",), partial=(*QK_NORMS, *LAMBDAS, "sub_norm"), **DROPS,
        local=("num_heads",), divides=HEADS, edits=(BY_WIDTH,),
    ),
    cait.TalkingHeadAttn: ShardRule(
        column={"qkv": 3}, row={"proj": 1}, mixes=("proj_l", "proj_w"), **DROPS, local=("num_heads",), divides=HEADS,
        edits=(BY_WIDTH, BY_HEAD),
    ),
    cait.ClassAttn: ShardRule(
        column={"q": 1, "k": 1, "v": 1}, row={"proj": 1}, **DROPS, local=("num_heads",), divides=HEADS,
        edits=(Edit("reshape(B, 1, C)", "reshape(B, 1, -1)"), Edit(BY_HEAD.old, BY_HEAD.new, count=3)),
    ),
    xcit.XCA: ShardRule(
        column={"qkv": 3}, row={"proj": 1}, cut={"temperature": 0}, **DROPS, local=("num_heads",), divides=HEADS,
        edits=(BY_WIDTH, BY_HEAD),
    ),
    crossvit.CrossAttention: ShardRule(
        column={"wq": 1, "wk": 1, "wv": 1}, row={"proj": 1}, **DROPS, local=("num_heads",), divides=HEADS,
        edits=(Edit("reshape(B, 1, C)", "reshape(B, 1, -1)"), Edit(BY_HEAD.old, BY_HEAD.new, count=3)),
    ),
    tnt.Attention: ShardRule(
        column={"qk": 2, "v": 1}, row={"proj": 1}, **DROPS, local=("num_heads",), divides=HEADS,
    ),
    convit.GPSA: ShardRule(
        column={"qk": 2, "v": 1, "pos_proj": 1}, row={"proj": 1}, cut={"gating_param": 0}, own=("rel_indices",),
        **DROPS, local=("num_heads",), divides=HEADS,
        edits=(BY_WIDTH, BY_HEAD, Edit(BY_HEAD.old, BY_HEAD.new, method="get_attention")),
    ),
    convit.MHSA: ShardRule(
        column={"qkv": 3}, row={"proj": 1}, **DROPS, local=("num_heads",), divides=HEADS, edits=(BY_WIDTH, BY_HEAD),
    ),
    # -- position tables with a column for each head ----------------------------------------------------------------
    RelPosMlp: ShardRule(
        column={"mlp.fc2": 1}, partial=("mlp.fc1", "mlp.act"), inner=("mlp.drop1", "mlp.norm", "mlp.drop2", "bias_act"),
        own=("relative_position_index", "rel_coords_log"), local=("num_heads", "bias_shape[-1]"), divides=HEADS,
    ),
    RelPosBias: ShardRule(
        cut={"relative_position_bias_table": 1}, own=("relative_position_index",), local=("bias_shape[-1]",),
        divides={"num_heads": "bias_shape[-1]"},
    ),
    beit.RelativePositionBias: ShardRule(
        cut={"relative_position_bias_table": 1}, own=("relative_position_index",),
        divides={"num_heads": "relative_position_bias_table.shape[-1]"},
    ),
    RotaryEmbeddingMixed: ShardRule(
        cut={"freqs": 2}, own=("t_x", "t_y"), local=("num_heads", "dim"), divides=HEADS,
    ),
    # -- MLP ------------------------------------------------------------------------------------------------------
    Mlp: ShardRule(
        column={"fc1": 1}, row={"fc2": 1}, partial=("act",), spans=("norm",), inner=("drop1",), whole=("drop2",),
        divides={"MLP width": "fc2.in_features"},
    ),
    GluMlp: ShardRule(  # SwiGLUPacked too; the halves are split again in forward, so either order of them is right
        column={"fc1": 2}, row={"fc2": 1}, partial=("act",), spans=("norm",), inner=("drop1",), whole=("drop2",),
        divides={"MLP width": "fc2.in_features"},
    ),
    SwiGLU: ShardRule(
        column={"fc1_g": 1, "fc1_x": 1}, row={"fc2": 1}, partial=("act",), spans=("norm",), inner=("drop1",),
        whole=("drop2",), divides={"MLP width": "fc2.in_features"},
    ),
    GatedMlp: ShardRule(  # the gate mixes tokens of each channel with one matrix
        column={"fc1": 2}, row={"fc2": 1}, partial=("act", "gate.proj"), spans=("gate.norm", "norm"), inner=("drop1",),
        whole=("drop2",), divides={"MLP width": "fc2.in_features"},
    ),
    GeGluMlp: ShardRule(  # its norm stands inside the region, before the cut layers
        column={"w0": 1, "w1": 1}, row={"w2": 1}, partial=("norm", "act"), inner=("drop1",), whole=("drop2",),
        divides={"MLP width": "w2.in_features"},
    ),
    Gemma4GatedMlp: ShardRule(
        column={"gate_proj.linear": 1, "up_proj.linear": 1}, row={"down_proj.linear": 1}, partial=("act",),
        own=_clamps("gate_proj", "up_proj", "down_proj"), whole=("drop",),
        divides={"MLP width": "down_proj.linear.in_features"},
    ),
    # -- attention and MLP side by side ---------------------------------------------------------------------------
    ParallelScalingBlock: ShardRule(
        column={"in_proj": lambda m: tuple(m.in_split)}, cut={"mlp_bias": 0}, enter_after="in_norm",
        row={"out_proj": lambda m: (m.in_split[1], m.in_split[0]), "attn_out_proj": 1, "mlp_out_proj": 1},
        partial=(*QK_NORMS, "mlp_act"), inner=("attn_drop", "mlp_drop"), whole=("in_norm", "ls", "drop_path"),
        local=("num_heads", "in_split"), divides={**HEADS, "MLP width": "in_split[0]"}, edits=(BY_WIDTH, BY_TOKENS),
        joins_rows=True,
    ),
    DiffParallelScalingBlock: ShardRule(
        column={"in_proj": lambda m: tuple(m.in_split)}, cut={"mlp_bias": 0}, enter_after="in_norm",
        row={"out_proj": lambda m: (m.in_split[1], m.in_split[0])},
        partial=(*QK_NORMS, *LAMBDAS, "sub_norm", "mlp_act"), inner=("attn_drop", "mlp_drop"),
        whole=("in_norm", "ls", "drop_path"), local=("num_heads", "in_split"),
        divides={**HEADS, "MLP width": "in_split[0]"}, edits=(BY_WIDTH, BY_TOKENS),
    ),
}  # fmt: skip

# Attention on clips folds or repeats tokens between cut layers that are timm's.
LAYERS[JointAttention] = LAYERS[SpaceAttention] = LAYERS[TimeAttention] = LAYERS[Attention]
LAYERS[VideoRopeMixed] = LAYERS[RotaryEmbeddingMixed]
