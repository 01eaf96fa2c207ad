"""How is a folder of images read, augmented and normalised?

    <data.root>/train/<class>/<image>      <data.root>/val/<class>/<image>

Files, classes and their order are found by timm's own reader, so class numbers agree with those of timm's scripts; the
transforms are timm's. What timm passes over in silence (an unreadable image, an image outside a class folder, a class
folder without images, a validation class that training lacks) is refused here by name.

Does not know: batches, ranks, the model.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from timm.data.readers.img_extensions import get_img_extensions
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.utils.misc import natural_key
from torch import Tensor

from vit_tp.config import DataConfig
from vit_tp.data.sampling import sample_randomness
from vit_tp.data.spec import DataSpec
from vit_tp.errors import ConfigError, DataError

IN_CHANS = 3
SPLITS = ("train", "val")
_SHOWN = 5


def describe_image_folder(data: DataConfig) -> DataSpec:
    """Count images and classes without opening an image.

    Args:
        data: The data group of the config; root and the augmentation knobs are read.

    Raises:
        ConfigError: data.root is missing, or timm refuses an augmentation knob.
        DataError: The folder is not laid out as the module says; every complaint, one a line.
    """
    root = _root(data)
    build_transform(data, "train", (32, 32))  # timm parses its policy strings here, whatever the size
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
    return DataSpec(len(found["train"]), len(found["val"]), len(train), IN_CHANS)


def build_transform(data: DataConfig, split: str, img_size: tuple[int, int]) -> Callable[[Image.Image], Tensor]:
    """Build timm's transform from the knobs of the config.

    Args:
        data: The data group of the config.
        split: "train": random crop, flip and what the knobs ask for; "val": resize and centre crop.
        img_size: Height and width (Y, X) of the result, in pixels.

    Raises:
        ConfigError: timm refuses a knob.
    """
    is_training = split == "train"
    try:
        return create_transform(
            (IN_CHANS, *img_size),
            is_training=is_training,
            scale=tuple(data.crop_scale),
            hflip=data.hflip,
            color_jitter=data.color_jitter or None,
            auto_augment=data.auto_augment,
            # timm's "random" picks bilinear or bicubic for each training image; an evaluation needs one of them.
            interpolation="bicubic" if data.interpolation == "random" and not is_training else data.interpolation,
            re_prob=data.random_erasing,
            re_mode="pixel",
            crop_pct=data.eval_crop,
            mean=tuple(data.mean or IMAGENET_DEFAULT_MEAN),
            std=tuple(data.std or IMAGENET_DEFAULT_STD),
        )
    except (AssertionError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"data.auto_augment={data.auto_augment}, data.interpolation={data.interpolation}, "
            f"data.crop_scale={list(data.crop_scale)} and data.color_jitter={data.color_jitter} do not make a timm "
            f"transform ({type(error).__name__}: {error or 'assertion failed'}). Use for example "
            f"data.auto_augment=rand-m9-mstd0.5-inc1 or null, data.interpolation=bicubic, data.crop_scale=[0.08,1.0]."
        ) from error


class ImageFolder:
    """One split of a folder of images.

    Args:
        data: The data group of the config.
        split: "train" or "val".
        img_size: Height and width (Y, X) of an image, in pixels.
        seed: run.seed, for the augmentation.
    """

    def __init__(self, data: DataConfig, split: str, img_size: tuple[int, int], seed: int) -> None:
        root = _root(data)
        # The folders of training number the classes, also where val holds only some of them. describe() has made sure
        # that each holds images, so timm would number them alike, but only after walking through all of training.
        self.class_to_idx = {name: index for index, name in enumerate(_class_folders(root / "train"))}
        self._samples, _ = find_images_and_targets(str(root / split), class_to_idx=self.class_to_idx)
        if not self._samples:
            raise DataError(f"{root / split} holds no image; there is nothing to read. Use another data.root.")
        self._transform = build_transform(data, split, img_size)
        self._is_random = split == "train"
        self._img_size = tuple(img_size)
        self._seed = seed

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Shape (3, Y, X) of every image."""
        return (IN_CHANS, *self._img_size)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._samples)

    def load(self, index: int, epoch: int) -> tuple[Tensor, int]:
        """Read, augment and normalise one image; see Source.load."""
        path, label = self._samples[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        if not self._is_random:
            return self._transform(image), label
        with sample_randomness(self._seed, epoch, index):
            return self._transform(image), label

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return self._samples[index][0]


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
    samples, class_to_idx = find_images_and_targets(str(folder), sort=False)
    class_names = {index: class_name for class_name, index in class_to_idx.items()}
    return [(path, class_names[index]) for path, index in samples]


def _class_folders(folder: Path) -> list[str]:
    """Return the folders of a split in timm's order: 2 before 10."""
    return sorted((entry.name for entry in os.scandir(folder) if entry.is_dir()), key=natural_key)


def _layout_complaints(folder: Path, samples: list[tuple[str, str]]) -> list[str]:
    """Say what is wrong with a split's folder. timm would take any leaf folder's name for a class."""
    extensions = " ".join(sorted(get_img_extensions()))
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
