"""Attention within a frame, and attention over time at one place, on the tokens of whole clips.

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


class _FoldedAttention(Attention):
    """timm's attention with tokens folded around the product of queries, keys and values."""

    order: TokenOrder

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ConfigError(
                f"{type(self).__name__} was given a mask; attention over a part of a clip's tokens takes none. "
                f"Use model.video.attention=joint."
            )
        B, N, _ = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        x = self.fold_and_attend(self.q_norm(q), self.k_norm(k), v)
        x = self.norm(x.transpose(1, 2).reshape(B, N, self.attn_dim))
        x = self.proj(x if gate is None else x * gate)
        return self.proj_drop(x)

    def fold_and_attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, N, D) -> (B, H, N, D)."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H', n, D) -> (B, H', n, D), as timm's forward does it."""
        if self.fused_attn:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        weights = (q * self.scale) @ k.transpose(-2, -1)
        return self.attn_drop(weights.softmax(dim=-1)) @ v


class SpaceAttention(_FoldedAttention):
    """(B, N, C) -> (B, N, C): each token attends to those of its frame.

    One prefix for the clip is seen by every frame, and takes the mean over frames of what it gathers in each.
    """

    def fold_and_attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.order.from_frames(self.attend(*(self.order.to_frames(part) for part in (q, k, v))))


class TimeAttention(_FoldedAttention):
    """(B, N, C) -> (B, N, C): each patch attends to those at its place in all frames.

    A prefix token has no place in a frame, and attends to itself alone.
    """

    def fold_and_attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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


def as_space_attention_(attn: Attention, order: TokenOrder) -> None:
    """Turn timm's attention into attention within frames, in place."""
    attn.__class__, attn.order = SpaceAttention, order


def as_divided_(block: Block, norm: nn.Module, attn: Attention, order: TokenOrder) -> None:
    """Turn timm's block into a divided one, in place.

    Args:
        block: The block.
        norm: Stands before attention over time.
        attn: Looks over time; its output projection is set to zero.
        order: Of tokens.
    """
    silence_(attn.proj)
    attn.__class__, attn.order = TimeAttention, order
    as_space_attention_(block.attn, order)
    block.__class__, block.norm_time, block.attn_time = DividedBlock, norm, attn


@torch.no_grad()
def silence_(linear: nn.Linear) -> None:
    """Set a linear layer to zero, so that what it ends adds nothing at first."""
    for param in linear.parameters():
        param.zero_()
