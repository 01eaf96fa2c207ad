"""What does a list of videos say?

A line for each video: its path and its label, with a comma between them, or blanks as in the lists of VideoMAE and
SlowFast. Paths are absolute or begin at data.root. Labels are numbers, or names of classes. A first line of titles,
such as path,label, is passed over.

Does not know: folders of classes (video_folder.py), the files themselves.
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, field
from pathlib import Path

from timm.utils.misc import natural_key

TITLES = frozenset({"path", "file", "filename", "file_name", "video", "video_path"})
_LOOKED_AT = 32
_SHOWN = 5


@dataclass
class VideoList:
    """The videos of one split.

    Args:
        paths: Where they lie.
        labels: Their classes, as they are written.
        is_listed: Whether they come from a list.
    """

    paths: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    is_listed: bool = False

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def is_numbered(self) -> bool:
        """Whether labels are class numbers: only those of lists may be, names of folders are names."""
        return self.is_listed and all(label.isascii() and label.isdigit() for label in self.labels)

    def class_to_idx(self) -> dict[str, int]:
        """Return the number of every class, in timm's order where they have names: 2 before 10."""
        if self.is_numbered:
            return {str(number): number for number in range(1 + max(map(int, self.labels)))}
        return {name: number for number, name in enumerate(sorted(set(self.labels), key=natural_key))}

    def sorted(self) -> VideoList:
        """Return the same videos by class and name, whatever order the file system has."""
        keys = {label: natural_key(label) for label in set(self.labels)}
        pairs = sorted(zip(self.paths, self.labels), key=lambda pair: (keys[pair[1]], natural_key(pair[0])))
        return VideoList([path for path, _ in pairs], [label for _, label in pairs], self.is_listed)


def read_list(root: Path, file: Path) -> tuple[VideoList, list[str]]:
    """Return the videos of a list, in its order, and what is wrong with it.

    Args:
        root: Folder that relative paths begin at.
        file: The list.
    """
    videos = VideoList(is_listed=True)
    if not file.is_file():
        return videos, [
            f"{file} is not a file, though there is a list of the other split; videos are either listed or in class "
            f"folders. Write {file} with a line path,label for each video, or remove the other list."
        ]
    lines = [line for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    rows = _rows(lines)
    begin = 1 if rows and rows[0] and rows[0][0].strip().lower() in TITLES else 0
    bad = [number for number, row in enumerate(rows) if number >= begin and (len(row) != 2 or not all(row))]
    if bad:
        shown = "; ".join(repr(lines[number]) for number in bad[:_SHOWN])
        return videos, [
            f"{len(bad)} of {len(rows) - begin} lines of {file} are not a path and a label ({shown}), so nothing says "
            f"which class these videos have. Write path,label in each line; quote a path that has a comma."
        ]
    for path, label in rows[begin:]:
        videos.paths.append(os.path.join(root, os.path.expanduser(path)))
        videos.labels.append(label)
    if not videos.paths:
        return videos, [f"{file} lists no video; there is nothing to read. Write a line path,label for each video."]
    if videos.is_numbered:
        videos.labels = [str(int(label)) for label in videos.labels]  # 07 is 7
    return videos, []


def missing_files(videos: VideoList) -> list[str]:
    """Say so where most of a list's files are not there. Only some are looked for: a list may name a million."""
    if not videos.is_listed:
        return []
    looked_at = videos.paths[:: max(1, len(videos) // _LOOKED_AT)]
    missing = [path for path in looked_at if not os.path.exists(path)]
    if 2 * len(missing) <= len(looked_at):
        return []  # a few lost files are replaced as they are met, and reported
    return [
        f"{len(missing)} of {len(looked_at)} listed videos that were looked for do not exist (first {missing[0]}); "
        f"paths in lists are absolute or begin at data.root. Use data.root=<the folder that they begin at>, or mend "
        f"the list."
    ]


def _rows(lines: list[str]) -> list[list[str]]:
    """Split lines by commas where the first has one, otherwise by the last blanks of each: paths may hold blanks."""
    if lines and "," in lines[0]:
        return [[cell.strip() for cell in row] for row in csv.reader(lines, skipinitialspace=True)]
    return [line.strip().rsplit(None, 1) for line in lines]
