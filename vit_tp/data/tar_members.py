"""How is one tar read from front to back?

Opened by WebDataset, from a path or any URL that it knows; its members are found by Python's tarfile and grouped as
WebDataset groups them: neighbours whose path up to the first dot of the name is the same make one sample, and what
comes after that dot says what a member is. Members that nobody asks for are sought over in a file, and read over in
a pipe.

Does not know: images, labels, how many samples there should be.

Source: WebDataset 1.0, tariterators.py: base_plus_ext, tar_file_iterator, group_by_keys.
"""

from __future__ import annotations

import itertools
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import BinaryIO, NamedTuple

from vit_tp.errors import ConfigError

BROKEN = (tarfile.TarError, EOFError, zlib.error)
"""What reading a damaged tar raises; where the bytes cannot be had at all it is an OSError."""
_META = re.compile(r"__[^/]*__($|/)")
_BLOCK_BYTES = 1 << 16  # that a pipe is read in; tarfile copies what is left of a block at each reading


class NoEnd(tarfile.ReadError):
    """After the last whole member there is neither another one nor the mark of the end."""


class Member(NamedTuple):
    """One file of a sample.

    Args:
        key: Path up to the first dot of its name.
        suffix: What comes after that dot, in lower case.
        read: Gives its bytes; to be called before the next member is asked for.
    """

    key: str
    suffix: str
    read: Callable[[], bytes]


class _CarefulHeader(tarfile.TarInfo):
    """tarfile takes any header that it cannot read for the end of the archive; only the written end is one."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise NoEnd(f"{error} in place of its end") from error


def require_webdataset(source: str) -> None:
    """Raise ConfigError where WebDataset is not installed."""
    try:
        import webdataset.gopen
        import webdataset.tariterators  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"data.source={source} needs WebDataset, which cannot be imported ({error}); it opens the shards and says "
            f"which members belong together. Use pip install 'vit-tp[tars]'."
        ) from error


@contextmanager
def opened(url: str) -> Iterator[BinaryIO]:
    """Open a path or URL. It may be left early; whoever reads it to its end calls `finish`.

    Raises:
        OSError: There is no such file.
    """
    from webdataset.gopen import gopen, set_options

    stream = gopen(url, bufsize=0)  # what a pipe has brought is read at once, not when the block is full
    # Else what a program sent before it failed would be lost, and to be left early would count as failing.
    set_options(stream, ignore_errors=True)
    try:
        yield stream
    finally:
        stop(stream)  # else a program that waits for its server would be waited for
        stream.close()


def stop(stream: BinaryIO) -> None:
    """End the program behind a URL unless it has ended; also while another thread waits for it."""
    import psutil
    from webdataset.gopen import Pipe

    if isinstance(stream, Pipe) and stream.proc.poll() is None:
        with suppress(psutil.NoSuchProcess):
            program = psutil.Process(stream.proc.pid)
            # A shell's children hold the pipe open too.
            for process in (program, *program.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def finish(stream: BinaryIO) -> None:
    """Read what is left behind a URL, and hear how the program fared that brought it.

    Raises:
        OSError: It failed: what came may not be all.
    """
    from webdataset.gopen import Pipe, set_options

    if isinstance(stream, Pipe):
        while stream.read(_BLOCK_BYTES):
            pass
        set_options(stream, ignore_errors=False)
        stream.close()


def group_members(stream: BinaryIO) -> Iterator[tuple[str, Iterator[Member]]]:
    """Yield the samples of a tar: key and members, which are to be drawn before the next sample is.

    Raises:
        NoEnd: It breaks off after a whole member; raised in place of the next, so that its sample may be whole.
        tarfile.TarError: It breaks off in a member, or is no tar.
        EOFError, zlib.error: The same, where it is compressed.
    """
    with _open(stream) as tar:
        yield from itertools.groupby(_members(tar), key=lambda member: member.key)


def _open(stream: BinaryIO) -> tarfile.TarFile:
    is_seekable = getattr(stream, "seekable", lambda: False)()
    mode = "r:*" if is_seekable else "r|*"
    try:
        return tarfile.open(fileobj=stream, mode=mode, bufsize=_BLOCK_BYTES, tarinfo=_CarefulHeader)
    except tarfile.ReadError as error:  # its text is a list of all that was tried
        raise tarfile.ReadError("it does not begin like a tar") from error


def _members(tar: tarfile.TarFile) -> Iterator[Member]:
    from webdataset.tariterators import base_plus_ext

    while (info := tar.next()) is not None:
        tar.members = []  # tarfile would keep them all
        if info.isreg() and not _META.match(info.name):
            key, suffix = base_plus_ext(info.name)
            if key is not None:
                yield Member(key, suffix.lower(), partial(_payload, tar, info))


def _payload(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(info)
    assert file is not None, info.name  # only regular members come here
    return file.read()
