"""How long may decoding take?

A decoder may hang for good: in a loop of its own, or reading from a pipe or a file server that never answers. No
signal ends C code, so the decoding happens in a thread that is left behind when its time is over. Only what draws no
random numbers may run there: such a thread may come back any time.

Does not know: what is decoded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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
    outcome: list[tuple[bool, object]] = []

    def run() -> None:
        try:
            outcome.append((True, decode()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run, name="decode", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise DecodeTimeout(f"decoding took longer than data.timeout_s={seconds:g}")
    is_done, value = outcome[0]
    if not is_done:
        raise value
    return value
