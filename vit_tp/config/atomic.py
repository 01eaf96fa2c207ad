"""Files that a reader sees whole or not at all, and files that only one process gets to make.

Does not know: what is in them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a file, over one that may be there; its folder is made if missing."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def create_atomically(path: Path, text: str) -> None:
    """Write a file that must not be there yet; of several processes that try at once, one succeeds.

    Raises:
        FileExistsError: It is there.
    """
    with _beside(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
        try:
            os.link(unfinished, path)  # unlike rename it fails where the name is taken
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: still one winner, but a reader may see half a file
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a name to write to, and move what was written to the path; after an error the path is as before."""
    with _beside(path) as unfinished:
        yield unfinished
        os.replace(unfinished, path)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by the process number: two hosts may write to one folder. The suffix tells libraries the format.
    unfinished = path.with_name(f".{path.stem}.{secrets.token_hex(6)}{path.suffix}")
    try:
        yield unfinished
    finally:
        unfinished.unlink(missing_ok=True)
