"""How are images and videos read from WebDataset shards?

    train-000000.tar    0001.jpg  0001.cls  0002.jpg  0002.cls  ...      .cls: the class as text, 0 .. K - 1

A sample is what has one key; of its members the first image (or video) and .cls are read, others are passed over. What
lacks one of the two, or has a class that is no number of that range, is unreadable and replaced like a broken file.

Does not know: how pixels are decoded (images.py, clips.py), which sample is read when (streams.py).
"""

from __future__ import annotations

import io
import time
from bisect import bisect_right
from collections.abc import Generator, Iterator
from itertools import accumulate
from typing import BinaryIO, NamedTuple, Protocol

from torch import Tensor

from vit_tp.config import DataConfig
from vit_tp.data.clips import ClipPipeline, require_clips
from vit_tp.data.deadline import DecodeTimeout, each_within
from vit_tp.data.faults import NOT_THE_FILE, reason_of
from vit_tp.data.folders import SPLITS
from vit_tp.data.images import ImagePipeline
from vit_tp.data.order import SampleKey
from vit_tp.data.shards import LABEL, Survey, number_of, survey
from vit_tp.data.spec import DataSpec, Form, Sample, Unreadable
from vit_tp.data.tar_members import BROKEN, Member, NoEnd, finish, group_members, opened, require_webdataset, stop
from vit_tp.data.transforms import IN_CHANS, normalisation
from vit_tp.errors import ConfigError, DataError

MAX_CLASSES = 10_000_000
IMAGES = frozenset({"jpg", "jpeg", "jpe", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "jp2", "avif"})
VIDEOS = frozenset({"mp4", "m4v", "mov", "mkv", "webm", "avi", "mpg", "mpeg", "wmv", "flv", "ogv", "3gp", "ts"})
_TOLD_S = 0.5  # from one sign of life to the next, while samples are passed over


class Pipeline(Protocol):
    """What turns an encoded image or video into pixels."""

    views: int

    def load(self, file: BinaryIO, key: SampleKey) -> Tensor:
        """Return pixels (3, Y, X), (3, T, Y, X) or (V, 3, T, Y, X), uint8."""


class Encoded(NamedTuple):
    """A sample as it lies in a tar.

    Args:
        name: Shard and member, for a person.
        payload: The file.
        label: Its class.
    """

    name: str
    payload: bytes
    label: int


class NamedBytes(io.BytesIO):
    """A file in memory that decoders can name in their complaints, as they name a path."""

    def __init__(self, payload: bytes, name: str) -> None:
        super().__init__(payload)
        self.name = name

    def __repr__(self) -> str:
        return self.name


def describe_image_tars(data: DataConfig) -> DataSpec:
    """Return the sizes of shards of images; see `_describe`."""
    for split in SPLITS:
        ImagePipeline(data, Form(split, 0, (32, 32)))  # timm parses its policy strings here, whatever the size
    return _describe(data, is_video=False)


def describe_video_tars(data: DataConfig) -> DataSpec:
    """Return the sizes of shards of videos; see `_describe`."""
    require_clips(data)
    return _describe(data, is_video=True)


class Tars:
    """One split of a set of shards, each read from front to back.

    Args:
        data: The data group of the config.
        form: Which split, and what its samples are to look like.
        pipeline: Decodes and augments.
        suffixes: Of the members that it can decode, in lower case.
    """

    in_chans = IN_CHANS

    def __init__(self, data: DataConfig, form: Form, pipeline: Pipeline, suffixes: frozenset[str]) -> None:
        require_webdataset(data.source)
        self.form, self.views = form, pipeline.views
        self._timeout_s = data.timeout_s
        self.num_streams, self.shuffle_window = data.num_streams, data.shuffle_window
        shards = survey(data, form.split).shards
        self.shard_sizes = tuple(shard.counted.samples for shard in shards)
        self._places = [(shard.name, shard.url) for shard in shards]
        self._ends = list(accumulate(self.shard_sizes))
        self._pipeline, self._suffixes, self._num_classes = pipeline, suffixes, data.num_classes

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._ends[-1]

    def fetch(self, shard: int, first: int, last: int) -> Iterator[Encoded | Unreadable]:
        """Yield what lies at places first <= place < last of a shard, in order.

        What breaks off, or brings nothing for data.timeout_s, is opened again where it broke, as long as that leads
        on; the places after that are Unreadable.
        """
        place, reason = first, ""
        while place < last:
            begun, reason = place, ""
            streams: list[BinaryIO] = []
            try:
                for sample in each_within(self._timeout_s, self._read(shard, place, last, streams)):
                    if sample is not None:
                        place += 1
                        yield sample
            except DecodeTimeout:
                reason = f"the shard breaks off (nothing came for data.timeout_s={self._timeout_s:g})"
                for stream in streams:
                    stop(stream)
            except (*BROKEN, OSError) as error:
                reason = f"the shard breaks off ({reason_of(error)})"
            if place == begun:
                break
        for _ in range(place, last):
            yield Unreadable(reason or f"the shard ends before place {place}")

    def _read(
        self, shard: int, first: int, last: int, streams: list[BinaryIO]
    ) -> Generator[Encoded | Unreadable | None, None, None]:
        """Yield the same from one opening, and None now and then on the way there; what is open goes to `streams`."""
        name, url = self._places[shard]
        place, told, broken = 0, time.monotonic(), None
        with opened(url) as stream:
            streams.append(stream)
            try:
                for key, members in group_members(stream):
                    if place >= first:
                        yield self._sample(f"{name}:{key}", members)
                    elif time.monotonic() - told > _TOLD_S:
                        yield None
                        told = time.monotonic()
                    place += 1
                    if place == last:
                        return
            except BROKEN as error:
                broken = error
            finish(stream)  # if the program that brings it has failed, that is the reason
            if broken is not None:
                raise broken

    def decode(self, raw: Encoded, key: SampleKey) -> Sample:
        """Return the pixels and the class of a sample.

        Raises:
            DataError: It cannot be decoded; with its name in the shard.
        """
        try:
            return Sample(self._pipeline.load(NamedBytes(raw.payload, raw.name), key), raw.label)
        except NOT_THE_FILE:
            raise
        except Exception as error:
            if raw.name in str(error):
                raise
            raise DataError(f"{raw.name}: {reason_of(error)}") from error

    def name(self, index: int) -> str:
        """Return shard and place of a sample."""
        shard = bisect_right(self._ends, index)
        return f"{self._places[shard][0]}:{index - self._ends[shard] + self.shard_sizes[shard]}"

    def _sample(self, name: str, members: Iterator[Member]) -> Encoded | Unreadable:
        media = label = None
        seen: set[str] = set()
        try:
            for member in members:
                if member.suffix in seen:
                    return Unreadable(f"{name} has two members .{member.suffix}")
                seen.add(member.suffix)
                if member.suffix == LABEL:
                    label = member.read()
                elif member.suffix in self._suffixes and media is None:
                    media = (f"{name}.{member.suffix}", member.read())
        except NoEnd:
            if media is None or label is None:
                raise  # the rest of it is lost
        if media is None or label is None:
            lacking = f"no .{LABEL}" if label is None else "no image" if "jpg" in self._suffixes else "no video"
            return Unreadable(f"{name} has {lacking} (it has {', '.join(sorted(seen))})")
        number = number_of(label)
        if number is None:
            return Unreadable(f"{name}.{LABEL} is not a whole number")
        if number < 0 or (self._num_classes is not None and number >= self._num_classes):
            return Unreadable(f"{name}.{LABEL} is {number}, and classes are 0 .. data.num_classes - 1")
        return Encoded(*media, number)


class ImageTars(Tars):
    """One split of shards of images.

    Args:
        data: The data group of the config.
        form: Which split, and what its samples are to look like.
    """

    def __init__(self, data: DataConfig, form: Form) -> None:
        super().__init__(data, form, ImagePipeline(data, form), IMAGES)


class VideoTars(Tars):
    """One split of shards of videos.

    Args:
        data: The data group of the config.
        form: Which split, and what its samples are to look like.
    """

    def __init__(self, data: DataConfig, form: Form) -> None:
        super().__init__(data, form, ClipPipeline(data, form), VIDEOS)


def _describe(data: DataConfig, is_video: bool) -> DataSpec:
    """Count samples and classes without decoding anything.

    Args:
        data: The data group of the config.
        is_video: Whether the samples are videos.

    Raises:
        ConfigError: WebDataset is missing, or a knob of the group cannot work.
        DataError: There are no shards, or nothing in them.
    """
    require_webdataset(data.source)
    train, val = survey(data, "train"), survey(data, "val")
    num_train, num_val = (sum(shard.counted.samples for shard in split.shards) for split in (train, val))
    return DataSpec(
        num_train,
        num_val,
        _num_classes(data, train, val),
        IN_CHANS,
        *normalisation(data),
        is_video,
        (*train.notes, *val.notes),
    )


def _num_classes(data: DataConfig, *splits: Survey) -> int:
    shards = [shard for split in splits for shard in split.shards]
    unknown = [shard.name for shard in shards if shard.counted.highest_label is None]
    highest, name = max(((shard.counted.highest_label or 0, shard.name) for shard in shards), default=(-1, ""))
    if data.num_classes is not None:
        if highest >= data.num_classes:
            raise ConfigError(
                f"data.num_classes={data.num_classes}, but {name} has a sample of class {highest}; the model would "
                f"have no output for it. Use data.num_classes={highest + 1} or more."
            )
        return data.num_classes
    if unknown:
        raise ConfigError(
            f"data.num_classes is not set, and of {len(unknown)} shards ({', '.join(unknown[:3])}, ...) only the sizes "
            f"are known, from sizes.json; their labels would have to be read. Use data.num_classes=<number of classes>."
        )
    if highest >= MAX_CLASSES:
        raise DataError(
            f"{name} has a sample of class {highest}, which is hardly one of {highest + 1} classes. Repair its "
            f".{LABEL}, or use data.num_classes=<number of classes>."
        )
    if highest < 0:
        raise DataError(
            f"none of the {len(shards)} shards in data.root={data.root} has a sample with a class; it is read from a "
            f"member .{LABEL} that holds a number. Use shards with labels."
        )
    return highest + 1
