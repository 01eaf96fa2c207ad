"""Where do the videos of a folder lie, and which class has each?

    <data.root>/train/<class>/<video>      <data.root>/val/<class>/<video>
    <data.root>/train.csv                  <data.root>/val.csv                  a line for each video: path,label

Lists come first where there are both. No video is opened to find that out.

Does not know: how a video is decoded and augmented (clips.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from timm.utils.misc import natural_key

from vit_tp.config import DataConfig
from vit_tp.data.clips import ClipPipeline, require_clips
from vit_tp.data.folders import SPLITS, class_of, layout_complaints, require_root, unknown_complaints
from vit_tp.data.order import SampleKey
from vit_tp.data.spec import DataSpec, Form, Sample
from vit_tp.data.transforms import IN_CHANS, normalisation
from vit_tp.data.video_list import VideoList, missing_files, read_list
from vit_tp.data.wording import listed
from vit_tp.errors import DataError

EXTENSIONS = (".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts")
EXTENSIONS += (".webm", ".wmv")
_READS = "train/<class>/<video> and val/<class>/<video>, or train.csv and val.csv"


def describe_video_folder(data: DataConfig) -> DataSpec:
    """Count videos and classes without opening a video.

    Args:
        data: The data group of the config; root, the decoder and the augmentation knobs are read.

    Raises:
        ConfigError: data.root is not set, no decoder can be used, or timm refuses an augmentation knob.
        DataError: The folder is not laid out as the module says; every complaint, one a line.
    """
    root = require_root(data, _READS)
    require_clips(data)
    lists, complaints = {}, []
    for split in SPLITS:
        lists[split], found = _find(root, split)
        complaints += found
    if not complaints:
        complaints += _label_complaints(root, lists["train"], lists["val"])
        complaints += [complaint for videos in lists.values() for complaint in missing_files(videos)]
    if complaints:
        raise DataError("\n".join(complaints))
    classes = lists["train"].class_to_idx()
    unseen = listed(sorted(set(classes) - set(lists["train"].labels), key=natural_key))
    mean, std = normalisation(data)
    return DataSpec(
        num_train=len(lists["train"]),
        num_val=len(lists["val"]),
        num_classes=len(classes),
        in_chans=IN_CHANS,
        mean=mean,
        std=std,
        is_video=True,
        notes=(f"no training video of {root} has label {unseen}: nothing teaches these outputs",) if unseen else (),
        class_names=tuple(classes),
    )


class VideoFolder:
    """One split of a folder of videos. It holds paths; a file is open only while it is read.

    Args:
        data: The data group of the config.
        form: What the clips are to look like.
    """

    in_chans = IN_CHANS

    def __init__(self, data: DataConfig, form: Form) -> None:
        root = require_root(data, _READS)
        self.form, self._pipeline = form, ClipPipeline(data, form)
        self.views = self._pipeline.views
        videos, complaints = _find(root, form.split)
        train, more = (videos, []) if form.is_training else _find(root, "train")
        complaints += more or ([] if complaints else _label_complaints(root, train, videos))
        if complaints:
            raise DataError("\n".join(complaints))
        self.class_to_idx = train.class_to_idx()
        self._labels = np.array([self.class_to_idx[label] for label in videos.labels], np.int64)
        # One array of bytes: each of a million strings would be copied into each worker as it is counted there.
        self._paths = np.array([os.fsencode(path) for path in videos.paths])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of their numbers."""
        return tuple(self.class_to_idx)

    def __len__(self) -> int:
        """Return the number of videos."""
        return len(self._labels)

    def load(self, key: SampleKey) -> Sample:
        """Read and augment the clip of a video (3, T, Y, X), or its views; see Source.load."""
        return Sample(self._pipeline.load(self.name(key.index), key), int(self._labels[key.index]))

    def name(self, index: int) -> str:
        """Return the path of a video."""
        return os.fsdecode(self._paths[index])


def _find(root: Path, split: str) -> tuple[VideoList, list[str]]:
    """Return the videos of a split, by list or by folder, and what is wrong with them."""
    has_lists = any((root / f"{name}.csv").is_file() for name in SPLITS)
    if has_lists:
        return read_list(root, root / f"{split}.csv")
    folder = root / split
    if not folder.is_dir():
        return VideoList(), [
            f"{folder} is not a folder and {folder}.csv is not a file; videos are read from "
            f"<data.root>/{split}/<class>/<video> or listed in <data.root>/{split}.csv. "
            f"Use data.root=<the folder that holds train and val>."
        ]
    return _walk(folder)


def _walk(folder: Path) -> tuple[VideoList, list[str]]:
    """Return the videos of a split's folder, in the order of their classes and names, and what is wrong with it."""
    paths = [
        os.path.join(where, name)
        for where, _, names in os.walk(folder, followlinks=True)
        for name in names
        if os.path.splitext(name)[1].lower() in EXTENSIONS
    ]
    complaints = layout_complaints(folder, paths, "video", EXTENSIONS)
    return VideoList(paths, [class_of(path) for path in paths]).sorted(), complaints


def _label_complaints(root: Path, train: VideoList, val: VideoList) -> list[str]:
    return unknown_complaints(train.class_to_idx(), val.labels, "in train", f"of val in {root}")
