"""Which images does a folder hold, and of which class is each?

    <data.root>/train/<class>/<image>      <data.root>/val/<class>/<image>

Files, classes and their order are found by timm's own reader, so class numbers agree with those of timm's scripts. What
timm passes over in silence (an image outside a class folder, a class folder without images, a validation class that
training lacks) is refused here by name. With data.tile_size each window of each image is a sample.

Does not know: how an image is read and augmented (images.py), batches, ranks, the model.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from timm.data.readers.img_extensions import get_img_extensions
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.utils.misc import natural_key

from vit_tp.config import DataConfig
from vit_tp.data.boxes import Box, Grid, WidthHeight
from vit_tp.data.images import ImagePipeline, picture_size
from vit_tp.data.order import SampleKey
from vit_tp.data.spec import DataSpec, Form, Sample
from vit_tp.data.transforms import IN_CHANS, normalisation
from vit_tp.errors import ConfigError, DataError

SPLITS = ("train", "val")
EXTENSIONS = frozenset(get_img_extensions()) | {".webp", ".bmp", ".tif", ".tiff"}
_SHOWN = 5
_HEADER_THREADS = 16


def describe_image_folder(data: DataConfig) -> DataSpec:
    """Count images and classes without opening an image; with data.tile_size, windows, from the images' headers.

    Args:
        data: The data group of the config.

    Raises:
        ConfigError: data.root is missing, timm refuses an augmentation knob, or a package is missing.
        DataError: The folder is not laid out as the module says; every complaint, one a line.
    """
    root = _root(data)
    for split in SPLITS:
        ImagePipeline(data, Form(split, 0, (32, 32)))  # timm parses its policy strings here, whatever the size
    complaints = []
    found: dict[str, list[tuple[str, str]]] = {}
    for split in SPLITS:
        if not (root / split).is_dir():
            complaints.append(
                f"{root / split} is not a folder; images are read from <data.root>/{split}/<class>/<image>. "
                f"Use data.root=<the folder that holds train and val>."
            )
            continue
        found[split] = _scan(root / split)
        complaints += _layout_complaints(root / split, found[split])
    if not complaints:
        train, val = ({class_name for _, class_name in found[split]} for split in SPLITS)
        unknown = sorted(val - train)
        if unknown:
            complaints.append(
                f"{len(unknown)} of {len(val)} classes in {root / 'val'} are missing in {root / 'train'} "
                f"({_listed(unknown)}); the model has no output for them. Add them to train or take them out of val."
            )
    if complaints:
        raise DataError("\n".join(complaints))
    mean, std = normalisation(data)
    counts, notes = {}, []
    for split in SPLITS:
        counts[split], of_split = _count([path for path, _ in found[split]], data)
        notes += [f"{root / split}: {note}" for note in of_split]
    return DataSpec(counts["train"], counts["val"], len(train), IN_CHANS, mean, std, notes=tuple(notes))


def _count(paths: list[str], data: DataConfig) -> tuple[int, list[str]]:
    """Return the samples of a split, and what a person should know about its images."""
    notes = []
    num_tiffs = sum(path.lower().endswith((".tif", ".tiff")) for path in paths)
    if num_tiffs and importlib.util.find_spec("tifffile") is None:
        notes.append(f"{num_tiffs} TIFFs; those with tiles or levels need pip install 'vit-tp[tiff]'")
    if data.tile_size is None:
        return len(paths), notes
    sizes = _sizes(paths, data)
    unread = [path for path, size in zip(paths, sizes) if size is None]
    if unread:
        notes.append(f"{len(unread)} of {len(paths)} images have no header that can be read ({_listed(unread)})")
    return len(Grid(sizes, _tile_size(data))), notes


class ImageFolder:
    """One split of a folder of images.

    Args:
        data: The data group of the config.
        form: Which split, and what its images are to look like.

    Raises:
        ConfigError: A knob cannot work.
        DataError: The split holds no image.
    """

    in_chans, views = IN_CHANS, 1

    def __init__(self, data: DataConfig, form: Form) -> None:
        root = _root(data)
        self.form = form
        # The folders of training number the classes, also where val holds only some of them. describe() has made sure
        # that each holds images, so timm would number them alike, but only after walking through all of training.
        self.class_to_idx = {name: index for index, name in enumerate(_class_folders(root / "train"))}
        folder = root / form.split
        self._images, _ = find_images_and_targets(str(folder), types=EXTENSIONS, class_to_idx=self.class_to_idx)
        if not self._images:
            raise DataError(f"{folder} holds no image; there is nothing to read. Use another data.root.")
        self._pipeline = ImagePipeline(data, form)
        self._grid = None
        if data.tile_size is not None:
            self._grid = Grid(_sizes([path for path, _ in self._images], data), _tile_size(data))

    def __len__(self) -> int:
        """Return the number of images, or of their windows."""
        return len(self._images) if self._grid is None else len(self._grid)

    def load(self, key: SampleKey) -> Sample:
        """Read and augment one image or window; see Source.load."""
        (path, label), window = self._find(key.index)
        return Sample(self._pipeline.load(path, key, window), label)

    def name(self, index: int) -> str:
        """Return the path of an image, and where in it the window lies: rows, then columns."""
        (path, _), window = self._find(index)
        return path if window is None else f"{path} [{window.top}:{window.bottom}, {window.left}:{window.right}]"

    def _find(self, index: int) -> tuple[tuple[str, int], Box | None]:
        if self._grid is None:
            return self._images[index], None
        image, window = self._grid.window(index)
        return self._images[image], window


def _tile_size(data: DataConfig) -> int:
    assert data.tile_size is not None
    if data.tile_size < 1:
        raise ConfigError(
            f"data.tile_size={data.tile_size} is not the side of a window; images are cut into windows of so many "
            f"pixels, each of them a sample. Use for example data.tile_size=512, or null for whole images."
        )
    return data.tile_size


def _sizes(paths: list[str], data: DataConfig) -> list[WidthHeight | None]:
    """Return width and height of each image; None where its header cannot be read."""

    def size_of(path: str) -> WidthHeight | None:
        try:
            return picture_size(path, data.timeout_s)
        except ConfigError:
            raise  # a package is missing: no image of the kind can be read
        except Exception:
            return None

    # Threads, because most of it is waiting for files.
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        return list(pool.map(size_of, paths))


def _root(data: DataConfig) -> Path:
    if not data.root:
        raise ConfigError(
            "data.root is not set; data.source=image_folder reads <data.root>/train/<class>/<image> and "
            "<data.root>/val/<class>/<image>. Use data.root=<the folder that holds train and val>."
        )
    root = Path(data.root).expanduser()
    if not root.is_dir():
        raise DataError(
            f"data.root={data.root} is not a folder (looked at {root.absolute()}); images are read from "
            f"train/<class> and val/<class> inside it. Use data.root=<the folder that holds train and val>."
        )
    return root


def _scan(folder: Path) -> list[tuple[str, str]]:
    """Return (path, class name) of each image below a split's folder, in no order."""
    samples, class_to_idx = find_images_and_targets(str(folder), types=EXTENSIONS, sort=False)
    class_names = {index: class_name for class_name, index in class_to_idx.items()}
    return [(path, class_names[index]) for path, index in samples]


def _class_folders(folder: Path) -> list[str]:
    """Return the folders of a split in timm's order: 2 before 10."""
    return sorted((entry.name for entry in os.scandir(folder) if entry.is_dir()), key=natural_key)


def _layout_complaints(folder: Path, samples: list[tuple[str, str]]) -> list[str]:
    """Say what is wrong with a split's folder. timm would take any leaf folder's name for a class."""
    extensions = " ".join(sorted(EXTENSIONS))
    class_names = _class_folders(folder)
    if not class_names:
        return [f"{folder} holds no class folder; each class is a folder of images. Make {folder}/<class>/<image>."]
    if not samples:
        return [f"{folder} holds {len(class_names)} class folders but no image; images end in {extensions}."]
    prefix = str(folder)
    misplaced = [path for path, _ in samples if os.path.dirname(os.path.dirname(path)) != prefix]
    if misplaced:
        return [
            f"{len(misplaced)} of {len(samples)} images in {folder} do not lie in {folder}/<class> itself "
            f"({_listed(misplaced)}), so their class is not clear. Move them, or use another data.root."
        ]
    images_of = Counter(class_name for _, class_name in samples)
    empty = [class_name for class_name in class_names if not images_of[class_name]]
    # In val a class may well have no image; in train it would shift the numbers of the classes after it.
    if empty and folder.name == "train":
        return [
            f"{len(empty)} of {len(class_names)} class folders in {folder} hold no image ({_listed(empty)}), and a "
            f"class without images cannot be learnt. Remove these folders or fill them (images end in {extensions})."
        ]
    return []


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
