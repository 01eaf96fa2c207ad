"""Which moments of a video make a clip?

    segments   the video in T equal parts, one moment of each: drawn in training, the middle in evaluation
               (Temporal Segment Networks, Wang et al., arXiv 1608.00859)
    dense      T frames, frame_stride apart at the video's mean rate, the first of them drawn in training

Everything random or chosen is a *place* between 0 and 1, made before the video is opened; the video's own times turn
places into moments. Arithmetic only.

Does not know: files, decoders, pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vit_tp.config import DataConfig


class Span(NamedTuple):
    """When a video is on display.

    Args:
        start_s: Time of its first frame, in seconds; need not be 0.
        end_s: Time at which its last frame ends.
        rate: Frames per second, on average.
    """

    start_s: float
    end_s: float
    rate: float


def span_of_frames(first_s: float, last_s: float, count: int) -> Span:
    """Return the span of a video whose frames are known: the last one lasts as long as the others on average.

    What files say about its own length is 0 in some containers, and depends on FFmpeg's version in others.

    Args:
        first_s: Time of the first frame, in seconds.
        last_s: Time of the last frame.
        count: Frames.
    """
    rate = (count - 1) / (last_s - first_s) if last_s > first_s else 1.0
    return Span(first_s, last_s + 1 / rate if last_s > first_s else last_s, rate)


def goes_on_after(span: Span, last_s: float) -> bool:
    """Say whether a header's span ends well before the last frame: some do, of a variable rate with B-frames.

    Args:
        span: What the header says.
        last_s: Time of the last frame, in seconds.
    """
    return last_s > span.end_s + 0.5 / span.rate


Places = tuple[float, ...]
"""For segments one place in each of T parts; for dense the place of the window, alone."""


def drawn_places(data: DataConfig, num_frames: int, draw: Callable[[], float]) -> Places:
    """Draw a clip for training.

    Args:
        data: The data group of the config; sampling is read.
        num_frames: Frames of the clip, T.
        draw: Returns another number of [0, 1) at each call.
    """
    return tuple(draw() for _ in range(num_frames if data.sampling == "segments" else 1))


def eval_places(data: DataConfig, num_frames: int) -> list[Places]:
    """Return the eval_clips clips of an evaluation.

    Of segments they are shifted within the parts, so that no two clips share a moment; of dense the windows begin at
    even distances, the first at the start and the last at the end. A single clip is the one in the middle.

    Args:
        data: The data group of the config; sampling and eval_clips are read.
        num_frames: Frames of a clip, T.
    """
    count = data.eval_clips
    if data.sampling == "segments":
        return [((clip + 0.5) / count,) * num_frames for clip in range(count)]
    return [(clip / (count - 1) if count > 1 else 0.5,) for clip in range(count)]


def clip_times(data: DataConfig, span: Span, num_frames: int, places: Places) -> list[float]:
    """Return the T moments of a clip, in seconds, ascending.

    Args:
        data: The data group of the config; sampling and frame_stride are read.
        span: The video.
        num_frames: Frames of the clip, T.
        places: What drawn_places or eval_places returned.
    """
    if data.sampling == "segments":
        return segment_times(span, places)
    [place] = places
    return dense_times(span, num_frames, data.frame_stride, place)


def segment_times(span: Span, places: Sequence[float]) -> list[float]:
    """Return one moment in each of T equal parts of [start, end).

    Args:
        span: The video.
        places: (T,) where in each part, in [0, 1).
    """
    length = (span.end_s - span.start_s) / len(places)
    return [span.start_s + (part + place) * length for part, place in enumerate(places)]


def dense_times(span: Span, num_frames: int, stride: int, place: float) -> list[float]:
    """Return T moments at a distance of `stride` frames.

    They are the middles of frames, as if all lasted equally long: of a video at a constant rate exactly every stride-th
    frame, whatever is rounded. In a video shorter than the window the last moments lie behind its end, where its last
    frame stays on display.

    Args:
        span: The video.
        num_frames: T.
        stride: Frames from one moment to the next.
        place: Which of the windows that fit, in [0, 1]: 0 the first, 1 the last.
    """
    available = round((span.end_s - span.start_s) * span.rate)
    windows = max(1, available - (num_frames - 1) * stride)
    first = min(int(place * windows), windows - 1)
    return [span.start_s + (first + index * stride + 0.5) / span.rate for index in range(num_frames)]
