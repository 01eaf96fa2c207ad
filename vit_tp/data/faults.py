"""What happens when a sample cannot be read?

In training another one takes its place, chosen by the key of the broken one, so the choice is the same on any grid and
in any repetition. In evaluation its place stays empty and is not counted. Each such place is reported with path and
reason; too many of them end the run.

Does not know: file formats, ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vit_tp.data.deadline import DecodeTimeout
from vit_tp.data.order import SampleKey
from vit_tp.data.spec import Sample, Source, StreamSource
from vit_tp.errors import ConfigError, DataError

MAX_ATTEMPTS = 8
NOT_THE_FILE = (ConfigError, MemoryError, torch.OutOfMemoryError)
"""Errors that say nothing about a file: another one would fail alike, or has no memory either."""
_SUBSTITUTE_STREAM = 3


class Fault(NamedTuple):
    """A sample that could not be read.

    Args:
        epoch: In which pass.
        index: Which sample.
        name: Its path.
        reason: What reading it raised.
        replaced_by: Path of the sample in its place; None where the place stayed empty.
    """

    epoch: int
    index: int
    name: str
    reason: str
    replaced_by: str | None


class Loaded(NamedTuple):
    """What came of asking for a sample: None where nothing could be read."""

    key: SampleKey
    sample: Sample | None
    faults: tuple[Fault, ...]


def load_or_replace(source: Source, key: SampleKey) -> Loaded:
    """Read one sample, in training another one where that fails.

    Raises:
        DataError: In training, this many in a row cannot be read.
    """
    asked = (_substitute(source, key, attempt) for attempt in range(MAX_ATTEMPTS + 1))
    return first_readable(source, ((other, partial(source.load, other)) for other in asked))


def first_readable(
    source: Source | StreamSource, tries: Iterable[tuple[SampleKey, Callable[[], Sample]]], remedy: str = ""
) -> Loaded:
    """Return the first sample that can be read; in evaluation the first or none.

    Args:
        source: Where they come from.
        tries: Keys and how to load them: first the sample that is wanted, then what may take its place.
        remedy: What to look at when none can be read, besides data.root.

    Raises:
        DataError: In training, none can be read.
    """
    failed: list[tuple[SampleKey, str]] = []
    for key, load in tries:
        try:
            sample = load()
            require_sample(source, key, sample)
        except NOT_THE_FILE:
            raise
        except Exception as error:
            if isinstance(error, DecodeTimeout):  # at once: peers that wait may end the job before the batch is whole
                print(f"{source.name(key.index)}: {error}", flush=True)
            failed.append((key, reason_of(error)))
            if not source.form.is_training:
                return Loaded(key, None, _faults(source, failed, None))
            continue
        return Loaded(key, sample, _faults(source, failed, source.name(key.index)) if failed else ())
    last, reason = failed[-1]
    raise DataError(
        f"{len(failed)} samples in a row cannot be read, the last of them {source.name(last.index)} ({reason}); that "
        f"is no longer a broken file among good ones. Look at data.root and what it is mounted from{remedy}."
    )


def require_sample(source: Source | StreamSource, key: SampleKey, sample: Sample) -> None:
    """Raise ValueError unless a sample has the shape that its source promises."""
    shape = source.form.shape_at(key.epoch, source.in_chans)
    shape = shape if source.views == 1 else (source.views, *shape)
    if sample.pixels.shape != shape:
        raise ValueError(f"its shape is {tuple(sample.pixels.shape)}, not {shape}")


def reason_of(error: BaseException) -> str:
    """Return one line about an error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _substitute(source: Source, key: SampleKey, attempt: int) -> SampleKey:
    if attempt == 0:
        return key
    seeds = (_SUBSTITUTE_STREAM, source.form.seed, key.epoch, key.index, key.copy, attempt)
    [drawn] = np.random.SeedSequence(seeds).generate_state(1, np.uint64)
    return key._replace(index=int(drawn) % len(source))


def _faults(
    source: Source | StreamSource, failed: list[tuple[SampleKey, str]], replaced_by: str | None
) -> tuple[Fault, ...]:
    return tuple(Fault(key.epoch, key.index, source.name(key.index), reason, replaced_by) for key, reason in failed)


class FaultLog:
    """Counts and reports what could not be read of a split, and says when it is too much.

    Args:
        path: File that a line of JSON is added to for each fault, made anew; None reports nowhere.
        max_bad_fraction: Share of the reads that may fail. 0 refuses the first.
        allowance: Reads that the share is at least taken of: the samples of the split.
    """

    def __init__(self, path: Path | None, max_bad_fraction: float, allowance: int) -> None:
        self.path, self.max_bad_fraction, self.allowance = path, max_bad_fraction, allowance
        self.num_read = self.num_bad = 0
        self._noted: set[tuple[int, int]] = set()
        self._last: Fault | None = None

    def note(self, num_good: int, faults: tuple[Fault, ...]) -> None:
        """Take note of so many samples that were read, and of those that were not.

        Raises:
            DataError: This reader alone has more faults than the whole split may have.
        """
        new = {(fault.epoch, fault.index) for fault in faults} - self._noted  # copies of a sample are one
        self._noted |= new
        self.num_read += num_good + len(new)
        self.num_bad += len(new)
        for fault in faults:
            instead = "left out" if fault.replaced_by is None else f"replaced by {fault.replaced_by}"
            print(f"cannot read {fault.name}: {fault.reason}; {instead}", flush=True)
        if faults and self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "w" if self._last is None else "a", encoding="utf-8") as file:
                file.writelines(json.dumps(fault._asdict()) + "\n" for fault in faults)
        if faults:
            self._last = faults[-1]
            self.require(self.num_read, self.num_bad)

    def require(self, num_read: int, num_bad: int) -> None:
        """Raise if so many of so many reads, of one reader or of all, are too many.

        Raises:
            DataError: They are.
        """
        looked_at = max(num_read, self.allowance)
        if num_bad <= self.max_bad_fraction * looked_at:
            return
        last = f"; the last here is {self._last.name} ({self._last.reason})" if self._last else ""
        raise DataError(
            f"{num_bad} of {looked_at} samples cannot be read, more than "
            f"data.max_bad_fraction={self.max_bad_fraction:g} allows{last}. Repair or remove what "
            f"{self.path.parent / 'unreadable_*.jsonl' if self.path else 'the log'} names, or use for example "
            f"data.max_bad_fraction={math.ceil(200 * num_bad / looked_at) / 100:g}."
        )
