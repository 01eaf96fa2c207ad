"""What is asked of the data group alone: where samples lie, and how they are cut, coloured and sampled.

Does not know: what is in the files (data/).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from vit_tp.config.batch import eval_views
from vit_tp.config.limits import READ_BY, VIDEO_SOURCES
from vit_tp.config.schema import Config, DataConfig
from vit_tp.config.types import close_names, show

POLICIES = ("rand", "augmix", "3a", "original", "v0")
_FOLDERS = {
    "image_folder": "data.source=image_folder reads <data.root>/train/<class>/ and <data.root>/val/<class>/",
    "video_folder": "data.source=video_folder reads <data.root>/train/<class>/ or <data.root>/train.csv, and val alike",
}


def data_complaints(config: Config) -> Iterator[str]:
    """Yield every complaint about the data group."""
    yield from _unread(config.data)
    yield from _numbers(config.data)
    yield from _patience(config)
    yield from _views(config)
    yield from _root(config.data)
    if config.data.repeats > config.recipe.global_batch_size >= 1:
        yield (
            f"data.repeats={config.data.repeats} is more than recipe.global_batch_size="
            f"{config.recipe.global_batch_size}; a batch would hold one sample. Use for example data.repeats=3."
        )


def _numbers(data: DataConfig) -> Iterator[str]:
    scale, ratio = data.crop_scale, data.crop_ratio
    if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
        yield (
            f"data.crop_scale={show(scale)} is not a range of areas; it takes two shares of the image, "
            f"0 < low <= high <= 1. Use for example data.crop_scale=[0.08,1.0]."
        )
    if len(ratio) != 2 or not 0 < ratio[0] <= ratio[1] < math.inf:
        yield (
            f"data.crop_ratio={show(ratio)} is not a range of aspect ratios; it takes two numbers, 0 < low <= high. "
            f"Use for example data.crop_ratio=[0.75,1.333]."
        )
    policy = data.auto_augment
    if policy is not None and not policy.startswith(POLICIES):
        close = close_names(policy.split("-")[0], POLICIES)
        advice = (
            f"Did you mean data.auto_augment={'-'.join([close[0], *policy.split('-')[1:]])}?"
            if close
            else ("Use for example data.auto_augment=rand-m9-mstd0.5-inc1.")
        )
        yield (
            f"data.auto_augment={policy} is no policy of timm's; their names begin with {', '.join(POLICIES)}. {advice}"
        )
    for name, low in (("mean", 0.0), ("std", 1e-9)):
        values = getattr(data, name)
        if values is not None and (len(values) != 3 or not all(low <= value <= 1 for value in values)):
            yield (
                f"data.{name}={show(values)} does not say what red, green and blue are scaled by; pixels lie between 0 "
                f"and 1, so it takes three numbers of that range. Use for example data.{name}=[0.5,0.5,0.5]."
            )
    if data.eval_crops == 2:
        yield (
            "data.eval_crops=2 leaves out the middle; crops lie at both ends of the longer side and in its middle. "
            "Use data.eval_crops=1 or data.eval_crops=3."
        )


def _unread(data: DataConfig) -> Iterator[str]:
    """Yield the knobs that somebody set and nothing reads."""
    read = READ_BY.get(data.source)
    usual = DataConfig()
    for knob, value in vars(data).items() if read is not None else ():
        if knob == "source" or knob in read or value == getattr(usual, knob):
            continue
        others = [f"data.source={source}" for source, knobs in READ_BY.items() if knob in knobs]
        yield (
            f"data.{knob}={show(value)} is not read by data.source={data.source}; it would change nothing. "
            f"Leave it out, or use {' or '.join(others)}."
        )
    if data.source in VIDEO_SOURCES and data.sampling == "segments" and data.frame_stride != usual.frame_stride:
        yield (
            f"data.frame_stride={data.frame_stride} is not read with data.sampling=segments, which takes frames from "
            f"equal parts of a video. Leave it out, or use data.sampling=dense."
        )


def _patience(config: Config) -> Iterator[str]:
    decoding, peers = config.data.timeout_s, config.compute.timeout_s
    if decoding is not None and decoding >= peers > 0 and config.data.source != "digits":
        yield (
            f"data.timeout_s={decoding:g} is not below compute.timeout_s={peers}; peers that wait for a sample would "
            f"end the job before decoding is given up. Use data.timeout_s={peers / 10:g} or less."
        )


def _views(config: Config) -> Iterator[str]:
    views, rows = eval_views(config), config.compute.eval_micro_batch_size
    if rows is not None and rows >= 1 and views >= 1 and rows % views:
        yield (
            f"compute.eval_micro_batch_size={rows} is not a multiple of data.eval_clips={config.data.eval_clips} * "
            f"data.eval_crops={config.data.eval_crops} = {views}; the views of a sample are averaged where they are "
            f"computed. Use compute.eval_micro_batch_size={-(-rows // views) * views}."
        )


def _root(data: DataConfig) -> Iterator[str]:
    if data.root is None:
        if data.source in (*_FOLDERS, "image_tars", "video_tars"):
            reads = _FOLDERS.get(data.source, f"data.source={data.source} reads data.train_shards and data.val_shards")
            yield f"data.root is not set; {reads}. Use data.root=<folder>."
        return
    if data.source not in _FOLDERS:
        return
    reads, root = _FOLDERS[data.source], Path(data.root).expanduser()
    if not root.is_dir():
        yield f"data.root={root} is not a folder; {reads}. Use data.root=<existing folder>."
        return
    lists = [".csv"] if data.source == "video_folder" else []
    missing = [
        split
        for split in ("train", "val")
        if not (root / split).is_dir() and not any((root / f"{split}{ending}").is_file() for ending in lists)
    ]
    if missing:
        found = ", ".join(sorted(path.name for path in root.iterdir())[:8]) or "nothing"
        yield (
            f"data.root={root} has no {' and no '.join(missing)} folder (it holds {found}); {reads}. "
            f"Use data.root=<folder with train/ and val/>."
        )
