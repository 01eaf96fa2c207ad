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
        model: Stock timm, whole.
        x: (B, 3, Y, X).
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
        for index, (branch, bias, drop) in enumerate(
            (
                (_attention(block.attn, num_lanes), block.attn.proj.bias, block.drop_path1),
                (_mlp(block.mlp, num_lanes), block.mlp.fc2.bias, block.drop_path2),
            )
        ):
            products = [branch(before[index](lane), number) for number, lane in enumerate(lanes)]
            synced = _sync(products, math.floor(fraction * x.shape[-1] + 1e-9))
            outputs = [scales[index](after[index](product + bias)) for product in synced]
            keep = _keep(drop, x)
            lanes = [lane + output * keep for lane, output in zip(lanes, outputs)]
    x = sum(lanes) / num_lanes
    return model.forward_head(model.norm(x))


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
        qkv = attn.qkv(u).view(batch, num_tokens, 3, attn.num_heads, attn.head_dim)
        out, columns = u.new_zeros(()), attn.proj.weight.view(-1, attn.num_heads, attn.head_dim)
        for head in heads:
            q, k, v = qkv[:, :, :, head].unbind(2)
            q, k = attn.q_norm(q), attn.k_norm(k)
            scores = (q @ k.transpose(-2, -1) * attn.scale).softmax(-1)
            out = out + (scores @ v) @ columns[:, head].T
        return out

    return branch


def _mlp(mlp: nn.Module, num_lanes: int):
    def branch(u: Tensor, lane: int) -> Tensor:
        width = mlp.fc1.out_features // num_lanes
        own = slice(lane * width, (lane + 1) * width)
        hidden = mlp.act(F.linear(u, mlp.fc1.weight[own], mlp.fc1.bias[own]))
        return F.linear(hidden, mlp.fc2.weight[:, own])

    return branch
