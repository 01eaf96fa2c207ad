"""How does a timm image model become a video model? In place, after everything that cannot be was refused.

What it had keeps its name and value; of the patch embedding only the kernel is new (video_embed.py). New parts are made
from the model's own; what they start as says video_start.py.
"""

from __future__ import annotations

import copy

import torch
from timm.layers import Attention, PatchEmbed
from timm.models.eva import Eva
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from vit_tp.config.schema import VideoConfig
from vit_tp.config.video import ATTENTIONS, INFLATIONS, POSITIONS, video_complaints
from vit_tp.errors import ConfigError
from vit_tp.models.video import FactorisedVisionTransformer, VideoEva, VideoVisionTransformer
from vit_tp.models.video_attention import JointAttention, SpaceAttention, TokenOrder, as_divided_
from vit_tp.models.video_embed import over_time_
from vit_tp.models.video_positions import IN_TIME, in_time_
from vit_tp.models.video_start import start_new_parts_

CAN = (
    "timm's VisionTransformer (vit_*, deit3_*, eva_large_* and more: every attention, position=learned or sincos) and "
    "Eva (eva02_*, *_dinov3, vit_pe_*, vit_*_rope_*: attention=joint, every position)"
)


def video_model(
    model: nn.Module,
    num_frames: int,
    *,
    tubelet_size: int = 2,
    attention: str = "joint",
    position: str = "learned",
    inflation: str = "mean",
    time_depth: int = 4,
) -> nn.Module:
    """Turn a timm image model into a model of clips (B, channels, T, Y, X), in place.

    Give it an image model with the weights to start from, and cut it afterwards. Parts that it lacks start as copies of
    its own whose last layer is zero, so for a clip of equal frames the new model gives the image model's logits, to
    rounding. Not so with position="sincos", which replaces a table, or "rope", which turns it in time; nor with
    attention="joint" on a model with prefix tokens that is an Eva, or whose blocks have another attention than timm's
    Attention, for there a clip has more patches for each prefix token than an image; nor, but for "factorised", where
    the head pools prefix tokens together with patches. With one tubelet the last two are exact.

    Args:
        model: A timm model, real or on meta, that is not cut.
        num_frames: Frames of a clip, T.
        tubelet_size: Frames that one token covers.
        attention: "joint", over all tokens; "divided", over time and then in space in each block; "factorised", within
            frames, then over pooled frames.
        position: Of a frame in time: "learned", from 0; "sincos", a fixed table of time, rows and columns in the place
            of the model's; "rope", the model's rotary table turned further in time.
        inflation: Of the patch embedding over time: "mean", or "central" for all of it in a tubelet's middle frame.
        time_depth: Of "factorised": blocks over pooled frames.

    Returns:
        The same model.

    Raises:
        ConfigError: If a choice is unknown, or the model is none that can.
    """
    return as_video_(model, VideoConfig(num_frames, tubelet_size, attention, position, inflation, time_depth), knob="")


def as_video_(model: nn.Module, video: VideoConfig, knob: str = "model.video.") -> nn.Module:
    """Turn a timm image model into a video model, in place, and return it.

    Args:
        model: See `video_model`.
        video: The choices.
        knob: How a choice is typed, for messages.

    Raises:
        ConfigError: As `video_model`; nothing was changed.
    """
    _require_choices(video, knob)
    _require_model(model, video, knob)
    num_times = video.num_frames // video.tubelet_size
    order = TokenOrder(num_times, model.num_prefix_tokens, in_each_frame=video.attention == "factorised")
    over_time_(model.patch_embed, video.num_frames, video.tubelet_size, video.inflation)
    if video.position == "sincos":
        model.pos_embed = None
    elif video.position == "learned":
        like = model.patch_embed.proj.weight
        shape = (1, num_times, model.embed_dim)
        model.time_embed = nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
    _change_blocks_(model, video, order)
    if getattr(model, "rope", None) is not None:
        in_time_(model.rope, num_times, video.position == "rope")
    model.video, model.num_times = copy.copy(video), num_times
    model.__class__ = _class_of(model, video.attention)
    start_new_parts_(model)
    return model


def _class_of(model: nn.Module, attention: str) -> type[nn.Module]:
    if isinstance(model, Eva):
        return VideoEva
    return FactorisedVisionTransformer if attention == "factorised" else VideoVisionTransformer


def _change_blocks_(model: nn.Module, video: VideoConfig, order: TokenOrder) -> None:
    if video.attention == "joint":
        for module in model.blocks.modules() if order.num_repeated else ():
            if type(module) is Attention:
                module.__class__, module.order = JointAttention, order
        return
    if video.attention == "divided":
        for block in model.blocks:
            as_divided_(block, copy.deepcopy(block.norm1), copy.deepcopy(block.attn), order)
        return
    model.time_blocks = nn.Sequential(*(copy.deepcopy(model.blocks[-1]) for _ in range(video.time_depth)))
    for block in model.blocks:
        block.attn.__class__, block.attn.order = SpaceAttention, order


def rebuild_video(model: nn.Module, image: nn.Module) -> nn.Module:
    """Return an image model turned into a video model as `model` was; the image model itself if that is none."""
    video = getattr(model, "video", None)
    return image if video is None else as_video_(image, video)


def _require_choices(video: VideoConfig, knob: str) -> None:
    names = {"attention": ATTENTIONS, "position": POSITIONS, "inflation": INFLATIONS}
    complaints = [
        f"{knob}{name}={getattr(video, name)} is not known; there are {', '.join(known)}. Use {knob}{name}={known[0]}."
        for name, known in names.items()
        if getattr(video, name) not in known
    ]
    complaints += [
        f"{knob}{name}={getattr(video, name)} is no number of frames or blocks; it is a whole number from 1. "
        f"Use for example {knob}{name}={example}."
        for name, example in (("num_frames", 16), ("tubelet_size", 2), ("time_depth", 4))
        if type(getattr(video, name)) is not int or getattr(video, name) < 1
    ]
    complaints = complaints or list(video_complaints(video, knob))
    if complaints:
        raise ConfigError(complaints)


def _require_model(model: nn.Module, video: VideoConfig, knob: str) -> None:
    kind = type(model)
    if hasattr(model, "video"):
        raise ConfigError(
            f"this {kind.__name__} is a video model already; its kernel covers frames, and would be inflated twice. "
            f"Make it once from the image model."
        )
    if hasattr(model, "tp_cut"):
        raise ConfigError(
            f"this {kind.__name__} is cut already; new parts would be whole beside slices. Make the video model first."
        )
    if kind not in (VisionTransformer, Eva):
        raise ConfigError(
            f"{kind.__name__} cannot become a video model; how its positions, tokens or stages would go on in time is "
            f"not known. Use {CAN}."
        )
    if type(model.patch_embed) is not PatchEmbed:
        raise ConfigError(
            f"the patch embedding of this {kind.__name__} is a {type(model.patch_embed).__name__}, and only timm's "
            f"PatchEmbed has one kernel that can be spread over frames. Use a model without a convolutional stem."
        )
    if kind is Eva and video.attention != "joint":
        raise ConfigError(
            f"{knob}attention={video.attention} does not go with Eva, whose rotary tables and blocks take the tokens "
            f"of a clip whole. Use {knob}attention=joint, or one of timm's VisionTransformer models (vit_*)."
        )
    rope = getattr(model, "rope", None)
    if video.position == "rope" and rope is None:
        raise ConfigError(
            f"{knob}position=rope, but this {kind.__name__} has no rotary table that could turn in time. "
            f"Use {knob}position=learned or sincos, or a model with one, such as eva02_base_patch14_224, "
            f"vit_base_patch16_dinov3 or vit_pe_core_base_patch16_224."
        )
    if rope is not None and type(rope) not in IN_TIME:
        raise ConfigError(
            f"the rotary table of this {kind.__name__} is a {type(rope).__name__}, which is not known in time; "
            f"there are {', '.join(known.__name__ for known in IN_TIME)}. Use a model with one of those."
        )
    if video.attention != "joint":
        _require_plain_blocks(model, video, knob)
    keeps_all = type(model.patch_drop) in (nn.Identity, type(None))
    if not keeps_all and (video.attention != "joint" or kind is Eva):
        raise ConfigError(
            f"patch_drop_rate={model.patch_drop.prob:g} leaves frames with patches at different places, and "
            f"{kind.__name__} with {knob}attention={video.attention} needs the same ones in all frames. "
            f"Use patch_drop_rate=0, or {knob}attention=joint with a VisionTransformer."
        )
    if video.position == "sincos" and model.embed_dim % 2:
        raise ConfigError(
            f"{knob}position=sincos makes sines and cosines in pairs, and embed_dim={model.embed_dim} is odd. "
            f"Use an even embed_dim, or {knob}position=learned."
        )


def _require_plain_blocks(model: VisionTransformer, video: VideoConfig, knob: str) -> None:
    for index, block in enumerate(model.blocks):
        attn = getattr(block, "attn", None)
        if type(block) is not Block or type(attn) is not Attention:
            what = type(block).__name__ + (f" with {type(attn).__name__}" if type(block) is Block else "")
            raise ConfigError(
                f"{knob}attention={video.attention} folds the queries, keys and values of timm's Block with its "
                f"Attention, and blocks.{index} of this model is a {what}. Use {knob}attention=joint, or a model with "
                f"plain blocks, such as vit_base_patch16_224."
            )
    if video.attention == "factorised" and not model.global_pool:
        raise ConfigError(
            f"global_pool='' leaves no one token of a frame, and {knob}attention=factorised looks over time at one for "
            f"each. Use another global_pool, such as avg, or {knob}attention=joint."
        )
