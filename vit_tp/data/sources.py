"""Which data set does data.source name?

A plain table from names to the two functions that a data set consists of: one that tells its sizes quickly, before any
rank starts, and one that opens a split. Does not know: batches, ranks, the model.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

from vit_tp.config import DataConfig
from vit_tp.data.digits import Digits, describe_digits
from vit_tp.data.image_folder import ImageFolder, describe_image_folder
from vit_tp.data.moving_digits import MovingDigits, describe_moving_digits
from vit_tp.data.spec import DataSpec, Form, Source, StreamSource
from vit_tp.data.tars import ImageTars, VideoTars, describe_image_tars, describe_video_tars
from vit_tp.data.video_folder import VideoFolder, describe_video_folder
from vit_tp.errors import ConfigError

__all__ = ["SOURCES", "DataSpec", "Form", "Source", "SourceKind", "StreamSource", "build_source", "describe"]


class SourceKind(NamedTuple):
    """How a kind of data set is described and opened."""

    describe: Callable[[DataConfig], DataSpec]
    build: Callable[[DataConfig, Form], Source | StreamSource]


SOURCES: dict[str, SourceKind] = {
    "digits": SourceKind(describe_digits, Digits),
    "moving_digits": SourceKind(describe_moving_digits, MovingDigits),
    "image_folder": SourceKind(describe_image_folder, ImageFolder),
    "image_tars": SourceKind(describe_image_tars, ImageTars),
    "video_tars": SourceKind(describe_video_tars, VideoTars),
    "video_folder": SourceKind(describe_video_folder, VideoFolder),
}


def describe(data: DataConfig) -> DataSpec:
    """Return the sizes of the data set without reading a sample.

    Args:
        data: The data group of the config.

    Raises:
        ConfigError: A knob of the group cannot work; the sentence says what to type.
        DataError: The files are not as the source needs them; the sentence says which.
    """
    return _kind(data).describe(data)


def build_source(data: DataConfig, form: Form) -> Source | StreamSource:
    """Open one split.

    Args:
        data: The data group of the config.
        form: Which split, and what its samples are to look like.

    Raises:
        ConfigError: A knob of the group cannot work.
        DataError: The files are not as the source needs them.
    """
    assert form.split in ("train", "val"), form.split
    return _kind(data).build(data, form)


def _kind(data: DataConfig) -> SourceKind:
    if data.source not in SOURCES:
        near = difflib.get_close_matches(data.source, SOURCES, n=1) or sorted(SOURCES)
        raise ConfigError(
            f"data.source={data.source} is not a data set that vit_tp knows; it knows {', '.join(SOURCES)}. "
            f"Use data.source={' or data.source='.join(near)}."
        )
    return SOURCES[data.source]
