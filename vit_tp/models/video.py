"""What is a video transformer? A timm image model with its names and weights, and what clips need besides.

    attention=joint       timm's blocks over all tokens of a clip, among which prefix tokens count for every tubelet
    attention=divided     over time, then in space, in each block (video_attention.py)
    attention=factorised  timm's blocks within frames; then frames are pooled, and further blocks look over time

Input is (B, channels, T, Y, X); tokens stand in the order time, row, column. Does not know: how an image model becomes
one (video_build.py), checkpoints, stages, ranks.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from timm.models import checkpoint_seq
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vit_tp.config.schema import VideoConfig
from vit_tp.errors import ConfigError
from vit_tp.models.video_positions import sincos_table
from vit_tp.models.video_start import start_new_parts_


class _Clips(nn.Module):
    """What video models have in common; stands before timm's class in the order of methods.

    Attributes:
        video: The choices that made it.
        num_times: Tubelets along time, T.
        time_embed: (1, T, C), where positions in time are learnt.
    """

    video: VideoConfig
    num_times: int

    def _pos_embed(self, x: Tensor) -> Any:
        """(B, T, Y, X, C) -> (B, N, C), and what timm's own returns besides; timm adds its table to each frame."""
        placed = self._add_time(x)
        frames = placed.flatten(0, 1)
        found = super()._pos_embed(frames if self.dynamic_img_size else frames.flatten(1, 2))
        frames, *others = found if isinstance(found, tuple) else (found,)
        joined = self._join(frames.unflatten(0, (-1, self.num_times)))
        if self.pos_embed is None and placed is not x and isinstance(self, VisionTransformer):
            joined = self.pos_drop(joined)  # timm leaves it out where it has no table; here one was added
        return (joined, *others) if others else joined

    def _add_time(self, x: Tensor) -> Tensor:
        if self.video.position == "sincos":
            return x + sincos_table(*x.shape[1:], like=x)
        time = self._parameters.get("time_embed")
        return x if time is None else x + time[:, :, None, None]

    def _join(self, frames: Tensor) -> Tensor:
        """(B, T, P + S, C) -> (B, P + T S, C): every frame has the prefix of timm's, and one is kept."""
        prefix, patches = frames.tensor_split((self.num_prefix_tokens,), dim=2)
        return torch.cat((prefix[:, 0], patches.flatten(1, 2)), dim=1)

    def no_weight_decay(self) -> set[str]:
        """timm's, and the table of time."""
        return super().no_weight_decay() | {"time_embed"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's; the table of time belongs to the stem."""
        matcher = super().group_matcher(coarse)
        return {**matcher, "stem": f"{matcher['stem']}|time_embed"}

    def init_weights(self, *args: Any, **kwargs: Any) -> None:
        """timm's; new parts start afresh too, and add nothing."""
        super().init_weights(*args, **kwargs)
        start_new_parts_(self)

    def forward_intermediates(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse what timm lays out as images.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"forward_intermediates of {type(self).__name__} would lay tokens of a clip out as an image; timm knows "
            f"no maps of clips. Use forward_features, or hooks on model.blocks."
        )


class VideoVisionTransformer(_Clips, VisionTransformer):
    """timm's VisionTransformer on clips, with attention over all tokens or divided into time and space."""


class VideoEva(_Clips, Eva):
    """timm's Eva on clips, with attention over all tokens; rotary tables, where there are any, cover a clip."""


class FactorisedVisionTransformer(_Clips, VisionTransformer):
    """timm's VisionTransformer on each frame, then blocks over the pooled frames, whose mean is classified.

    Every frame has prefix tokens of its own: (B, T (P + S), C). A norm that timm applies to the class token before it
    pools stands behind the blocks over time instead, which for a clip of equal frames is the same at first.

    Attributes:
        time_blocks: Blocks over pooled frames.

    Source: ViViT, arXiv 2103.15691, section 3.3, model 2, "factorised encoder"; there a class token gathers the frames
    and here their mean does, so that a clip of equal frames starts with the image model's logits.
    """

    def _add_time(self, x: Tensor) -> Tensor:
        return super()._add_time(x) if self.video.position == "sincos" else x  # learnt ones are added to pooled frames

    def _join(self, frames: Tensor) -> Tensor:
        """(B, T, P + S, C) -> (B, T (P + S), C)."""
        return frames.flatten(1, 2)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's, whose last group takes the table of time too: it is added behind the blocks."""
        return VisionTransformer.group_matcher(self, coarse)

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the tokens of all frames, (B, T (P + S), C), before any norm."""
        if attn_mask is not None or is_causal:
            raise ConfigError(
                "a factorised video model was given a mask; attention within frames takes none. "
                "Use model.video.attention=joint."
            )
        x = self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))
        return checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(B, T (P + S), C) -> (B, K), through (B, T, C)."""
        frames = x.unflatten(1, (self.num_times, -1)).flatten(0, 1)
        is_token = self.attn_pool is None and self.global_pool == "token"
        x = self.pool(frames if is_token else self.norm(frames)).unflatten(0, (-1, self.num_times))
        if (time := self._parameters.get("time_embed")) is not None:
            x = x + time
        x = self.time_blocks(x).mean(1)
        x = self.head_drop(self.fc_norm(self.norm(x) if is_token else x))
        return x if pre_logits else self.head(x)
