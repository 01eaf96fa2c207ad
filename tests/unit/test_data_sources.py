"""Digits and folders of images: sizes, pixels, augmentation and what is refused."""

import importlib.util
import os
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.data.readers.img_extensions import get_img_extensions
from torchvision.transforms import functional as TF

from vit_tp.config import DataConfig
from vit_tp.data import digits
from vit_tp.data.faults import load_or_replace
from vit_tp.data.order import SampleKey
from vit_tp.data.sampling import sample_randomness
from vit_tp.data.sources import build_source, describe
from vit_tp.data.spec import Form
from vit_tp.errors import ConfigError, DataError

TRAIN, VAL = Form("train", 0, (16, 16)), Form("val", 0, (16, 16))


def write_image(path, colour=(200, 30, 90), size=(20, 16)):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(sum(colour)).integers(0, 255, (*size[::-1], 3)) // 4 + np.array(colour) // 2
    Image.fromarray(pixels.astype(np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 4), ("val", 2)):
        for number, name in enumerate(("2", "10", "1")):
            for i in range(count):
                write_image(tmp_path / split / name / f"{i}.png", (number * 60, i * 30, 50))
    return tmp_path


def folder_config(root, **knobs):
    return DataConfig(source="image_folder", root=str(root), **knobs)


def global_states():
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()


# digits


def test_the_written_sizes_and_statistics_of_the_digits_are_scikit_learns():
    data = load_digits()
    train, val = train_test_split(data.images / 16, test_size=360, random_state=0, stratify=data.target)
    assert describe(DataConfig()) == digits.SPEC
    assert (len(train), len(val), len(data.target_names)) == (1437, 360, digits.SPEC.num_classes)
    assert (train.mean(), train.std()) == pytest.approx((digits.SPEC.mean[0], digits.SPEC.std[0]), abs=1e-5)


@pytest.mark.parametrize(("split", "part"), [("train", 0), ("val", 1)])
def test_a_digit_is_scikit_learns_image(split, part):
    data = load_digits()
    images = train_test_split(data.images, data.target, test_size=360, random_state=0, stratify=data.target)
    source = build_source(DataConfig(), Form(split, 0, (8, 8)))
    image, label = source.load(SampleKey(0, 7))
    assert image.shape == source.form.shape_at(0, source.in_chans) == (1, 8, 8) and image.dtype == torch.uint8
    np.testing.assert_allclose(image[0], images[part][7] * 255 / 16, atol=0.5)
    assert label == images[2 + part][7] and type(label) is int
    assert len(source) == len(images[part])


def test_the_digits_do_not_depend_on_seed_or_epoch():
    first, second = (build_source(DataConfig(), Form("train", seed, (8, 8))) for seed in (0, 1))
    assert torch.equal(first.load(SampleKey(0, 3)).pixels, second.load(SampleKey(5, 3, 1)).pixels)


def test_a_digit_is_resized_to_the_model():
    small, large = (
        build_source(DataConfig(), Form("val", 0, size)).load(SampleKey(0, 0)).pixels for size in ((8, 8), (16, 24))
    )
    assert (large.int() - TF.resize(small, [16, 24]).int()).abs().max() <= 1


# image folders


def test_a_folder_is_described_without_opening_an_image(folder):
    for path in folder.rglob("*.png"):
        path.write_bytes(b"not an image")
    spec = describe(folder_config(folder))
    assert (spec.num_train, spec.num_val, spec.num_classes, spec.in_chans) == (12, 6, 3, 3)


def test_classes_are_numbered_as_timm_does(folder):
    from timm.data import ImageDataset

    theirs = ImageDataset(str(folder / "train"))
    ours = build_source(folder_config(folder), TRAIN)
    assert ours.class_to_idx == theirs.reader.class_to_idx == {"1": 0, "2": 1, "10": 2}
    assert [ours.load(SampleKey(0, i)).label for i in range(len(ours))] == [theirs[i][1] for i in range(len(theirs))]


def test_a_folder_holds_no_object_for_each_image(folder):
    """Workers are forks, and counting references to an object copies the page that it lies in."""
    source = build_source(folder_config(folder), TRAIN)
    held = [value for value in vars(source).values() if isinstance(value, list | tuple | dict)]
    assert len(source) == 12 and all(len(value) < 12 for value in held)


def test_a_validation_split_with_fewer_classes_keeps_the_numbers_of_training(folder):
    for path in (folder / "val" / "1").iterdir():
        path.unlink()
    assert describe(folder_config(folder)).num_val == 4
    source = build_source(folder_config(folder), VAL)
    assert [source.load(SampleKey(0, i)).label for i in range(4)] == [1, 1, 2, 2]


def test_a_validation_image_is_timms(folder):
    from timm.data import ImageDataset, create_transform

    transform = create_transform((3, 16, 24), interpolation="bicubic", crop_pct=0.9, normalize=False)
    theirs = ImageDataset(str(folder / "val"), transform=transform)
    ours = build_source(folder_config(folder, eval_crop=0.9, interpolation="random"), Form("val", 0, (16, 24)))
    for index in range(len(ours)):
        image, label = ours.load(SampleKey(3, index))
        assert torch.equal(image, theirs[index][0]) and label == theirs[index][1]
        assert image.shape == ours.form.shape_at(3, ours.in_chans) and image.dtype == torch.uint8


def test_pixels_are_scaled_as_asked_and_as_imagenet_otherwise(folder):
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    spec = describe(folder_config(folder, mean=[0.5, 0.4, 0.3], std=[0.25, 0.5, 1.0]))
    assert (spec.mean, spec.std) == ((0.5, 0.4, 0.3), (0.25, 0.5, 1.0))
    spec = describe(folder_config(folder))
    assert (spec.mean, spec.std) == (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


def test_images_of_all_formats_are_found(folder):
    for name in ("a.JPG", "b.jpeg", "c.webp", "d.tif", "e.TIFF", "f.bmp"):
        write_image(folder / "train" / "2" / name)
    (folder / "train" / "2" / "notes.txt").write_text("no image")
    source = build_source(folder_config(folder), TRAIN)
    assert describe(folder_config(folder)).num_train == len(source) == 12 + 6
    assert all(source.load(SampleKey(0, index)).pixels.shape == (3, 16, 16) for index in range(18))
    assert get_img_extensions() == (".png", ".jpg", ".jpeg"), "timm's own list is not ours to change"


AUGMENTED = {"auto_augment": "rand-m9-mstd0.5-inc1", "interpolation": "random"}


def test_an_augmented_image_follows_from_seed_and_key_alone(folder):
    config = folder_config(folder, **AUGMENTED)
    first = build_source(config, TRAIN)
    image = first.load(SampleKey(0, 1)).pixels
    first.load(SampleKey(0, 2))
    torch.rand(5), np.random.rand(5), random.random()
    assert torch.equal(build_source(config, TRAIN).load(SampleKey(0, 1)).pixels, image)
    assert torch.equal(pickle.loads(pickle.dumps(first)).load(SampleKey(0, 1)).pixels, image)
    assert not torch.equal(first.load(SampleKey(1, 1)).pixels, image)
    assert not torch.equal(first.load(SampleKey(0, 1, 1)).pixels, image)
    assert not torch.equal(build_source(config, Form("train", 1, (16, 16))).load(SampleKey(0, 1)).pixels, image)


def test_augmentation_leaves_the_global_generators_alone(folder):
    source = build_source(folder_config(folder, **AUGMENTED), TRAIN)
    before = global_states()
    source.load(SampleKey(0, 0))
    assert global_states() == before


def test_the_states_come_back_after_an_error_too():
    before = global_states()
    with pytest.raises(KeyError), sample_randomness(0, SampleKey(0, 0)):
        torch.rand(3), np.random.rand(3), random.random()
        raise KeyError
    assert global_states() == before


def test_streams_of_neighbouring_samples_have_nothing_in_common():
    """P53: no two of (seed, epoch, index) share a stream, short keys included."""

    def draw(seed, epoch, index):
        with sample_randomness(seed, SampleKey(epoch, index)):
            return random.random(), np.random.rand(), torch.rand(1).item()

    draws = [draw(seed, epoch, index) for seed in range(3) for epoch in range(3) for index in range(3)]
    for values in zip(*draws, strict=True):
        assert len(set(values)) == 27


# windows


@pytest.fixture
def windows(tmp_path):
    """Images of 100 x 70, 64 x 64, 20 x 30 and a broken one; blue says which, red and green where."""
    for split in ("train", "val"):
        for number, (width, height) in enumerate(((100, 70), (64, 64), (20, 30))):
            x, y = np.meshgrid(np.arange(width), np.arange(height))
            image = np.stack([x, y, np.full_like(x, number)], -1).astype(np.uint8)
            (tmp_path / split / "a").mkdir(parents=True, exist_ok=True)
            tile = (16, 16) if number == 0 else None
            tifffile.imwrite(tmp_path / split / "a" / f"{number}.tif", image, photometric="rgb", tile=tile)
        (tmp_path / split / "a" / "3.png").write_bytes(b"broken")
    return tmp_path


def test_each_window_of_each_image_is_a_sample(windows):
    config = folder_config(windows, tile_size=64, eval_crop=1.0)
    spec = describe(config)
    assert (spec.num_train, spec.num_val) == (4 + 1 + 1 + 1, 7)
    folders = {split: windows / split for split in ("train", "val")}
    assert list(spec.notes) == [
        f"{folder}: {note}"
        for folder in folders.values()
        for note in (
            f"1 of 4 images have no header that can be read ({folder / 'a' / '3.png'})",
            "7 windows of 64 x 64 pixels in 4 images",
        )
    ]
    source = build_source(config, Form("val", 0, (64, 64)))
    assert len(source) == 7
    folder = windows / "val" / "a"
    assert [source.name(index) for index in range(7)] == [
        *(f"{folder / '0.tif'} [{y}:{y + 64}, {x}:{x + 64}]" for y in (0, 6) for x in (0, 36)),
        f"{folder / '1.tif'} [0:64, 0:64]",
        f"{folder / '2.tif'} [0:30, 0:20]",
        str(folder / "3.png"),
    ]
    for index, (x, y) in enumerate(((0, 0), (36, 0), (0, 6), (36, 6))):
        pixels = source.load(SampleKey(0, index)).pixels
        assert pixels[:, 0, 0].tolist() == [x, y, 0] and pixels[:, 63, 63].tolist() == [x + 63, y + 63, 0]


def test_a_window_is_augmented_within_itself(windows):
    source = build_source(folder_config(windows, tile_size=64), Form("train", 0, (32, 32)))
    for epoch in range(10):
        red, green, blue = source.load(SampleKey(epoch, 3)).pixels.flatten(1).float()
        assert red.min() >= 35 and red.max() <= 100 and green.min() >= 5 and green.max() <= 70 and blue.max() == 0


def test_a_broken_image_is_one_fault(windows):
    key = SampleKey(0, 6)
    source = build_source(folder_config(windows, tile_size=64), Form("train", 0, (32, 32)))
    loaded = load_or_replace(source, key)
    assert loaded.key != key and loaded.sample is not None
    [fault, *_] = loaded.faults
    assert fault.name == str(windows / "train" / "a" / "3.png") and "no picture that PIL knows" in fault.reason
    val = load_or_replace(build_source(folder_config(windows, tile_size=64), Form("val", 0, (32, 32))), key)
    assert val.sample is None and val.faults[0].replaced_by is None


def test_windows_of_tiled_images_need_a_package_that_is_named(windows, monkeypatch):
    monkeypatch.setitem(sys.modules, "tifffile", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tifffile, which does, is not installed\. Use pip install 'vit-tp\[tiff\]'"):
        describe(folder_config(windows, tile_size=64))
    assert ["2 TIFFs" not in note and "3 TIFFs" in note for note in describe(folder_config(windows)).notes] == [
        True
    ] * 2


@pytest.mark.parametrize("tile_size", [0, -4])
def test_a_window_without_pixels(windows, tile_size):
    with pytest.raises(ConfigError, match=rf"data\.tile_size={tile_size} is not .*Use for example data\.tile_size=512"):
        describe(folder_config(windows, tile_size=tile_size))


# what cannot be read


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"text", "no picture that PIL knows"),
        (None, "truncated"),
        ("missing", "FileNotFoundError"),
    ],
)
def test_an_image_that_cannot_be_read_is_replaced_and_named(folder, content, reason):
    source = build_source(folder_config(folder), TRAIN)
    path = Path(source.name(5))
    if content == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-400] if content is None else content)
    loaded = load_or_replace(source, SampleKey(0, 5))
    [fault] = loaded.faults
    assert fault.name == str(path) and reason in fault.reason and "\n" not in fault.reason
    assert fault.replaced_by == source.name(loaded.key.index) != str(path)
    assert torch.equal(loaded.sample.pixels, source.load(loaded.key).pixels)


def test_an_image_that_never_comes_is_replaced(folder):
    source = build_source(folder_config(folder, timeout_s=0.3), TRAIN)
    path = Path(source.name(5))
    path.unlink(), os.mkfifo(path)
    loaded = load_or_replace(source, SampleKey(0, 5))
    assert "longer than data.timeout_s=0.3" in loaded.faults[0].reason and loaded.sample is not None
    os.close(os.open(path, os.O_RDWR))


# what is refused


def test_an_unknown_source_names_the_near_one():
    with pytest.raises(ConfigError, match=r"data\.source=image_foldr.*Use data\.source=image_folder"):
        describe(DataConfig(source="image_foldr"))


def test_a_root_that_is_not_set_or_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.root is not set.*Use data\.root="):
        describe(DataConfig(source="image_folder"))
    with pytest.raises(DataError, match=r"nowhere is not a folder.*Use data\.root="):
        describe(folder_config(tmp_path / "nowhere"))


def test_every_missing_split_is_named_at_once(tmp_path):
    with pytest.raises(DataError) as caught:
        describe(folder_config(tmp_path))
    assert [f"{tmp_path / split} is not a folder" in str(caught.value) for split in ("train", "val")] == [True, True]


def test_no_classes_and_no_images(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "val" / "cat").mkdir(parents=True)
    (tmp_path / "val" / "cat" / "notes.txt").write_text("no image")
    with pytest.raises(DataError, match=r"train holds no class folder") as caught:
        describe(folder_config(tmp_path))
    assert "val holds 1 class folders but no image" in str(caught.value)


def test_a_class_that_only_validation_has(folder):
    write_image(folder / "val" / "dog" / "0.png")
    with pytest.raises(DataError, match=r"1 of 4 classes in .*val are missing in .*train \(dog\)"):
        describe(folder_config(folder))


def test_an_empty_class_folder_would_shift_the_numbers_of_the_others(folder):
    (folder / "train" / "0").mkdir()
    with pytest.raises(DataError, match=r"1 of 4 class folders in .*train hold no image \(0\)"):
        describe(folder_config(folder))


@pytest.mark.parametrize("place", ["stray.png", "1/nested/deep.png"])
def test_an_image_outside_the_class_folders(folder, place):
    write_image(folder / "train" / place)
    with pytest.raises(DataError, match=r"1 of 13 images in .*train do not lie in .*<class> itself"):
        describe(folder_config(folder))


@pytest.mark.parametrize("knobs", [{"auto_augment": "rnad-m9"}, {"interpolation": "bicubik"}])
def test_a_knob_that_timm_refuses(folder, knobs):
    with pytest.raises(ConfigError, match=f"data.{next(iter(knobs))}={next(iter(knobs.values()))}"):
        describe(folder_config(folder, **knobs))
