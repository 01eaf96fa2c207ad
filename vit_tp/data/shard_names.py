"""Where do the shards lie, and what are they called?

data.root is a folder, or the beginning of a URL that WebDataset can open (http:, s3 and others by pipe:); in a pipe:
the name comes where {} stands, else at the end. data.train_shards and data.val_shards name the shards in it: by
pattern (train-*.tar, folders only), by range (train-{000000..000146}.tar), or both. They are numbered in the order of
their names.

Does not know: what is in them.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from vit_tp.config import DataConfig
from vit_tp.data.wording import listed
from vit_tp.errors import ConfigError, DataError


@dataclass(frozen=True)
class Root:
    """Where shards lie: a folder, or else the beginning of a URL."""

    prefix: str
    folder: Path | None

    @classmethod
    def parse(cls, data: DataConfig) -> Root:
        """Return what data.root stands for.

        Raises:
            ConfigError: It is not set.
            DataError: It is no folder.
        """
        root = data.root
        if not root:
            raise ConfigError(
                f"data.root is not set; data.source={data.source} reads {data.train_shards} and {data.val_shards} in "
                f"it. Use data.root=<the folder or URL that the shards are in>."
            )
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", root) and not root.startswith("file:"):
            return cls(root, None)
        folder = Path(url2pathname(urlparse(root).path) if root.startswith("file:") else root).expanduser().absolute()
        if not folder.is_dir():
            raise DataError(
                f"data.root={root} is not a folder (looked at {folder}); shards are read from it. "
                f"Use data.root=<the folder or URL that the shards are in>."
            )
        return cls(str(folder), folder)

    def url(self, name: str) -> str:
        """Return what opens a file in it."""
        if self.folder is not None:
            return str(self.folder / name)
        if self.prefix.startswith("pipe:"):
            return self.prefix.replace("{}", name) if "{}" in self.prefix else self.prefix + name
        return self.prefix.rstrip("/") + "/" + name

    def identity(self, name: str) -> tuple[int, int] | None:
        """Return size in bytes and time in ns of a file; None behind a URL."""
        if self.folder is None:
            return None
        status = os.stat(self.folder / name)
        return status.st_size, status.st_mtime_ns

    def names(self, knob: str, pattern: str) -> list[str]:
        """Return the names that a pattern or range stands for, sorted.

        Args:
            knob: What the pattern was given by.
            pattern: Shell pattern, range, or both; behind a URL a range.

        Raises:
            ConfigError: The pattern cannot be read.
            DataError: A folder has no such files.
        """
        from braceexpand import UnbalancedBracesError, braceexpand  # comes with WebDataset

        try:
            patterns = list(braceexpand(pattern))
        except UnbalancedBracesError as error:
            raise ConfigError(
                f"{knob}={pattern} has a brace without its partner; ranges are written {{000..146}}. "
                f"Use for example {knob}=train-{{000000..000146}}.tar."
            ) from error
        if self.folder is None:
            if "*" in pattern:
                raise ConfigError(
                    f"{knob}={pattern} is a pattern, and data.root={self.prefix} is a URL, whose files cannot be "
                    f"listed. Use a range, for example {knob}={pattern.replace('*', '{000000..000146}')}."
                )
            return sorted(set(patterns))
        names: set[str] = set()
        for name in patterns:
            names.update(glob.glob(name, root_dir=self.folder, recursive=True) if glob.has_magic(name) else [name])
        missing = sorted(name for name in names if not (self.folder / name).is_file())
        if missing or not names:
            held = listed(sorted(entry.name for entry in self.folder.iterdir())) or "nothing"
            what = f"{len(missing)} of {len(names)} shards ({listed(missing)})" if missing else "no shard"
            raise DataError(
                f"{knob}={pattern} names {what} that {'are not' if missing else 'is'} in data.root={self.folder}, "
                f"which holds {held}. Use {knob}=<pattern, or range, of the shards that are there>."
            )
        return sorted(names)
