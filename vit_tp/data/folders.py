"""How do folders tell the class of a file, and what is wrong with them?

    <data.root>/train/<class>/<file>       <data.root>/val/<class>/<file>

Classes are in timm's order, 2 before 10. What would make a class number doubtful (a file outside a class folder, a
class folder without files, a validation class that training lacks) is refused by name. No file is opened for that.

Does not know: images, videos, which files count as such.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from timm.utils.misc import natural_key

from vit_tp.config import DataConfig
from vit_tp.data.wording import listed
from vit_tp.errors import ConfigError, DataError

SPLITS = ("train", "val")


def require_root(data: DataConfig, reads: str) -> Path:
    """Return the folder that data.root names.

    Args:
        data: The data group of the config.
        reads: What is read in it, for a person.

    Raises:
        ConfigError: It is not set.
        DataError: There is no such folder.
    """
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


def class_folders(folder: Path) -> list[str]:
    """Return the folders of a split in timm's order: 2 before 10."""
    return sorted((entry.name for entry in os.scandir(folder) if entry.is_dir()), key=natural_key)


def class_of(path: str) -> str:
    """Return the class of a file that lies in a class folder itself: that folder's name."""
    return os.path.basename(os.path.dirname(path))


def layout_complaints(folder: Path, paths: Collection[str], kind: str, endings: Iterable[str]) -> list[str]:
    """Say what is wrong with a split's folder: one complaint, or none.

    Args:
        folder: <data.root>/<split>.
        paths: The files below it, at any depth, each beginning with `folder`.
        kind: What they are: "image" or "video".
        endings: Of the names of such files.
    """
    class_names, endings = class_folders(folder), " ".join(endings)
    if not class_names:
        return [f"{folder} holds no class folder; each class is a folder of {kind}s. Make {folder}/<class>/<{kind}>."]
    if not paths:
        return [
            f"{folder} holds {len(class_names)} class folders but no {kind}; names of {kind}s end in {endings}. "
            f"Fill them, or use another data.root."
        ]
    misplaced = [path for path in paths if os.path.dirname(os.path.dirname(path)) != str(folder)]
    if misplaced:
        return [
            f"{len(misplaced)} of {len(paths)} {kind}s in {folder} do not lie in {folder}/<class> itself "
            f"({listed(misplaced)}), so their class is not clear. Move them, or use another data.root."
        ]
    empty = sorted(set(class_names) - set(map(class_of, paths)), key=natural_key)
    # In val a class may well have no file; in train it would shift the numbers of the classes after it.
    if empty and folder.name == "train":
        return [
            f"{len(empty)} of {len(class_names)} class folders in {folder} hold no {kind} ({listed(empty)}), and a "
            f"class without {kind}s cannot be learnt. Remove these folders or fill them ({kind}s end in {endings})."
        ]
    return []


def unknown_complaints(train: Iterable[str], val: Iterable[str], in_train: str, in_val: str) -> list[str]:
    """Say which classes of validation the model would have no output for: one complaint, or none.

    Args:
        train: Classes of training.
        val: Classes of validation.
        in_train: Where those of training are, for a person.
        in_val: Where those of validation are.
    """
    wanted = set(val)
    unknown = sorted(wanted - set(train), key=natural_key)
    if not unknown:
        return []
    return [
        f"{len(unknown)} of {len(wanted)} classes {in_val} are missing {in_train} ({listed(unknown)}); the model has "
        f"no output for them. Add them to train or take them out of val."
    ]
