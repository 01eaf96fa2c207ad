"""Digits and folders of images: sizes, pixels, augmentation and what is refused."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torchvision.transforms import functional as TF

from vit_tp.config import DataConfig
from vit_tp.data import digits
from vit_tp.data.sampling import sample_randomness
from vit_tp.data.sources import build_source, describe
from vit_tp.errors import ConfigError, DataError


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
    assert (train.mean(), train.std()) == pytest.approx((digits.MEAN, digits.STD), abs=1e-5)


@pytest.mark.parametrize(("split", "part"), [("train", 0), ("val", 1)])
def test_a_digit_is_scikit_learns_image_normalised(split, part):
    data = load_digits()
    images = train_test_split(data.images, data.target, test_size=360, random_state=0, stratify=data.target)
    source = build_source(DataConfig(), split, (8, 8), seed=0)
    image, label = source.load(7, epoch=0)
    assert image.shape == source.sample_shape == (1, 8, 8) and image.dtype == torch.float32
    np.testing.assert_allclose(image[0] * digits.STD + digits.MEAN, images[part][7] / 16, atol=1e-6)
    assert label == images[2 + part][7] and type(label) is int
    assert len(source) == len(images[part])


def test_the_digits_do_not_depend_on_seed_or_epoch():
    first, second = (build_source(DataConfig(), "train", (8, 8), seed) for seed in (0, 1))
    assert torch.equal(first.load(3, epoch=0)[0], second.load(3, epoch=5)[0])


def test_a_digit_is_resized_to_the_model():
    small, large = (build_source(DataConfig(), "val", size, 0).load(0, 0)[0] for size in ((8, 8), (16, 24)))
    torch.testing.assert_close(large, TF.resize(small, [16, 24]))


# image folders


def test_a_folder_is_described_without_opening_an_image(folder):
    for path in folder.rglob("*.png"):
        path.write_bytes(b"not an image")
    spec = describe(folder_config(folder))
    assert (spec.num_train, spec.num_val, spec.num_classes, spec.in_chans) == (12, 6, 3, 3)


def test_classes_are_numbered_as_timm_does(folder):
    from timm.data import ImageDataset

    theirs = ImageDataset(str(folder / "train"))
    ours = build_source(folder_config(folder), "train", (16, 16), 0)
    assert ours.class_to_idx == theirs.reader.class_to_idx == {"1": 0, "2": 1, "10": 2}
    assert [ours.load(i, 0)[1] for i in range(len(ours))] == [theirs[i][1] for i in range(len(theirs))]


def test_a_validation_split_with_fewer_classes_keeps_the_numbers_of_training(folder):
    for path in (folder / "val" / "1").iterdir():
        path.unlink()
    assert describe(folder_config(folder)).num_val == 4
    source = build_source(folder_config(folder), "val", (16, 16), 0)
    assert [source.load(i, 0)[1] for i in range(4)] == [1, 1, 2, 2]


def test_a_validation_image_is_timms(folder):
    from timm.data import ImageDataset, create_transform

    transform = create_transform((3, 16, 24), interpolation="bicubic", crop_pct=0.9)
    theirs = ImageDataset(str(folder / "val"), transform=transform)
    ours = build_source(folder_config(folder, eval_crop=0.9, interpolation="random"), "val", (16, 24), 0)
    for index in range(len(ours)):
        image, label = ours.load(index, epoch=3)
        assert torch.equal(image, theirs[index][0]) and label == theirs[index][1]
        assert image.shape == ours.sample_shape


def test_pixels_are_scaled_as_asked(folder):
    from timm.data import create_transform

    scale = {"mean": [0.5, 0.4, 0.3], "std": [0.25, 0.5, 1.0]}
    transform = create_transform((3, 16, 24), interpolation="bicubic", crop_pct=0.875, **scale)
    ours = build_source(folder_config(folder, **scale), "val", (16, 24), 0)
    with Image.open(ours.name(0)) as image:
        assert torch.equal(ours.load(0, epoch=0)[0], transform(image.convert("RGB")))


AUGMENTED = {"auto_augment": "rand-m9-mstd0.5-inc1", "random_erasing": 1.0, "interpolation": "random"}


def test_an_augmented_image_follows_from_seed_epoch_and_index_alone(folder):
    config = folder_config(folder, **AUGMENTED)
    first = build_source(config, "train", (16, 16), 0)
    image = first.load(1, epoch=0)[0]
    first.load(2, epoch=0)
    torch.rand(5), np.random.rand(5), random.random()
    assert torch.equal(build_source(config, "train", (16, 16), 0).load(1, epoch=0)[0], image)
    assert not torch.equal(first.load(1, epoch=1)[0], image)
    assert not torch.equal(build_source(config, "train", (16, 16), 1).load(1, epoch=0)[0], image)


def test_augmentation_leaves_the_global_generators_alone(folder):
    source = build_source(folder_config(folder, **AUGMENTED), "train", (16, 16), 0)
    before = global_states()
    source.load(0, 0)
    assert global_states() == before


def test_the_states_come_back_after_an_error_too():
    before = global_states()
    with pytest.raises(KeyError), sample_randomness(0, 0, 0):
        torch.rand(3), np.random.rand(3), random.random()
        raise KeyError
    assert global_states() == before


def test_streams_of_neighbouring_samples_have_nothing_in_common():
    """P53: no two of (seed, epoch, index) share a stream, short keys included."""

    def draw(seed, epoch, index):
        with sample_randomness(seed, epoch, index):
            return random.random(), np.random.rand(), torch.rand(1).item()

    draws = [draw(seed, epoch, index) for seed in range(3) for epoch in range(3) for index in range(3)]
    for values in zip(*draws, strict=True):
        assert len(set(values)) == 27


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
