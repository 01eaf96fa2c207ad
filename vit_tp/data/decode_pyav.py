"""How does PyAV read a video?

From the keyframe before the first moment that is wanted, forward, in one thread, past what no moment wants where the
file has a keyframe later on, and no further than the last moment.

Does not know: the rule for moments outside of the video and for roundings (decode.py).
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from vit_tp.data.decode import refuse
from vit_tp.data.frames import Span, goes_on_after, span_of_frames

# Some files end up behind the moment that they are asked to seek to; then so many seconds earlier.
_EARLIER_S = (0.0, 1.0, 5.0)
# A file without an end, or whose times never reach what its header promises, must not be read for ever.
_MOST_PACKETS = 2**21
_SLACK_FRAMES = 256
# A header may promise a little more than there is; what is missing beyond that has been cut off.
_SLACK_S = 0.5
# Packets at the end of a file of which one is displayed last: no codec moves a frame past more than 16 others.
_LAST_PACKETS = 18


class _Moment(NamedTuple):
    """A decoded frame and when it comes on display, in seconds."""

    seconds: float
    frame: Any


class PyAVReader:
    """A file that PyAV decodes.

    Args:
        file: Its path, or its bytes in a file that can seek.
    """

    def __init__(self, file: str | os.PathLike | BinaryIO) -> None:
        import av
        from av.video.reformatter import VideoReformatter

        self._av, self._reformatter = av, VideoReformatter()
        self._file = file if hasattr(file, "read") else f"file:{os.fspath(file)}"  # a colon in a name is no protocol
        self._container: Any = None
        self._keyframes: list[float] | None = None  # their times, where the packets had to be looked at
        self._frame_size: tuple[int, int] | None = None
        try:
            with self._explained():
                self._open()
                self.span, self._num_frames = self._measure()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the file."""
        if self._container is not None:
            self._container.close()
            self._container = None

    def _open(self) -> None:
        self.close()
        if hasattr(self._file, "read"):
            self._file.seek(0)
        self._container = self._av.open(self._file, metadata_errors="replace")  # titles come in any encoding
        streams = [stream for stream in self._container.streams.video if not _is_cover(stream)]
        if not streams:
            kinds = sorted({stream.type for stream in self._container.streams})
            raise refuse(f"it holds no video stream, only {', '.join(kinds) or 'nothing'}")
        self._stream = self._container.streams.best("video") if len(streams) > 1 else streams[0]
        self._stream.thread_type = "NONE"
        self._stream.codec_context.thread_count = 1
        self._is_at_start = True

    def _measure(self) -> tuple[Span, int]:
        """Return when the video is on display, and how many frames it has."""
        stream = self._stream
        if stream.start_time is not None and stream.duration and stream.frames:
            start, length = (float(ticks * stream.time_base) for ticks in (stream.start_time, stream.duration))
            span = Span(start, start + length, self._count(start + length) / length)
            if not goes_on_after(span, self._last_time()):
                self._has_promised = True
                return span, stream.frames
            self._open()
        self._has_promised = False
        return self._scan()

    def _count(self, end_s: float) -> int:
        """Return how many frames are displayed until the header's end."""
        stream, entries = self._stream, self._stream.index_entries
        if not len(entries):
            return stream.frames
        first, last = entries[0], entries[len(entries) - 1]
        is_whole = float(last.timestamp * stream.time_base) + _SLACK_S > end_s  # that of an AVI comes at its end
        # What an editor has cut off at the front is counted in the header, and so are gaps in an AVI.
        if first.is_discard or last.is_discard or (is_whole and len(entries) != stream.frames):
            return max(1, sum(not entry.is_discard for entry in entries))
        return stream.frames

    def _last_time(self) -> float:
        """Return the time of the last frame; minus infinity where its packet cannot be looked at alone."""
        stream, last = self._stream, -math.inf
        if not len(entries := stream.index_entries):
            return last
        self._is_at_start = False
        try:
            begin = entries[max(0, len(entries) - _LAST_PACKETS)].timestamp
            self._container.seek(begin, stream=stream, any_frame=True)
            for packet in self._container.demux(stream):
                if (ticks := _ticks(packet)) is not None and not packet.is_discard:
                    last = max(last, float(ticks * stream.time_base))
        except self._av.error.FFmpegError:  # it is not there: see _refuse_a_stump
            pass
        return last

    def _scan(self) -> tuple[Span, int]:
        """Return the same as _measure, from all packets of the file."""
        first, last, count, self._keyframes = math.inf, -math.inf, 0, []
        for packet in self._container.demux(self._stream):
            if (ticks := _ticks(packet)) is None or packet.is_discard:
                continue
            seconds = float(ticks * self._stream.time_base)
            first, last, count = min(first, seconds), max(last, seconds), count + 1
            if packet.is_keyframe:
                self._keyframes.append(seconds)
            if count > _MOST_PACKETS:
                raise refuse(f"its header gives no length, and {_MOST_PACKETS} packets are not all of it")
        if not count:
            raise refuse("its video stream holds no frame with a time")
        self._keyframes.sort()
        self._open()
        return span_of_frames(first, last, count), count

    def shown(self, times: Sequence[float]) -> Iterator[np.ndarray]:
        """Yield the frame on display at each of some ascending times."""
        waiting = list(reversed(times))
        with self._explained():
            while waiting:
                # A round ends where decoding on would only lead to the next keyframe.
                yield from self._shown_in_one_run(waiting)

    def _shown_in_one_run(self, waiting: list[float]) -> Iterator[np.ndarray]:
        """Yield the frames of a run of moments, and take these from the end of `waiting`."""
        shown, pixels = None, None
        for moment in self._decoded_from(waiting[-1]):
            has_answered = False
            while waiting and shown is not None and moment.seconds > waiting[-1]:
                pixels = self._pixels(shown.frame) if pixels is None else pixels
                waiting.pop()
                yield pixels
                has_answered = True
            if not waiting or (has_answered and self._last_keyframe(waiting[-1]) > moment.seconds):
                return
            shown, pixels = moment, None
        if shown is None:
            raise refuse("none of its frames can be decoded")
        self._refuse_a_stump(shown, waiting[0])
        pixels = self._pixels(shown.frame)
        while waiting:
            waiting.pop()
            yield pixels

    def _decoded_from(self, seconds: float) -> Iterator[_Moment]:
        """Yield frames in order, the first of them no later than asked, or the first of all."""
        for earlier in _EARLIER_S:
            target = seconds - earlier
            if target <= self.span.start_s:
                break
            try:
                self._container.seek(int(target / self._stream.time_base), stream=self._stream)
            except self._av.error.FFmpegError:  # not every file can
                break
            self._is_at_start = False
            frames = self._decoded(is_after_seek=True)
            head = next(frames, None)
            if head is not None and head.seconds <= seconds:
                yield head
                yield from frames
                return
        if not self._is_at_start:
            self._open()
        self._is_at_start = False
        yield from self._decoded(is_after_seek=False)

    def _decoded(self, is_after_seek: bool) -> Iterator[_Moment]:
        # After a seek the packets before the first keyframe, and the frames that are displayed before it, want
        # others that were passed over.
        begin = math.inf if is_after_seek else -math.inf
        most = 2 * self._num_frames + _SLACK_FRAMES
        count = 0
        for packet in self._container.demux(self._stream):
            if begin == math.inf and packet.size:
                if not packet.is_keyframe or (ticks := _ticks(packet)) is None:
                    continue
                begin = float(ticks * self._stream.time_base)
            for frame in packet.decode():
                count += 1
                if count > most:
                    raise refuse(f"{count} frames were decoded where about {self._num_frames} were to be expected")
                if (ticks := _ticks(frame)) is None:
                    raise refuse("its frames have no times")
                if (seconds := float(ticks * self._stream.time_base)) >= begin:
                    yield _Moment(seconds, frame)

    def _last_keyframe(self, seconds: float) -> float:
        """Return the time of a keyframe at or before some time; minus infinity where none is known."""
        if self._keyframes is not None:
            place = bisect_right(self._keyframes, seconds)
            return self._keyframes[place - 1] if place else -math.inf
        entries = self._stream.index_entries
        place = entries.search_timestamp(int(seconds / self._stream.time_base)) if len(entries) else -1
        # The index holds times of decoding, which are never later than those of display.
        return float(entries[place].timestamp * self._stream.time_base) if place >= 0 else -math.inf

    def _refuse_a_stump(self, last: _Moment, wanted: float) -> None:
        """Raise unless the file goes on for about as long as its header says."""
        end = last.seconds + max(float((last.frame.duration or 0) * self._stream.time_base), 2 / self.span.rate)
        if self._has_promised and end + _SLACK_S < min(wanted, self.span.end_s):
            raise refuse(
                f"its frames end at {end:.2f} s, though its header says {self.span.end_s:.2f} s: it has been cut off"
            )

    def _pixels(self, frame: Any) -> np.ndarray:
        """Return a frame (Y, X, 3) as it is to be displayed."""
        self._frame_size = self._frame_size or (frame.width, frame.height)  # of all, should it change on the way
        width, height = self._frame_size
        pixels = self._reformatter.reformat(frame, width, height, format="rgb24", threads=1).to_ndarray()
        quarters = round(frame.rotation / 90) % 4  # counterclockwise, from the file's display matrix
        return np.rot90(pixels, quarters) if quarters else pixels

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._av.error.FFmpegError as error:
            raise refuse(f"{type(error).__name__}: {error.strerror}") from error


def _ticks(packet_or_frame: Any) -> int | None:
    """Return when it is displayed, in units of its stream's time base, or when it is decoded where that is not said."""
    return packet_or_frame.dts if packet_or_frame.pts is None else packet_or_frame.pts


def _is_cover(stream: Any) -> bool:
    """Say whether a stream is the picture on the cover of a piece of music."""
    return "attached_pic" in str(stream.disposition)
