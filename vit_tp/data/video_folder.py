"""Where do the videos of a folder lie, and which class has each?

    <data.root>/train/<class>/<video>      <data.root>/val/<class>/<video>
    <data.root>/train.csv                  <data.root>/val.csv                  a line for each video: path,label

Lists come first where there are both. Classes are in timm's order, 2 before 10. What would make a class number doubtful
(a video outside a class folder, a class folder without videos, a validation class that training lacks) is refused by
name. Nothing is opened to find that out.

Does not know: how a video is decoded and augmented (clips.py).
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.utils.misc import natural_key

from vit_tp.config import DataConfig
from vit_tp.data.clips import ClipPipeline, require_clips
from vit_tp.data.order import SampleKey
from vit_tp.data.spec import DataSpec, Form, Sample
from vit_tp.data.video_list import VideoList, missing_files, read_list
from vit_tp.errors import ConfigError, DataError

IN_CHANS = 3
EXTENSIONS = (".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts")
EXTENSIONS += (".webm", ".wmv")
SPLITS = ("train", "val")
_SHOWN = 5


def describe_video_folder(data: DataConfig) -> DataSpec:
    """Count videos and classes without opening a video.

    Args:
        data: The data group of the config; root, the decoder and the augmentation knobs are read.

    Raises:
        ConfigError: data.root is not set, no decoder can be used, or timm refuses an augmentation knob.
        DataError: The folder is not laid out as the module says; every complaint, one a line.
    """
    root = _root(data)
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
    unseen = _listed(sorted(set(classes) - set(lists["train"].labels), key=natural_key))
    return DataSpec(
        num_train=len(lists["train"]),
        num_val=len(lists["val"]),
        num_classes=len(classes),
        in_chans=IN_CHANS,
        mean=tuple(data.mean or IMAGENET_DEFAULT_MEAN),
        std=tuple(data.std or IMAGENET_DEFAULT_STD),
        is_video=True,
        notes=(f"no training video of {root} has label {unseen}: nothing teaches these outputs",) if unseen else (),
    )


class VideoFolder:
    """One split of a folder of videos. It holds paths; a file is open only while it is read.

    Args:
        data: The data group of the config.
        form: What the clips are to look like.
    """

    in_chans = IN_CHANS

    def __init__(self, data: DataConfig, form: Form) -> None:
        root = _root(data)
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

    def __len__(self) -> int:
        """Return the number of videos."""
        return len(self._labels)

    def load(self, key: SampleKey) -> Sample:
        """Read and augment the clip of a video (3, T, Y, X), or its views; see Source.load."""
        return Sample(self._pipeline.load(self.name(key.index), key), int(self._labels[key.index]))

    def name(self, index: int) -> str:
        """Return the path of a video."""
        return os.fsdecode(self._paths[index])


def _root(data: DataConfig) -> Path:
    reads = "train/<class>/<video> and val/<class>/<video>, or train.csv and val.csv"
    if not data.root:
        raise ConfigError(
            f"data.root is not set; data.source={data.source} reads {reads} in it. "
            f"Use data.root=<the folder that holds train and val>."
        )
    root = Path(data.root).expanduser()
    if not root.is_dir():
        raise DataError(
            f"data.root={data.root} is not a folder (looked at {root.absolute()}); inside it there should be {reads}. "
            f"Use data.root=<the folder that holds train and val>."
        )
    return root


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
    endings = " ".join(EXTENSIONS)
    class_names = sorted((entry.name for entry in os.scandir(folder) if entry.is_dir()), key=natural_key)
    if not class_names:
        return VideoList(), [
            f"{folder} holds no class folder; each class is a folder of videos. Make {folder}/<class>/<video>."
        ]
    videos, misplaced = VideoList(), []
    for where, _, names in os.walk(folder, followlinks=True):
        place = Path(where)
        found = [os.path.join(where, name) for name in names if os.path.splitext(name)[1].lower() in EXTENSIONS]
        if place.parent == folder:
            videos.paths += found
            videos.labels += [place.name] * len(found)
        else:
            misplaced += found
    if not videos.paths and not misplaced:
        return videos, [
            f"{folder} holds {len(class_names)} class folders but no video; names of videos end in {endings}."
        ]
    if misplaced:
        return videos, [
            f"{len(misplaced)} of {len(misplaced) + len(videos)} videos in {folder} do not lie in {folder}/<class> "
            f"itself ({_listed(misplaced)}), so their class is not clear. Move them, or use another data.root."
        ]
    num_of = Counter(videos.labels)
    empty = [name for name in class_names if not num_of[name]]
    # In val a class may well have no video; in train it would shift the numbers of the classes after it.
    if empty and folder.name == "train":
        return videos, [
            f"{len(empty)} of {len(class_names)} class folders in {folder} hold no video ({_listed(empty)}), and a "
            f"class without videos cannot be learnt. Remove these folders or fill them (videos end in {endings})."
        ]
    return videos.sorted(), []


def _label_complaints(root: Path, train: VideoList, val: VideoList) -> list[str]:
    """Say which classes of validation the model would have no output for."""
    wanted = set(val.labels)
    unknown = sorted(wanted - set(train.class_to_idx()), key=natural_key)
    if not unknown:
        return []
    return [
        f"{len(unknown)} of {len(wanted)} classes of val in {root} are missing in train ({_listed(unknown)}); the "
        f"model has no output for them. Add them to train or take them out of val."
    ]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
