"""How does a video become a clip?

    places    drawn                                     under the sample's randomness
    open      header: span, and so the moments          under the deadline
    decode    one frame                                 under the deadline
    transform that frame, in training as all others     under the sample's randomness, begun anew for each

Nothing random happens within the deadline: a decoder that was given up may come back at any time. Frames are made small
one by one as they are decoded, so that long clips and many views of a large video need little memory.

Does not know: where videos come from, classes, batches.
"""

from __future__ import annotations

import os
import random
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vit_tp.config import DataConfig
from vit_tp.data.clip_transforms import FrameTransform, build_frame_transform
from vit_tp.data.deadline import each_within
from vit_tp.data.decode import choose_decoder, open_video
from vit_tp.data.frames import Places, clip_times, drawn_places, eval_places
from vit_tp.data.order import SampleKey
from vit_tp.data.sampling import sample_randomness
from vit_tp.data.spec import Form, Size
from vit_tp.errors import ConfigError


def require_clips(data: DataConfig) -> None:
    """Refuse what would keep every clip from being made, before anything is read.

    Args:
        data: The data group of the config.

    Raises:
        ConfigError: No decoder can be used, or timm refuses an augmentation knob.
    """
    complaints = []
    if data.eval_crops not in (1, 3):
        complaints.append(
            f"data.eval_crops={data.eval_crops} is neither 1 nor 3; there is one crop in the middle, or one at each "
            f"end too. Use data.eval_crops=1 or data.eval_crops=3."
        )
    if data.decoder_device != "cpu" and data.num_workers > 0:
        complaints.append(
            f"data.decoder_device={data.decoder_device} with data.num_workers={data.num_workers} cannot work; loader "
            f"processes are forks, in which CUDA does not start. Use data.num_workers=0 or data.decoder_device=cpu."
        )
    for ask in (
        lambda: choose_decoder(data.decoder, data.decoder_device),
        lambda: build_frame_transform(data, True, (32, 32)),  # timm parses its policy strings here, whatever the size
        lambda: build_frame_transform(data, False, (32, 32)),
    ):
        try:
            ask()
        except ConfigError as error:
            complaints += [complaint for complaint in error.complaints if complaint not in complaints]
    if complaints:
        raise ConfigError(complaints)


class ClipPipeline:
    """Reads clips from videos.

    Args:
        data: The data group of the config.
        form: What the clips are to look like.

    Attributes:
        views: Clips times crops that one video makes in evaluation; 1 in training.
        decoder: Which one reads, "pyav" or "torchcodec".

    Raises:
        ConfigError: Samples are to be images, or no decoder can be used.
    """

    def __init__(self, data: DataConfig, form: Form) -> None:
        if form.num_frames is None:
            raise ConfigError(
                f"data.source={data.source} gives clips, but model.video.num_frames=null asks for images; frames of a "
                f"clip need a model that takes them. Use for example model.video.num_frames=16."
            )
        self.data, self.form, self.num_frames = data, form, form.num_frames
        self.views = 1 if form.is_training else data.eval_clips * data.eval_crops
        self.decoder = choose_decoder(data.decoder, data.decoder_device)
        self._transforms: dict[Size, FrameTransform] = {}

    def load(self, file: str | os.PathLike | BinaryIO, key: SampleKey) -> Tensor:
        """Read one video and make its clip.

        Args:
            file: Its path, or its bytes in a file that can seek.
            key: The sample; in training it decides moments and augmentation.

        Returns:
            (3, T, Y, X) uint8; (V, 3, T, Y, X) with more than one view, the crops of the first clip first.

        Raises:
            DataError: It is no video, or cannot be decoded.
            DecodeTimeout: Decoding took longer than data.timeout_s for a frame, or for each clip on average.
        """
        transform = self._transform(self.form.size_at(key.epoch))
        clips: list[Places] = eval_places(self.data, self.num_frames)
        if self.form.is_training:
            with sample_randomness(self.form.seed, key):
                # A stream of its own: the transform begins the outer one anew.
                clips = [drawn_places(self.data, self.num_frames, random.Random(random.getrandbits(64)).random)]
        views: np.ndarray | None = None
        for place, frame in self._frames(file, clips):
            # All frames of a clip see the same random numbers, whatever they show.
            with sample_randomness(self.form.seed, key) if self.form.is_training else nullcontext():
                pixels = transform(Image.fromarray(frame))  # (3, Y, X), or (crops, 3, Y, X)
            if views is None:
                crops = self.views // len(clips)
                views = np.empty((len(clips), crops, 3, self.num_frames, *pixels.shape[-2:]), np.uint8)
            clip, index = divmod(place, self.num_frames)
            views[clip, :, :, index] = pixels.numpy()  # torch would wake its threads for each frame
        assert views is not None
        return torch.from_numpy(views).flatten(0, 1) if self.views > 1 else torch.from_numpy(views[0, 0])

    def _frames(self, file: str | os.PathLike | BinaryIO, clips: Sequence[Places]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each frame (Y, X, 3) of some clips and its place, clip * T + index, in the order of their times."""

        def decoded() -> Generator[tuple[int, np.ndarray], None, None]:
            with open_video(file, self.decoder, self.data.decoder_device) as video:
                times = [clip_times(self.data, video.span, self.num_frames, places) for places in clips]
                yield from video.frames(list(chain.from_iterable(times)))

        limit = self.data.timeout_s
        return each_within(limit, decoded(), None if limit is None else limit * len(clips))

    def _transform(self, size: Size) -> FrameTransform:
        if size not in self._transforms:
            self._transforms[size] = build_frame_transform(self.data, self.form.is_training, size)
        return self._transforms[size]
