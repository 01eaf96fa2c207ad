"""Which frame of a video is on display at a moment?

The last one whose time is at or before the moment; the first one before that, and the last one for ever after. Times
are those that the file gives its frames, in seconds, not a count of frames at some rate: that is the one rule, for
files of a variable rate and files that do not begin at 0 too, and it does not depend on who decodes. There are two
decoders, PyAV (extra `video`) and torchcodec (extra `torchcodec`, which also needs FFmpeg's libraries on the machine).
Neither is imported before a video is to be read. Files are opened for each reading and closed after it.

Does not know: clips, which moments are wanted (frames.py), augmentation.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import BinaryIO, Protocol

import numpy as np

from vit_tp.data.frames import Span
from vit_tp.errors import ConfigError, DataError

PYAV, TORCHCODEC = "pyav", "torchcodec"
# A moment that is computed, such as the middle of a part, may miss the time of a frame by a rounding.
ROUNDING_S = 1e-6


class Reader(Protocol):
    """A decoder at work on one file.

    Attributes:
        span: When the video is on display: what the file's header says where it says all of it, otherwise what its
            packets say.
    """

    span: Span

    def shown(self, times: Sequence[float]) -> Iterator[np.ndarray]:
        """Yield the frame (Y, X, 3) uint8 on display at each of some ascending times, upright."""

    def close(self) -> None:
        """Let go of the file."""


class Video:
    """A video that is open.

    Args:
        reader: Who decodes it.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.span = reader.span

    def frames(self, times: Sequence[float]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each time's place in `times` and the frame (Y, X, 3) uint8 that is on display then, earliest first.

        Args:
            times: In seconds, in any order, T of them.

        Raises:
            DataError: The file cannot be decoded up to there.
        """
        order = sorted(range(len(times)), key=times.__getitem__)
        shown = self._reader.shown([times[place] + ROUNDING_S for place in order]) if order else ()
        yield from zip(order, shown, strict=True)


@contextmanager
def open_video(file: str | os.PathLike | BinaryIO, decoder: str, device: str = "cpu") -> Iterator[Video]:
    """Open a video for the length of a with statement.

    Args:
        file: Its path, or its bytes in a file that can seek.
        decoder: "pyav" or "torchcodec"; see choose_decoder.
        device: Where torchcodec decodes: "cpu" or "cuda". Frames come to lie on the CPU.

    Raises:
        DataError: It is no video, or cannot be decoded.
    """
    if decoder == TORCHCODEC:
        from vit_tp.data.decode_torchcodec import TorchcodecReader

        reader: Reader = TorchcodecReader(file, device)
    else:
        from vit_tp.data.decode_pyav import PyAVReader

        reader = PyAVReader(file)
    try:
        yield Video(reader)
    finally:
        reader.close()


def choose_decoder(decoder: str, device: str) -> str:
    """Return which decoder data.decoder means on this machine.

    Args:
        decoder: data.decoder: "auto", "pyav" or "torchcodec".
        device: data.decoder_device: "cpu" or "cuda".

    Raises:
        ConfigError: It cannot be used here; install the extra that the sentence names.
    """
    if device != "cpu" and decoder == PYAV:
        raise ConfigError(
            f"data.decoder=pyav does not decode on data.decoder_device={device}; only torchcodec does. "
            f"Use data.decoder_device=cpu or data.decoder=torchcodec."
        )
    without_torchcodec = None if decoder == PYAV else torchcodec_problem()
    if decoder != PYAV and without_torchcodec is None:
        return TORCHCODEC
    if decoder == TORCHCODEC or device != "cpu":
        raise ConfigError(
            f"data.decoder={decoder} on data.decoder_device={device} needs torchcodec, which cannot be used here "
            f"({without_torchcodec}). Run pip install 'vit-tp[torchcodec]' and install FFmpeg (its shared libraries), "
            f"or use data.decoder=pyav data.decoder_device=cpu."
        )
    if importlib.util.find_spec("av") is not None:
        return PYAV
    also = "" if without_torchcodec is None else f" and torchcodec cannot be used either ({without_torchcodec})"
    raise ConfigError(
        f"data.decoder={decoder} finds nothing that decodes videos: PyAV is not installed{also}. "
        f"Run pip install 'vit-tp[video]', or pip install 'vit-tp[torchcodec]' where FFmpeg is installed."
    )


@cache
def torchcodec_problem() -> str | None:
    """Say in a few words why torchcodec cannot be used; None where it can."""
    if importlib.util.find_spec("torchcodec") is None:
        return "it is not installed"
    try:
        from torchcodec.decoders import VideoDecoder, VideoStreamMetadata
    except Exception as error:
        return _why_not(error)
    if "rotation" not in {field.name for field in fields(VideoStreamMetadata)}:
        return "versions before 0.11 do not turn videos upright"
    try:
        VideoDecoder(b"no video")  # since 0.17 FFmpeg's libraries are loaded by the first decoder, not by the import
    except Exception as error:
        return _why_not(error) if "libtorchcodec" in str(error) else None
    return None


def _why_not(error: Exception) -> str:
    if "libtorchcodec" in str(error):  # pages of attempts with each version of FFmpeg
        return "it finds no FFmpeg libraries that it can load"
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def decoder_version(decoder: str) -> str:
    """Return what decodes, and its versions, for the record of a run.

    Args:
        decoder: "pyav" or "torchcodec".
    """
    if decoder == TORCHCODEC:
        import torchcodec

        torchcodec_problem()  # loads FFmpeg's libraries, whose version is known from then on
        libraries = getattr(torchcodec, "ffmpeg_major_version", None)
        return f"torchcodec {torchcodec.__version__} (FFmpeg {libraries or 'of unknown version'})"
    import av

    return f"pyav {av.__version__} (FFmpeg {av.ffmpeg_version_info})"


def refuse(reason: str) -> DataError:
    """Return the error about a file that is no readable video; the reader's caller knows the path."""
    return DataError(f"not a video that can be read: {reason}")
