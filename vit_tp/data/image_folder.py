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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from timm.data.readers.img_extensions import get_img_extensions
from timm.data.readers.reader_image_folder import find_images_and_targets

from vit_tp.config import DataConfig
from vit_tp.data.boxes import Box, Grid, WidthHeight
from vit_tp.data.folders import SPLITS, class_folders, class_of, layout_complaints, require_root, unknown_complaints
from vit_tp.data.images import ImagePipeline, picture_size
from vit_tp.data.order import SampleKey
from vit_tp.data.spec import DataSpec, Form, Sample
from vit_tp.data.transforms import IN_CHANS, normalisation
from vit_tp.data.wording import listed
from vit_tp.errors import ConfigError, DataError

EXTENSIONS = frozenset(get_img_extensions()) | {".webp", ".bmp", ".tif", ".tiff"}
_READS = "train/<class>/<image> and val/<class>/<image>"
_HEADER_THREADS = 16


def describe_image_folder(data: DataConfig) -> DataSpec:
    """Count images and classes without opening an image; with data.tile_size, windows, from the images' headers.

    Args:
        data: The data group of the config.

    Raises:
        ConfigError: data.root is missing, timm refuses an augmentation knob, or a package is missing.
        DataError: The folder is not laid out as the module says; every complaint, one a line.
    """
    root = require_root(data, _READS)
    for split in SPLITS:
        ImagePipeline(data, Form(split, 0, (32, 32)))  # timm parses its policy strings here, whatever the size
    complaints = []
    found: dict[str, list[str]] = {}
    for split in SPLITS:
        folder = root / split
        if not folder.is_dir():
            complaints.append(
                f"{folder} is not a folder; images are read from <data.root>/{split}/<class>/<image>. "
                f"Use data.root=<the folder that holds train and val>."
            )
            continue
        found[split] = [path for path, _ in find_images_and_targets(str(folder), types=EXTENSIONS, sort=False)[0]]
        # timm would take any leaf folder's name for a class
        complaints += layout_complaints(folder, found[split], "image", sorted(EXTENSIONS))
    if not complaints:
        train, val = ({class_of(path) for path in found[split]} for split in SPLITS)
        complaints = unknown_complaints(train, val, f"in {root / 'train'}", f"in {root / 'val'}")
    if complaints:
        raise DataError("\n".join(complaints))
    mean, std = normalisation(data)
    counts, notes = {}, []
    for split in SPLITS:
        counts[split], of_split = _count(found[split], data)
        notes += [f"{root / split}: {note}" for note in of_split]
    names = tuple(class_folders(root / "train"))
    return DataSpec(counts["train"], counts["val"], len(train), IN_CHANS, mean, std, False, tuple(notes), names)


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
        notes.append(f"{len(unread)} of {len(paths)} images have no header that can be read ({listed(unread)})")
    grid = Grid(sizes, _tile_size(data))
    notes.append(f"{len(grid)} windows of {data.tile_size} x {data.tile_size} pixels in {len(paths)} images")
    return len(grid), notes


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
        root = require_root(data, _READS)
        self.form = form
        # The folders of training number the classes, also where val holds only some of them. describe() has made sure
        # that each holds images, so timm would number them alike, but only after walking through all of training.
        self.class_to_idx = {name: index for index, name in enumerate(class_folders(root / "train"))}
        folder = root / form.split
        images, _ = find_images_and_targets(str(folder), types=EXTENSIONS, class_to_idx=self.class_to_idx)
        if not images:
            raise DataError(f"{folder} holds no image; there is nothing to read. Use another data.root.")
        # Arrays: each of a million strings and tuples would be copied into each worker as it is counted there.
        self._paths = np.array([os.fsencode(path) for path, _ in images])
        self._labels = np.array([label for _, label in images], np.int64)
        self._pipeline = ImagePipeline(data, form)
        self._grid = None
        if data.tile_size is not None:
            self._grid = Grid(_sizes((path for path, _ in images), data), _tile_size(data))

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of their numbers."""
        return tuple(self.class_to_idx)

    def __len__(self) -> int:
        """Return the number of images, or of their windows."""
        return len(self._paths) if self._grid is None else len(self._grid)

    def load(self, key: SampleKey) -> Sample:
        """Read and augment one image or window; see Source.load."""
        image, window = self._find(key.index)
        return Sample(self._pipeline.load(self._path(image), key, window), int(self._labels[image]))

    def name(self, index: int) -> str:
        """Return the path of an image, and where in it the window lies: rows, then columns."""
        image, window = self._find(index)
        path = self._path(image)
        return path if window is None else f"{path} [{window.top}:{window.bottom}, {window.left}:{window.right}]"

    def _find(self, index: int) -> tuple[int, Box | None]:
        return (index, None) if self._grid is None else self._grid.window(index)

    def _path(self, image: int) -> str:
        return os.fsdecode(self._paths[image])


def _tile_size(data: DataConfig) -> int:
    assert data.tile_size is not None
    if data.tile_size < 1:
        raise ConfigError(
            f"data.tile_size={data.tile_size} is not the side of a window; images are cut into windows of so many "
            f"pixels, each of them a sample. Use for example data.tile_size=512, or null for whole images."
        )
    return data.tile_size


def _sizes(paths: Iterable[str], data: DataConfig) -> list[WidthHeight | None]:
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
