"""Partially synchronised activations in one process: every lane's stream by hand, from a stock model's whole weights.

The oracle of the partial region: plain torch, no exchange, autograd alone. arXiv 2506.19645, with biases, LayerScale
and drop path as timm has them; the mean of the lanes goes into the head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import ResPostBlock
from torch import Tensor, nn


def forward(model: nn.Module, x: Tensor, num_lanes: int, fraction: float) -> Tensor:
    """Return the logits of a stock VisionTransformer whose residual stream is kept in lanes.

    Args:
        model: Stock timm, or a video model, whole.
        x: (B, 3, Y, X), or of clips (B, 3, T, Y, X).
        num_lanes: As many as there would be tensor-parallel ranks.
        fraction: Share of the channels that is summed, p.
    """
    x = model.patch_embed(x)
    x = model.norm_pre(model.patch_drop(model._pos_embed(x)))
    lanes = [x] * num_lanes
    for block in model.blocks:
        is_post_norm = isinstance(block, ResPostBlock)
        ones = nn.Identity(), nn.Identity()
        scales = ones if is_post_norm else (block.ls1, block.ls2)
        before, after = (ones, (block.norm1, block.norm2))[:: 1 if is_post_norm else -1]
        branches = [
            (_attention(block.attn, num_lanes), block.attn.proj.bias, block.drop_path1, before[0], after[0], scales[0]),
            (_mlp(block.mlp, num_lanes), block.mlp.fc2.bias, block.drop_path2, before[1], after[1], scales[1]),
        ]
        if (time := getattr(block, "attn_time", None)) is not None:
            none, branch = nn.Identity(), _attention(time, num_lanes)
            branches.insert(0, (branch, time.proj.bias, block.drop_path1, block.norm_time, none, none))
        for branch, bias, drop, norm, norm_after, scale in branches:
            products = [branch(norm(lane), number) for number, lane in enumerate(lanes)]
            synced = _sync(products, math.floor(fraction * x.shape[-1] + 1e-9))
            outputs = [scale(norm_after(product + bias)) for product in synced]
            keep = _keep(drop, x)
            lanes = [lane + output * keep for lane, output in zip(lanes, outputs)]
    x = sum(lanes) / num_lanes
    return model.forward_head(x if hasattr(model, "time_blocks") else model.norm(x))


def _keep(drop: nn.Module, x: Tensor) -> Tensor | float:
    """Draw one drop-path mask for all lanes, as timm draws it."""
    if not drop.training or not getattr(drop, "drop_prob", 0.0):
        return 1.0
    kept = 1 - drop.drop_prob
    return x.new_empty((x.shape[0], 1, 1)).bernoulli_(kept) / kept


def _sync(products: list[Tensor], num_shared: int) -> list[Tensor]:
    shared = sum(product[..., :num_shared] for product in products)
    scale = math.sqrt(len(products))
    return [torch.cat((shared, scale * product[..., num_shared:]), -1) for product in products]


def _attention(attn: nn.Module, num_lanes: int):
    """Return (u, lane) -> that lane's heads times their columns of the projection, without its bias."""

    def branch(u: Tensor, lane: int) -> Tensor:
        batch, num_tokens, _ = u.shape
        heads = range(lane * attn.num_heads // num_lanes, (lane + 1) * attn.num_heads // num_lanes)
        keys, sees = _keys(attn, num_tokens)
        qkv = attn.qkv(u).view(batch, num_tokens, 3, attn.num_heads, attn.head_dim)
        out, columns = u.new_zeros(()), attn.proj.weight.view(-1, attn.num_heads, attn.head_dim)
        for head in heads:
            q, k, v = qkv[:, :, :, head].unbind(2)
            q, k = attn.q_norm(q), attn.k_norm(k)
            scores = (q @ k[:, keys].transpose(-2, -1) * attn.scale).masked_fill(~sees, -math.inf).softmax(-1)
            out = out + (scores @ v[:, keys]) @ columns[:, head].T
        return out

    return branch


def _keys(attn: nn.Module, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the tokens that are keys, (K,), and which of them each token sees, (N, K) or (1, K); of clips too."""
    everything, kind, order = torch.arange(num_tokens), type(attn).__name__, getattr(attn, "order", None)
    if order is not None and kind != "JointAttention":
        patches = num_tokens - order.num_prefix
        if kind == "TimeAttention":  # a patch sees its place in all frames, a prefix token itself
            place = torch.arange(patches // order.num_times).repeat(order.num_times)
            place = torch.cat((-1 - torch.arange(order.num_prefix), place))
        else:
            assert order.in_each_frame or not order.num_prefix, "frames that share a prefix are no mask"
            place = torch.arange(order.num_times).repeat_interleave(num_tokens // order.num_times)
        return everything, place[:, None] == place[None]
    if order is not None:  # the prefix once for every tubelet
        everything = torch.cat((torch.arange(order.num_prefix).repeat(order.num_times - 1), everything))
    return everything, torch.ones(1, len(everything), dtype=torch.bool)


def _mlp(mlp: nn.Module, num_lanes: int):
    def branch(u: Tensor, lane: int) -> Tensor:
        width = mlp.fc1.out_features // num_lanes
        own = slice(lane * width, (lane + 1) * width)
        hidden = mlp.act(F.linear(u, mlp.fc1.weight[own], mlp.fc1.bias[own]))
        return F.linear(hidden, mlp.fc2.weight[:, own])

    return branch
