"""Attention over all tokens of a clip, within a frame, and over time at one place.

Tokens stay one sequence (B, N, C) outside of attention, time before row before column:

    one prefix for the clip        [prefix] [t=0: S patches] [t=1: S patches] ...        N = P + T S
    a prefix for each frame        [prefix, S patches of t=0] [prefix, S patches of t=1] ...   N = T (P + S)

Queries, keys and values are computed on that sequence and only then folded, so column and row linears, norms, drop path
and everything between blocks are those of an image model. Here T counts tubelets.

Does not know: positions, how the classes are cut (vit_tp/sharding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from vit_tp.errors import ConfigError


@dataclass(frozen=True)
class TokenOrder:
    """Where frames and prefix tokens lie in a sequence.

    Args:
        num_times: Tubelets along time, T.
        num_prefix: Class and register tokens, P.
        in_each_frame: Whether each frame has prefix tokens of its own.
    """

    num_times: int
    num_prefix: int
    in_each_frame: bool

    @property
    def num_repeated(self) -> int:
        """Prefix tokens that are added in front where the prefix stands once for every tubelet, P (T - 1)."""
        return self.num_prefix * (self.num_times - 1)

    def repeat_prefix(self, x: Tensor) -> Tensor:
        """(B, N, ...) -> (B, P (T - 1) + N, ...); there may be fewer patches than T S, as after patch dropout."""
        return torch.cat((*(x[:, : self.num_prefix],) * (self.num_times - 1), x), dim=1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H, N, D) with one prefix -> prefix (B, H, P, D) and patches (B, H, T, S, D)."""
        return x[:, :, : self.num_prefix], x[:, :, self.num_prefix :].unflatten(2, (self.num_times, -1))

    def to_frames(self, x: Tensor) -> Tensor:
        """(B, H, N, D) -> (B, H T, P + S, D), where every frame sees the prefix."""
        if self.in_each_frame:
            return x.unflatten(2, (self.num_times, -1)).flatten(1, 2)
        prefix, patches = self.split(x)
        prefix = prefix.unsqueeze(2).expand(-1, -1, self.num_times, -1, -1)
        return torch.cat((prefix, patches), dim=3).flatten(1, 2)

    def from_frames(self, x: Tensor) -> Tensor:
        """(B, H T, P + S, D) -> (B, H, N, D); a prefix that all frames saw becomes the mean of what they made of it."""
        x = x.unflatten(1, (-1, self.num_times))
        if self.in_each_frame:
            return x.flatten(2, 3)
        prefix, patches = x[:, :, :, : self.num_prefix], x[:, :, :, self.num_prefix :]
        return torch.cat((prefix.mean(2), patches.flatten(2, 3)), dim=2)


class _ClipAttention(Attention):
    """timm's attention, with something done to tokens around the product of queries, keys and values."""

    order: TokenOrder

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        B, N, _ = x.shape
        mask = self.mask_of(x, attn_mask, is_causal)
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        qkv = self.lay_out(self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = self.fold_and_attend(self.q_norm(q), self.k_norm(k), v, mask)
        x = self.norm(x.transpose(1, 2).reshape(B, N, self.attn_dim))
        x = self.proj(x if gate is None else x * gate)
        return self.proj_drop(x)

    def mask_of(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
        """Return the mask to attend with, from what timm's forward is given."""
        if attn_mask is not None or is_causal:
            raise ConfigError(
                f"{type(self).__name__} was given a mask; attention over a part of a clip's tokens takes none. "
                f"Use model.video.attention=joint."
            )
        return None

    def lay_out(self, qkv: Tensor) -> Tensor:
        """(B, N, 3, H, D) -> (B, N', 3, H, D), what q, k and v are views of."""
        return qkv

    def fold_and_attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N', D) -> (B, H, N, D)."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, H', n, D) -> (B, H', n, D), as timm's forward does it."""
        if self.fused_attn:
            dropout_p = self.attn_drop.p if self.training else 0.0
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p)
        weights = (q * self.scale) @ k.transpose(-2, -1)
        if mask is not None:
            weights = weights.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else weights + mask
        return self.attn_drop(weights.softmax(dim=-1)) @ v


class JointAttention(_ClipAttention):
    """(B, N, C) -> (B, N, C): each token attends to all of the clip, to a prefix token as often as there are tubelets.

    In a clip of equal frames each patch stands T times; a prefix that stood there once would have a smaller share of
    each softmax than in the image model. So its keys and values stand there T times too, and shares stay as they were.
    They are repeated before queries, keys and values part, so that backward keeps one tensor of them, as timm's does.
    """

    def mask_of(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
        if is_causal:  # which has no other meaning for more keys than queries
            attn_mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if attn_mask is None or attn_mask.shape[-1] == 1:
            return attn_mask
        return self.order.repeat_prefix(attn_mask.movedim(-1, 1)).movedim(1, -1)

    def lay_out(self, qkv: Tensor) -> Tensor:
        return self.order.repeat_prefix(qkv)

    def fold_and_attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.attend(q[:, :, self.order.num_repeated :], k, v, mask)


class SpaceAttention(_ClipAttention):
    """(B, N, C) -> (B, N, C): each token attends to those of its frame.

    One prefix for the clip is seen by every frame, and takes the mean over frames of what it gathers in each.
    """

    def fold_and_attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.order.from_frames(self.attend(*(self.order.to_frames(part) for part in (q, k, v))))


class TimeAttention(_ClipAttention):
    """(B, N, C) -> (B, N, C): each patch attends to those at its place in all frames.

    A prefix token has no place in a frame, and attends to itself alone.
    """

    def fold_and_attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        along_time = [self.order.split(part)[1].transpose(2, 3).flatten(1, 2) for part in (q, k, v)]  # (B, H S, T, D)
        patches = self.attend(*along_time).unflatten(1, (v.shape[1], -1)).transpose(2, 3).flatten(2, 3)
        return torch.cat((self.order.split(v)[0], patches), dim=2)


class DividedBlock(Block):
    """(B, N, C) -> (B, N, C): attention over time, then timm's block with attention in space.

    Source: TimeSformer, arXiv 2102.05095, section 3.1, "divided space-time attention"; facebookresearch/TimeSformer
    leaves the class token out of attention over time, and starts its last layer at zero and the others as copies of the
    block's own, as here.
    """

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        x = x + self.drop_path1(self.attn_time(self.norm_time(x)))
        return super().forward(x, attn_mask, is_causal)


def as_divided_(block: Block, norm: nn.Module, attn: Attention, order: TokenOrder) -> None:
    """Turn timm's block into a divided one, in place.

    Args:
        block: The block.
        norm: Stands before attention over time.
        attn: Looks over time.
        order: Of tokens.
    """
    attn.__class__, attn.order = TimeAttention, order
    block.attn.__class__, block.attn.order = SpaceAttention, order
    block.__class__, block.norm_time, block.attn_time = DividedBlock, norm, attn
