"""How long may decoding take?

A decoder may hang for good: in a loop of its own, or reading from a pipe or a file server that never answers. No
signal ends C code, so the decoding happens in a second thread, which is left behind when its time is over. Only what
draws no random numbers may run there: such a thread may come back any time. A thread that came back in time is used
again, for each new one would begin with memory of its own (a third of the time of a small JPEG).

Does not know: what is decoded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class DecodeTimeout(Exception):
    """Decoding took too long."""


def within(seconds: float | None, decode: Callable[[], T]) -> T:
    """Return what `decode` returns, or raise what it raises.

    Args:
        seconds: How long it may take; None to wait for ever, in this thread.
        decode: Without side effects. It must let go of Python's lock while it waits, as decoders in C do.

    Raises:
        DecodeTimeout: It took longer, and goes on in a thread that nobody listens to.
    """
    if seconds is None:
        return decode()
    helper = getattr(_own, "helper", None)
    if helper is None or not helper.is_alive:
        helper = _own.helper = _Helper()
    try:
        is_done, value = helper.run(decode, seconds)
    except BaseException as error:  # an interrupt too: the next one to ask would be given this one's answer
        _own.helper = None
        if isinstance(error, Empty):
            raise DecodeTimeout(f"decoding took longer than data.timeout_s={seconds:g}") from None
        raise
    if not is_done:
        raise value
    return value


def each_within(seconds: float | None, steps: Generator[T, None, None], most_s: float | None = None) -> Iterator[T]:
    """Yield what a generator yields, while each of its steps comes in time.

    Its steps are taken where `within` decodes; between them the caller may do what it likes, also draw. It is closed
    by whoever leaves it early, unless it is late: then it is left to the thread that it keeps.

    Args:
        seconds: How long a step may take; None to wait for ever, in this thread.
        steps: Without side effects; it opens and closes what it reads.
        most_s: How long all steps together may take; None: as long as they like.

    Raises:
        DecodeTimeout: A step, or all of them, took longer.
    """
    taken, end, is_between = 0.0, object(), False
    try:
        while True:
            left = seconds if seconds is None or most_s is None else min(seconds, max(most_s - taken, 0.0))
            begun = time.monotonic()
            try:
                step = within(left, lambda: next(steps, end))
            except DecodeTimeout:
                raise DecodeTimeout(f"decoding took longer than data.timeout_s={seconds:g}") from None
            taken += time.monotonic() - begun
            if step is end:
                return
            is_between = True
            yield step
            is_between = False
    finally:
        if is_between:
            steps.close()


class _Helper:
    """A thread that decodes for another one. It ends when nobody holds this any more, and is not alive after a fork."""

    def __init__(self) -> None:
        self._asked: SimpleQueue = SimpleQueue()
        self._answered: SimpleQueue = SimpleQueue()
        # The thread holds the queues only, or this would live as long as it.
        queues = (self._asked, self._answered)
        self._thread = threading.Thread(target=_decode_all, args=queues, name="decode", daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        self._asked.put(None)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, decode: Callable[[], object], seconds: float) -> tuple[bool, object]:
        """Return (True, value) or (False, error); raise queue.Empty when time is over."""
        self._asked.put(decode)
        return self._answered.get(timeout=seconds)


def _decode_all(asked: SimpleQueue, answered: SimpleQueue) -> None:
    while (decode := asked.get()) is not None:
        try:
            answer = (True, decode())
        except BaseException as error:
            answer = (False, error)
        answered.put(answer)
        del answer, decode  # pixels must not live until the next sample


_own = threading.local()
"""Each thread's helper."""
