"""How does torchcodec read a video?

With an exact index of the file's packets, which it makes when the file is opened, and by the times of frames.

Does not know: the rule (decode.py), which its own agrees with between the first and the last frame.
Source: torchcodec 0.17, torchcodec/decoders/_video_decoder.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
from torch import OutOfMemoryError, Tensor

from vit_tp.data.decode import refuse
from vit_tp.data.frames import Span, goes_on_after, span_of_frames
from vit_tp.errors import DataError

# Frames that are asked for at once: it returns whole arrays, and videos may be large.
_BLOCK = 4


class TorchcodecReader:
    """A file that torchcodec decodes, with one thread.

    Args:
        file: Its path, or its bytes in a file that can seek.
        device: "cpu" or "cuda".
    """

    def __init__(self, file: str | os.PathLike | BinaryIO, device: str) -> None:
        from torchcodec.decoders import VideoDecoder

        if hasattr(file, "read"):
            file.seek(0)
        else:
            file = f"file:{os.fspath(file)}"  # a colon in a name is no protocol
        with explained():
            self._decoder = VideoDecoder(
                file, dimension_order="NHWC", num_ffmpeg_threads=1, device=device, seek_mode="exact"
            )
            self.span = self._measure()

    def _measure(self) -> Span:
        """Return when the video is on display: by the header if that says it, otherwise by the packets."""
        known = self._decoder.metadata
        start, length = known.begin_stream_seconds_from_header, known.duration_seconds_from_header
        if start is not None and length and known.num_frames_from_header:
            # Its rate of the header is the finest that the times allow, not their mean.
            span = Span(start, start + length, known.num_frames / length)
            if not goes_on_after(span, known.end_stream_seconds) or not goes_on_after(span, self._last_time()):
                return span
        return span_of_frames(known.begin_stream_seconds, self._last_time(), known.num_frames)

    def _last_time(self) -> float:
        """Return the time of the last frame. At a constant rate it need not be decoded for that."""
        known = self._decoder.metadata
        begin, end, rate = known.begin_stream_seconds, known.end_stream_seconds, known.average_fps_from_header
        missing = known.num_frames - (end - begin) * rate if rate else 0.5
        if abs(missing) < 0.25:
            return end - 1 / rate
        if abs(missing - 1) < 0.25:  # its packet has no duration
            return end
        return self._decoder.get_frames_at([known.num_frames - 1]).pts_seconds.item()

    def shown(self, times: Sequence[float]) -> Iterator[np.ndarray]:
        """Yield the frame on display at each of some ascending times."""
        for first in range(0, len(times), _BLOCK):
            with explained():
                block = self._block(times[first : first + _BLOCK])
            yield from block

    def _block(self, times: Sequence[float]) -> np.ndarray:
        """Return (B, Y, X, 3). It refuses times before the first frame and after the last."""
        known = self._decoder.metadata
        last = known.num_frames - 1
        inside = [time for time in times if known.begin_stream_seconds <= time < known.end_stream_seconds]
        num_before = sum(time < known.begin_stream_seconds for time in times)
        num_after = len(times) - num_before - len(inside)
        # In this order: it has been seen to return stale frames where it was to go back (its issue 1339).
        parts = [self._decoder.get_frames_at([0]).data.expand(num_before, -1, -1, -1)] if num_before else []
        parts += [self._played_at(inside)] if inside else []
        parts += [self._decoder.get_frames_at([last]).data.expand(num_after, -1, -1, -1)] if num_after else []
        arrays = [part.cpu().numpy() for part in parts]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def _played_at(self, times: list[float]) -> Tensor:
        frames = self._decoder.get_frames_played_at(times)
        for asked, found in zip(times, frames.pts_seconds.tolist()):
            if found > asked:  # seen of AVI with B-frames, after a seek
                raise refuse(
                    f"torchcodec takes the frame of {found:.3f} s for the one on display at {asked:.3f} s, as it does "
                    f"where a file has no index that it can use. Use data.decoder=pyav"
                )
        return frames.data

    def close(self) -> None:
        """Let go of the file: it is closed with the decoder."""
        del self._decoder


@contextmanager
def explained() -> Iterator[None]:
    """Say about whatever torchcodec raises that the file cannot be read."""
    try:
        yield
    except (DataError, OutOfMemoryError):  # of the device: no fault of the file
        raise
    except (RuntimeError, ValueError, IndexError, OSError) as error:
        text = " ".join(str(error).split())
        if "best video stream is unknown" in text:
            raise refuse("it holds no video stream") from error
        # It begins with a place in its source, and may end with advice to report a bug.
        raise refuse(re.sub(r"^.*\.cpp:\d+, ", "", text)[:200]) from error
