"""Which of timm's transforms do the knobs ask for, and how much of a picture do they need?

timm's own, as far as uint8: normalising and erasing are left to the device. Each is taken in two steps, so that a large
picture is decoded after its crop is known: `crop` says what is looked at, from the size alone, and `finish` does the
rest. At full size the two steps together are timm's transform bit for bit, draw for draw.

Does not know: files, seeds (sampling.py).

Source: timm 1.0, timm/data/transforms_factory.py and transforms.py.
"""

from __future__ import annotations

import random
from typing import NamedTuple, Protocol

import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torchvision.transforms import Compose
from torchvision.transforms import functional as F

from vit_tp.config import DataConfig
from vit_tp.data.boxes import Box, WidthHeight, whole
from vit_tp.data.pixels import require_decodable
from vit_tp.data.posterize import allow_no_bits_
from vit_tp.data.spec import Size
from vit_tp.errors import ConfigError

IN_CHANS = 3


class Crop(NamedTuple):
    """What a transform looks at.

    Args:
        box: Part of the picture, in pixels.
        min_size: Width and height of the result; more pixels of the box are not needed.
        interpolation: How the box is resized; None where the rest of the transform decides.
    """

    box: Box
    min_size: WidthHeight
    interpolation: F.InterpolationMode | None


class Transform(Protocol):
    """A transform in two steps."""

    def crop(self, size: WidthHeight) -> Crop:
        """Return what is looked at; in training this draws.

        Args:
            size: Width and height of the picture in pixels.
        """

    def finish(self, image: Image.Image, crop: Crop) -> Tensor:
        """Return the sample (3, Y, X) uint8; in training this draws.

        Args:
            image: The box of the crop, RGB, at its size or reduced.
            crop: What `crop` returned.
        """


def require_resizable(size: WidthHeight, min_size: WidthHeight) -> None:
    """Refuse a picture that would fill the memory when its shorter side has grown to what is wanted.

    Args:
        size: Width and height in pixels.
        min_size: Width and height that it is resized to cover.

    Raises:
        DataError: It would.
    """
    scale = max(wanted / side for wanted, side in zip(min_size, size))
    require_decodable(
        (round(size[0] * scale), round(size[1] * scale)),
        f"it is {size[0]} x {size[1]}, and is resized to cover {min_size[0]} x {min_size[1]}. Leave it out, or cut it.",
    )


def normalisation(data: DataConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of red, green and blue, of pixels between 0 and 1."""
    return tuple(data.mean or IMAGENET_DEFAULT_MEAN), tuple(data.std or IMAGENET_DEFAULT_STD)


def build_transform(data: DataConfig, is_training: bool, img_size: Size) -> Transform:
    """Build timm's transform from the knobs of the config.

    Args:
        data: The data group of the config.
        is_training: Random crop, flips and what the knobs ask for; else resize and centre crop.
        img_size: Height and width (Y, X) of the result, in pixels.

    Raises:
        ConfigError: timm refuses a knob.
    """
    try:
        return TrainTransform(data, img_size) if is_training else EvalTransform(data, img_size)
    except (AssertionError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"data.auto_augment={data.auto_augment}, data.interpolation={data.interpolation}, "
            f"data.crop_scale={list(data.crop_scale)}, data.crop_ratio={list(data.crop_ratio)} and "
            f"data.color_jitter={data.color_jitter} do not make a timm transform "
            f"({type(error).__name__}: {error or 'assertion failed'}). Use for example "
            f"data.auto_augment=rand-m9-mstd0.5-inc1 or null, data.interpolation=bicubic, data.crop_scale=[0.08,1.0]."
        ) from error


def apply(transform: Transform, image: Image.Image) -> Tensor:
    """Return the sample (3, Y, X) uint8 of an image that is decoded already."""
    crop = transform.crop(image.size)
    return transform.finish(image.crop(crop.box), crop)


class TrainTransform:
    """timm's training transform: random resized crop, flips, augmentation.

    Args:
        data: The data group of the config.
        img_size: Height and width (Y, X) in pixels.
    """

    def __init__(self, data: DataConfig, img_size: Size) -> None:
        mean, std = normalisation(data)
        primary, secondary, final = create_transform(
            (IN_CHANS, *img_size),
            is_training=True,
            separate=True,
            use_prefetcher=True,
            scale=tuple(data.crop_scale),
            ratio=tuple(data.crop_ratio),
            hflip=data.hflip,
            vflip=data.vflip,
            color_jitter=data.color_jitter or None,
            auto_augment=data.auto_augment,
            interpolation=data.interpolation,
            mean=mean,  # what a policy rotates or shifts into the image has this colour
            std=std,
        )
        self._crop, *flips = primary.transforms
        assert isinstance(self._crop, RandomResizedCropAndInterpolation), self._crop
        allow_no_bits_(secondary.transforms)
        self._rest = Compose([*flips, *secondary.transforms, *final.transforms])
        self._img_size = tuple(img_size)

    def crop(self, size: WidthHeight) -> Crop:
        """See Transform. Draws as timm's crop does: the box first, then the interpolation."""
        width, height = size
        stand_in = torch.empty(()).expand(IN_CHANS, height, width)  # one number: only its shape is read
        top, left, rows, columns = self._crop.get_params(stand_in, self._crop.scale, self._crop.ratio)
        chosen = self._crop.interpolation
        interpolation = random.choice(chosen) if isinstance(chosen, tuple | list) else chosen
        return Crop(Box(left, top, left + columns, top + rows), self._img_size[::-1], interpolation)

    def finish(self, image: Image.Image, crop: Crop) -> Tensor:
        """See Transform."""
        return self._rest(F.resize(image, self._img_size, crop.interpolation))


class EvalTransform:
    """timm's evaluation transform: resize, then the centre.

    Args:
        data: The data group of the config.
        img_size: Height and width (Y, X) in pixels.
    """

    def __init__(self, data: DataConfig, img_size: Size) -> None:
        mean, std = normalisation(data)
        self._all = create_transform(
            (IN_CHANS, *img_size),
            use_prefetcher=True,
            crop_pct=data.eval_crop,
            # timm's "random" picks one for each training image; an evaluation needs one of them
            interpolation="bicubic" if data.interpolation == "random" else data.interpolation,
            mean=mean,
            std=std,
        )
        # a number where the image is square: the shorter side; else (Y, X), which the image comes to cover
        size = self._all.transforms[0].size
        self._min_size = (size, size) if isinstance(size, int) else tuple(size)[::-1]

    def crop(self, size: WidthHeight) -> Crop:
        """See Transform. The whole picture: what is cut away is cut away after resizing.

        Raises:
            DataError: It is so long that it would be resized to more pixels than PIL decodes.
        """
        require_resizable(size, self._min_size)
        return Crop(whole(size), self._min_size, None)

    def finish(self, image: Image.Image, crop: Crop) -> Tensor:
        """See Transform."""
        return self._all(image)
