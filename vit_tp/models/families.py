"""The lines of each timm family's forward that stand between blocks and after them, with timm's own functions.

What timm computes once and hands to every block is computed anew in each block's stage, from the same modules.
"""

from __future__ import annotations

import copy

import torch
from timm.layers import apply_keep_indices_nlc
from torch import Tensor, nn

Grid = tuple[int, int]
"""Rows and columns of patches (or pixels, where it says so)."""


# -- the grid of patches of an image, from its height and width in pixels ---------------------------------------------


def patch_grid(owner: nn.Module, img_size: Grid) -> Grid:
    return tuple(owner.patch_embed.dynamic_feat_size(img_size))


def frame_grid(owner: nn.Module, clip_size: tuple[int, int, int]) -> Grid:
    """Of each frame; tables of clips know how many there are."""
    return patch_grid(owner, clip_size[1:])


def naflex_grid(owner: nn.Module, img_size: Grid) -> Grid:
    return tuple(owner.embeds.dynamic_feat_size(img_size))


def whole_patches(owner: nn.Module, img_size: Grid) -> Grid:
    return tuple(side // patch for side, patch in zip(img_size, owner.patch_size))


def halved_grid(owner: nn.Module, img_size: Grid) -> Grid:
    """Convolutions of stride 2 with padding round up."""
    return tuple(-(-side // owner.patch_embed.patch_size) for side in img_size)


# -- what a block is handed beside the tokens -------------------------------------------------------------------------


def rope_of_eva(around: nn.Module, index: int, x: Tensor, grid: Grid) -> dict[str, Tensor]:
    if around.rope is None:
        return {}
    has_own_grid = not around.dynamic_img_size and hasattr(around.rope, "feat_shape")
    return {"rope": _rope(around, index, x, None if has_own_grid else grid, around.rope_mixed)}


def rope_of_naflex(around: nn.Module, index: int, x: Tensor, grid: Grid) -> dict[str, Tensor]:
    return {} if around.rope is None else {"rope": _rope(around, index, x, grid, around.rope_is_mixed)}


def _rope(around: nn.Module, index: int, x: Tensor, grid: Grid | None, is_mixed: bool) -> Tensor:
    """Return a block's rotary table: (N, 2D), mixed (H, N, 2D); with patches dropped (B, 1 or H, N, 2D)."""
    rope = _one_depth(around.rope, index) if is_mixed else around.rope
    table = rope.get_embed() if grid is None else rope.get_embed(shape=grid)
    table = table[0] if is_mixed else table
    if not around.training or around.patch_drop is None:
        return table
    num_tokens = around.num_prefix_tokens + table.shape[-2]
    _, kept = around.patch_drop(x.new_empty(x.shape[0], num_tokens, 1))  # the draw that the embedding made
    table = apply_keep_indices_nlc(x, table, kept)
    return table if is_mixed else table.unsqueeze(1)


def _one_depth(rope: nn.Module, index: int) -> nn.Module:
    """Return a mixed rotary embedding that only knows one block's frequencies, (2, 1, H, D/2) of (2, depth, H, D/2)."""
    view = copy.copy(rope)
    view._parameters = {}
    view.freqs = rope.freqs[:, index : index + 1]
    return view


def rope_of_grid(around: nn.Module, index: int, x: Tensor, grid: Grid) -> dict[str, Tensor]:
    return {"rope": around.rope.get_embed(shape=grid)}


def cos_and_sin(around: nn.Module, index: int, x: Tensor, grid: Grid) -> dict[str, Tensor]:
    cos, sin = around.rotary_emb(x, _x_and_y(x, grid))
    return {"rope_cos": cos, "rope_sin": sin}


def _x_and_y(x: Tensor, grid: Grid) -> Tensor:
    """Return the column and row of each patch, (B, N, 2), in rows."""
    rows, columns = torch.meshgrid(*(torch.arange(n, device=x.device) for n in grid), indexing="ij")
    return torch.stack([columns.flatten(), rows.flatten()], -1).expand(x.shape[0], -1, -1)


def shared_bias(around: nn.Module, index: int, x: Tensor, grid: Grid) -> dict[str, Tensor]:
    return {} if around.shared_rel_pos is None else {"shared_rel_pos": around.shared_rel_pos.get_bias()}


def shared_bias_of_beit(around: nn.Module, index: int, x: Tensor, grid: Grid) -> dict[str, Tensor]:
    return {} if around.rel_pos_bias is None else {"shared_rel_pos_bias": around.rel_pos_bias()}


def height_and_width(around: nn.Module, index: int, x: Tensor, grid: Grid) -> dict[str, int]:
    height, width = grid
    return {"H": height, "W": width}


def class_token_of_convit(around: nn.Module, index: int, x: Tensor, grid: Grid) -> dict[str, Tensor]:
    """The class token joins the patches in the middle of the blocks."""
    if index != around.local_up_to_layer:
        return {}
    return {"x": torch.cat((around.cls_token.expand(x.shape[0], -1, -1), x), dim=1)}


# -- what follows the last block --------------------------------------------------------------------------------------


def norm_then_head(model: nn.Module, x: Tensor, grid: Grid) -> Tensor:
    return model.forward_head(model.norm(x))


def pooled_frames_then_head(model: nn.Module, x: Tensor, grid: Grid) -> Tensor:
    return model.forward_head(x)


def neck_then_head(model: nn.Module, x: Tensor, grid: Grid) -> Tensor:
    return model.forward_head(model.neck(x.permute(0, 3, 1, 2)))


def class_attention_then_head(model: nn.Module, x: Tensor, grid: Grid) -> Tensor:
    return model.forward_head(model.norm(model.forward_cls(x)))


def end_of_qwen3(encoder: nn.Module, x: Tensor, grid: Grid) -> Tensor:
    x = x.reshape(x.shape[0], *grid, -1)
    if encoder.merger is not None:
        return encoder.merger(x)
    return x.mean(dim=(1, 2)) if encoder.global_pool == "avg" else x


def end_of_deepseek(encoder: nn.Module, x: Tensor, grid: Grid) -> Tensor:
    x = encoder.norm(x).reshape(x.shape[0], *grid, -1)
    if encoder.aligner is not None:
        return encoder.aligner(x)
    return x.mean(dim=(1, 2)) if encoder.global_pool == "avg" else x


def end_of_gemma4(encoder: nn.Module, x: Tensor, grid: Grid) -> Tensor:
    if encoder.global_pool == "avg":
        return x.mean(dim=1)
    if encoder.global_pool != "soft":
        return x
    x, _ = encoder.pooler(x, _x_and_y(x, grid), None)
    return x if encoder.std_bias is None else (x - encoder.std_bias) * encoder.std_scale
