"""What must the rest of the package know about a data set?

Its sizes (DataSpec), what its samples are to look like (Form), and how one is asked for (Source, StreamSource). Does
not know: file formats, batches, ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from vit_tp.config.sizes import Size
from vit_tp.data.order import SampleKey


@dataclass(frozen=True)
class DataSpec:
    """Sizes of a data set, known before any sample is read.

    Args:
        num_train: Training samples.
        num_val: Validation samples.
        num_classes: Classes, K.
        in_chans: Channels of a pixel, C.
        mean: What is subtracted from each channel, of pixels between 0 and 1.
        std: What each channel is divided by then.
        is_video: Whether samples are clips.
        notes: Lines for a person, such as a shard that is cut short.
        class_names: Names of the classes in the order of their numbers; none where they are numbers only.
    """

    num_train: int
    num_val: int
    num_classes: int
    in_chans: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    is_video: bool = False
    notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """What the samples of a split are to look like.

    Args:
        split: "train", whose samples are augmented, or "val".
        seed: run.seed; with a sample's key it decides all that is random about the sample.
        img_size: Height and width (Y, X) in pixels.
        num_frames: Frames of a clip, T; None for images.
        schedule: (epoch, size) pairs, by epoch: from that epoch on the size is another one.
    """

    split: str
    seed: int
    img_size: Size
    num_frames: int | None = None
    schedule: tuple[tuple[int, Size], ...] = ()

    @property
    def is_training(self) -> bool:
        return self.split == "train"

    def size_at(self, epoch: int) -> Size:
        """Return the height and width of samples in an epoch."""
        begun = [size for first, size in self.schedule if first <= epoch]
        return begun[-1] if begun else self.img_size

    def shape_at(self, epoch: int, in_chans: int) -> tuple[int, ...]:
        """Return the shape (C, Y, X) or (C, T, Y, X) of samples in an epoch."""
        frames = () if self.num_frames is None else (self.num_frames,)
        return (in_chans, *frames, *self.size_at(epoch))


class Sample(NamedTuple):
    """What is fed to a model, before it is normalised.

    Args:
        pixels: (C, Y, X) or (C, T, Y, X), uint8; (V, ...) where evaluation looks at V views of it.
        label: Class, 0 .. K - 1.
    """

    pixels: Tensor
    label: int


class Source(Protocol):
    """One split whose samples can be asked for in any order. A sample depends on nothing but its key and the Form.

    Attributes:
        form: What its samples look like.
        in_chans: Channels, C.
        views: Rows that one sample makes: more than 1 only in the evaluation of videos.
    """

    form: Form
    in_chans: int
    views: int

    def __len__(self) -> int:
        """Return the number of samples."""

    def load(self, key: SampleKey) -> Sample:
        """Read and augment one sample.

        Raises:
            Exception: Whatever reading it raises; the loader replaces the sample and reports it.
        """

    def name(self, index: int) -> str:
        """Return what a person would look for when this sample is broken, for example its path."""


class Unreadable(NamedTuple):
    """What stands in the place of a sample that a stream could not find whole.

    Args:
        reason: Why.
    """

    reason: str


@runtime_checkable
class StreamSource(Protocol):
    """One split that lies in shards, each of which is read from front to back.

    Reading gives raw samples, of which a whole window is held; decoding comes later. Which places are read when is
    decided by streams.py.

    Attributes:
        form: What its samples look like.
        in_chans: Channels, C.
        views: Rows that one sample makes.
        shard_sizes: Samples of each shard. A sample's index is its place when the shards follow one another.
        num_streams: Streams that an epoch is read in; None: chosen by the batch.
        shuffle_window: Samples of a stream that are shuffled with one another.
    """

    form: Form
    in_chans: int
    views: int
    shard_sizes: tuple[int, ...]
    num_streams: int | None
    shuffle_window: int

    def __len__(self) -> int:
        """Return the number of samples."""

    def fetch(self, shard: int, first: int, last: int) -> Iterator[Any]:
        """Yield what is stored at places first <= place < last of a shard, in order: raw, or Unreadable."""

    def decode(self, raw: Any, key: SampleKey) -> Sample:
        """Decode and augment one raw sample; nothing but key and Form decides what is random about it.

        Raises:
            Exception: Whatever decoding it raises; the loader replaces the sample and reports it.
        """

    def name(self, index: int) -> str:
        """Return what a person would look for when this sample is broken."""
