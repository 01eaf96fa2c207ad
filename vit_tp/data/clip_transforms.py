"""What becomes of the frames of a clip?

In training timm's own transforms. In evaluation timm's resize and centre crop, or three crops along the longer side.
Frames stay uint8.

Does not know: files, moments, normalising and erasing (train/prepare.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from PIL import Image
from timm.data.transforms import str_to_interp_mode
from torch import Tensor
from torchvision.transforms import functional as TF

from vit_tp.config import DataConfig
from vit_tp.data.spec import Size
from vit_tp.data.transforms import apply, build_transform, require_resizable

FrameTransform = Callable[[Image.Image], Tensor]
"""From a frame to (3, Y, X) uint8, or to (3, 3, Y, X) with three crops."""


def build_frame_transform(data: DataConfig, is_training: bool, size: Size) -> FrameTransform:
    """Build the transform of one frame from the knobs of the config.

    Args:
        data: The data group of the config.
        is_training: Whether it augments at random.
        size: Height and width (Y, X) of the result, in pixels.

    Raises:
        ConfigError: timm refuses a knob.
    """
    if not is_training and data.eval_crops == 3:
        # timm's "random" picks bilinear or bicubic for each clip in training; an evaluation needs one of them.
        return ThreeCrops(size, "bicubic" if data.interpolation == "random" else data.interpolation)
    return partial(apply, build_transform(data, is_training, size))


class ThreeCrops:
    """The short side resized to the size; crops at the beginning, the middle and the end of the longer side.

    Args:
        size: Height and width (Y, X) of a crop, in pixels.
        interpolation: timm's name of it.

    Source: SlowFast, slowfast/datasets/transform.py, uniform_crop.
    """

    def __init__(self, size: Size, interpolation: str) -> None:
        self.size, self.interpolation = size, str_to_interp_mode(interpolation)

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the crops (3, 3, Y, X): crop, channel, row, column."""
        height, width = self.size
        require_resizable(image.size, (width, height))
        scale = max(height / image.height, width / image.width)
        resized = [max(height, round(image.height * scale)), max(width, round(image.width * scale))]
        pixels = TF.pil_to_tensor(TF.resize(image, resized, self.interpolation))
        spare_y, spare_x = resized[0] - height, resized[1] - width
        corners = [(0, 0), (math.ceil(spare_y / 2), math.ceil(spare_x / 2)), (spare_y, spare_x)]
        return torch.stack([pixels[:, y : y + height, x : x + width] for y, x in corners])
