"""What do the parts start as that a video model has and its image model has not?

As copies of the image model's own, but for what ends them, which is zero: they add nothing at first. The answer is the
same on every way into a model: `vit_tp.video_model`, a checkpoint of the image model, first weights, `init_weights`.

    blocks.<i>.attn_time, norm_time    the block's own attn and norm1; attn_time.proj is zero
    time_blocks.<i>                    the last block; attn.proj and mlp.fc2 are zero
    time_embed                         zero

Does not know: how the parts are made, files.
"""

from __future__ import annotations

import re

import torch
from torch import nn

SILENT = re.compile(r"time_embed$|blocks\.\d+\.attn_time\.proj\.|time_blocks\.\d+\.(attn\.proj|mlp\.fc2)\.")
OF_ITS_BLOCK = {"attn_time": "attn", "norm_time": "norm1"}


def origin_of(model: nn.Module, name: str) -> str | None:
    """Return the name of what a parameter starts as a copy of.

    Args:
        model: Any model.
        name: Of one of its parameters.

    Returns:
        The name of one of the image model's; None for the image model's own, and for what starts at zero.
    """
    if getattr(model, "video", None) is None or SILENT.match(name):
        return None
    group, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    if group == "time_blocks":
        return f"blocks.{len(model.blocks) - 1}.{rest}"
    part, _, rest = rest.partition(".")
    return f"blocks.{index}.{OF_ITS_BLOCK[part]}.{rest}" if group == "blocks" and part in OF_ITS_BLOCK else None


@torch.no_grad()
def start_new_parts_(model: nn.Module) -> None:
    """Give the new parts of a video model their first values, from what its other parts hold."""
    for name, param in model.named_parameters():
        if SILENT.match(name):
            param.zero_()
        elif (origin := origin_of(model, name)) is not None:
            param.copy_(model.get_parameter(origin))
