"""How does a file become the pixels of a sample?

    open      header: size                               under the deadline
    crop      drawn from the size alone                  under the sample's randomness
    read      the crop, at the smallest size that will do   under the deadline
    finish    resize, flip, augment: timm's              under the sample's randomness

Does not know: where files lie, labels, what becomes of pixels on the device.
"""

from __future__ import annotations

import os
from functools import partial
from typing import BinaryIO

from torch import Tensor

from vit_tp.config import DataConfig
from vit_tp.config.limits import NAMES
from vit_tp.data.boxes import Box, WidthHeight, inside, whole
from vit_tp.data.deadline import within
from vit_tp.data.order import SampleKey
from vit_tp.data.pictures import Picture, open_picture
from vit_tp.data.sampling import sample_randomness
from vit_tp.data.spec import Form, Size
from vit_tp.data.transforms import Transform, build_transform
from vit_tp.errors import ConfigError

REDUCED_DECODE = NAMES["data.reduced_decode"]


class ImagePipeline:
    """Reads and augments images of one split. It pickles, and holds no open file.

    Args:
        data: The data group of the config.
        form: What the images are to look like.

    Raises:
        ConfigError: A knob of the augmentation cannot work.
    """

    views = 1

    def __init__(self, data: DataConfig, form: Form) -> None:
        if data.reduced_decode not in REDUCED_DECODE:
            raise ConfigError(
                f"data.reduced_decode={data.reduced_decode} does not say when large JPEGs may be decoded at a fraction "
                f"of their size; it is one of {', '.join(REDUCED_DECODE)}. Use data.reduced_decode=train."
            )
        self._data, self._form = data, form
        self._is_reduced = data.reduced_decode == "always" or (data.reduced_decode == "train" and form.is_training)
        self._transforms: dict[Size, Transform] = {}
        self._transform(form.img_size)  # what timm refuses, it refuses before any image is read

    def load(self, file: str | os.PathLike | BinaryIO, key: SampleKey, window: Box | None = None) -> Tensor:
        """Read and augment one image.

        Args:
            file: Path, or a file open for reading; that one is left open.
            key: The sample; decides the size and all that is random.
            window: The part of the picture that is the image; None for all of it.

        Returns:
            (3, Y, X) uint8.

        Raises:
            DecodeTimeout: Opening or decoding it took longer than data.timeout_s.
            Exception: Whatever reading it raises.
        """
        picture: Picture = within(self._data.timeout_s, partial(open_picture, file, self._is_reduced))
        window = window or whole(picture.size)
        transform = self._transform(self._form.size_at(key.epoch))
        if not self._form.is_training:
            return self._finished(transform, picture, window)
        with sample_randomness(self._form.seed, key):
            return self._finished(transform, picture, window)

    def _finished(self, transform: Transform, picture: Picture, window: Box) -> Tensor:
        crop = transform.crop((window.width, window.height))
        # The thread that reads closes: closing from here would wait for a thread that is stuck in the file.
        read = partial(picture.read, inside(window, crop.box), crop.min_size)
        return transform.finish(within(self._data.timeout_s, read), crop)

    def _transform(self, size: Size) -> Transform:
        if size not in self._transforms:
            self._transforms[size] = build_transform(self._data, self._form.is_training, size)
        return self._transforms[size]


def picture_size(file: str | os.PathLike, timeout_s: float | None) -> WidthHeight:
    """Return width and height of a picture in pixels, from its header.

    Raises:
        Exception: The header cannot be read, or not in time.
    """

    def read_header() -> WidthHeight:
        picture = open_picture(file)
        picture.close()
        return picture.size

    return within(timeout_s, read_header)
