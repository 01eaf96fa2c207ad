"""How many samples has each shard?

Sizes are looked for beside the shards, in this order:

    vit_tp_index.json   written here: samples and highest label of each shard that was counted. In a folder an entry
                        holds for a file of its size and time only; behind a URL it is believed.
    sizes.json          {"00000.tar": 9998, ...} as img2dataset and OpenCLIP write it. It is believed, never written.
                        It knows no labels: data.num_classes has to be given.
    the shard itself    read through once, sought through where it is a file, and noted in vit_tp_index.json.

What is counted is keys, as they follow one another in the tar, whether or not a sample is complete: each holds a
place. Of a shard that breaks off, what comes before the break is counted, and a note says so.

Does not know: images, the order in which samples are read.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

from vit_tp.config import DataConfig
from vit_tp.config.atomic import write_atomically
from vit_tp.data.shard_names import Root
from vit_tp.data.tar_members import BROKEN, NoEnd, finish, group_members, opened
from vit_tp.data.wording import listed
from vit_tp.errors import DataError

INDEX_FILE = "vit_tp_index.json"
SIZES_FILE = "sizes.json"
LABEL = "cls"
_AT_ONCE = 8  # shards that are counted at the same time: it is mostly waiting


class Counted(NamedTuple):
    """What reading through a shard tells.

    Args:
        samples: Keys before its end.
        highest_label: -1 where no label can be read; None where nobody looked.
        note: What is wrong with it; empty where nothing is.
    """

    samples: int
    highest_label: int | None = None
    note: str = ""


class Shard(NamedTuple):
    """One tar file: its name below data.root, what opens it, what is in it."""

    name: str
    url: str
    counted: Counted


class Survey(NamedTuple):
    """The shards of a split, by name, and lines for a person."""

    shards: tuple[Shard, ...]
    notes: tuple[str, ...]


def survey(data: DataConfig, split: str) -> Survey:
    """Find the shards of a split and how many samples each has.

    Args:
        data: The data group of the config.
        split: "train" or "val".

    Raises:
        ConfigError: data.root is not set, or the pattern cannot be read.
        DataError: There is no such shard, one cannot be opened, or all are empty.
    """
    knob, pattern = f"data.{split}_shards", data.train_shards if split == "train" else data.val_shards
    root = Root.parse(data)
    names = root.names(knob, pattern)
    notes: list[str] = []
    counted: dict[str, Counted] = {}
    for folder in sorted({os.path.dirname(name) for name in names}):
        counted |= _look_up(root, folder, [name for name in names if os.path.dirname(name) == folder], notes)
    uncounted = [name for name in names if name not in counted]
    if uncounted:
        print(f"reading through {len(uncounted)} of {len(names)} shards of {knob} to count them", file=sys.stderr)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(lambda name: count_samples(root.url(name), root.identity(name)), uncounted))
        counted |= zip(uncounted, found, strict=True)
        notes += _note_down(root, dict(zip(uncounted, found, strict=True)))
    notes += [f"{name} {counted[name].note}" for name in names if counted[name].note]
    if not any(counted[name].samples for name in names):
        raise DataError(
            f"the {len(names)} shards of {knob}={pattern} in data.root={data.root} hold no sample "
            f"({listed([f'{name} {counted[name].note}' for name in names])}); there is nothing to read. "
            f"Use other shards."
        )
    return Survey(tuple(Shard(name, root.url(name), counted[name]) for name in names), tuple(notes))


@lru_cache(maxsize=4096)
def count_samples(url: str, identity: tuple[int, int] | None) -> Counted:
    """Read through a shard without its payloads, and count.

    Args:
        url: What opens it.
        identity: Of the file that is there now; another one is counted anew.

    Raises:
        DataError: It cannot be opened or not be read to its end.
    """
    samples, highest, label, reason = 0, -1, -1, ""
    suffixes: set[str] = set()
    try:
        with opened(url) as stream:
            try:
                for _, members in group_members(stream):
                    suffixes, label = set(), -1
                    for member in members:
                        suffixes.add(member.suffix)
                        if member.suffix == LABEL:
                            label = number_of(member.read())
                            label = -1 if label is None else label  # found out with its name when it is read
                    samples, highest = samples + 1, max(highest, label)
            except BROKEN as error:
                reason = str(error)
                if isinstance(error, NoEnd) and LABEL in suffixes and len(suffixes) > 1:
                    samples, highest = samples + 1, max(highest, label)  # the last one is whole
            finish(stream)
    except OSError as error:
        raise DataError(
            f"{url} cannot be read ({type(error).__name__}: {error}), so nobody knows how many samples it has. "
            f"Look at data.root and the names of the shards, or write its number of samples into {SIZES_FILE}."
        ) from error
    if not samples:
        return Counted(0, highest, f"holds no sample ({reason or 'an empty tar'})")
    return Counted(samples, highest, f"is cut short after {samples} samples ({reason})" if reason else "")


def number_of(payload: bytes) -> int | None:
    """Return the class that a label's file holds; None where it is not one whole number."""
    return int(payload) if re.fullmatch(rb"\s*[+-]?[0-9]+\s*", payload) else None


def _look_up(root: Root, folder: str, names: Sequence[str], notes: list[str]) -> dict[str, Counted]:
    """Return what the files beside the shards of one folder say of them."""
    counted: dict[str, Counted] = {}
    index, sizes = _load(root, folder, INDEX_FILE, notes), None
    for name in names:
        known = _from_entry(index.get(os.path.basename(name)), root.identity(name))
        if known is not None:
            counted[name] = known
            continue
        if sizes is None:
            sizes = _load(root, folder, SIZES_FILE, notes)
        samples = sizes.get(os.path.basename(name))
        if type(samples) is int and samples >= 0:
            counted[name] = Counted(samples)
    return counted


def _from_entry(entry: Any, identity: tuple[int, int] | None) -> Counted | None:
    """Return what was noted down of a shard, if that is the one that is there."""
    try:
        known = Counted(*(entry[field] for field in Counted._fields))
        is_this = identity in (None, (entry["bytes"], entry["mtime_ns"]))
    except (KeyError, TypeError):
        return None
    return known if is_this else None


def _load(root: Root, folder: str, name: str, notes: list[str]) -> dict[str, Any]:
    """Return the table in a file beside the shards; empty where there is none."""
    url = root.url(os.path.join(folder, name))
    try:
        with opened(url) as stream:
            text = stream.read()
            finish(stream)
    except OSError:
        return {}
    if not text.strip():  # the last program of a pipe does not know that the first one found nothing
        return {}
    try:
        table = json.loads(text)
    except ValueError:
        table = None
    if isinstance(table, dict):
        return table
    notes.append(f"{url} is not a table of shards in JSON; it is passed over.")
    return {}


def _note_down(root: Root, found: dict[str, Counted]) -> list[str]:
    """Write what was counted beside the shards; returns what a person should know if that cannot be."""
    problem = "they lie behind a URL"
    if root.folder is not None:
        try:
            for folder in sorted({os.path.dirname(name) for name in found}):
                table = _load(root, folder, INDEX_FILE, [])
                for name, counted in found.items():
                    if os.path.dirname(name) == folder:
                        num_bytes, mtime_ns = root.identity(name) or (0, 0)
                        entry = {**counted._asdict(), "bytes": num_bytes, "mtime_ns": mtime_ns}
                        table[os.path.basename(name)] = entry
                write_atomically(root.folder / folder / INDEX_FILE, json.dumps(table, indent=1, sort_keys=True))
            return []
        except OSError as error:
            problem = f"nothing can be written there ({error})"
    return [
        f"{len(found)} shards were read through to count their samples, and will be by each reading rank at each "
        f"start, for {problem}. Put an {INDEX_FILE} of the same shards in a folder, or a {SIZES_FILE}, beside them."
    ]
