"""The two steps of a transform are timm's own transform, bit for bit and draw for draw."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from vit_tp.config import DataConfig
from vit_tp.data.boxes import whole
from vit_tp.data.order import SampleKey
from vit_tp.data.sampling import sample_randomness
from vit_tp.data.transforms import build_transform, normalisation
from vit_tp.errors import ConfigError, DataError

KNOBS = {
    "crop and flip": {},
    "narrow crop": {"crop_scale": [0.5, 0.6], "crop_ratio": [0.3, 0.5], "hflip": 0.0},
    "both flips": {"hflip": 0.7, "vflip": 0.4},
    "bilinear": {"interpolation": "bilinear"},
    "random interpolation": {"interpolation": "random"},
    "colour jitter": {"color_jitter": 0.4},
    "RandAugment": {"auto_augment": "rand-m9-mstd0.5-inc1", "interpolation": "random"},
    "RandAugment, mean": {"auto_augment": "rand-m9-mstd0.5-inc1", "mean": [0.1, 0.9, 0.5]},
    "AutoAugment": {"auto_augment": "original-mstd0.5"},
    "AugMix": {"auto_augment": "augmix-m5-w4-d2"},
    "3-Augment": {"auto_augment": "3a", "color_jitter": 0.3},
}


def picture(width, height):
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))


def in_two_steps(transform, image):
    crop = transform.crop(image.size)
    return transform.finish(image.crop(crop.box), crop)


def theirs(data, is_training, img_size):
    """timm's transform as one would write it with timm alone."""
    mean, std = data.mean or (0.485, 0.456, 0.406), data.std or (0.229, 0.224, 0.225)
    if not is_training:
        return create_transform(
            (3, *img_size), interpolation=data.interpolation, crop_pct=data.eval_crop, normalize=False
        )
    return create_transform(
        (3, *img_size),
        is_training=True,
        scale=data.crop_scale,
        ratio=data.crop_ratio,
        hflip=data.hflip,
        vflip=data.vflip,
        color_jitter=data.color_jitter or None,
        auto_augment=data.auto_augment,
        interpolation=data.interpolation,
        mean=mean,
        std=std,
        normalize=False,
    )


def global_states():
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("img_size", [(32, 32), (24, 40)], ids=["square", "wide"])
@pytest.mark.parametrize("name", KNOBS)
def test_training_is_timms(name, img_size):
    data = DataConfig(**KNOBS[name])
    ours, timms = build_transform(data, True, img_size), theirs(data, True, img_size)
    results = []
    for index in range(12):
        image = picture(*((90, 60), (31, 77), (200, 20), (8, 9))[index % 4])
        with sample_randomness(0, SampleKey(0, index)):
            results.append(in_two_steps(ours, image))
            after = global_states()
        with sample_randomness(0, SampleKey(0, index)):
            assert torch.equal(results[-1], timms(image))
            assert global_states() == after, "the draws are not the same"
        assert results[-1].shape == (3, *img_size) and results[-1].dtype == torch.uint8


@pytest.mark.parametrize("img_size", [(32, 32), (24, 40)], ids=["square", "wide"])
@pytest.mark.parametrize("eval_crop", [0.875, 1.0, 0.5])
def test_evaluation_is_timms(img_size, eval_crop):
    data = DataConfig(eval_crop=eval_crop)
    ours, timms = build_transform(data, False, img_size), theirs(data, False, img_size)
    before = global_states()
    for size in ((90, 60), (31, 77), (200, 20), (8, 9)):
        image = picture(*size)
        assert torch.equal(in_two_steps(ours, image), timms(image))
    assert global_states() == before, "an evaluation draws nothing"


@pytest.mark.parametrize("img_size", [(32, 32), (24, 40), (40, 24)])
@pytest.mark.parametrize("eval_crop", [0.875, 1.0])
@pytest.mark.parametrize("size", [(640, 480), (300, 900)])
def test_an_evaluation_says_how_small_a_picture_may_come(img_size, eval_crop, size):
    """At the size that is enough nothing is blown up, and nothing moves by as much as a pixel of the result."""
    transform = build_transform(DataConfig(eval_crop=eval_crop), False, img_size)
    crop = transform.crop(size)
    assert crop.box == whole(size)
    x, y = np.meshgrid(np.linspace(0, 250, size[0]), np.linspace(0, 250, size[1]))
    image = Image.fromarray(np.stack([x, y, x], -1).astype(np.uint8))
    by = min(image.width // crop.min_size[0], image.height // crop.min_size[1])
    assert by > 1
    difference = (transform.finish(image.reduce(by), crop).float() - transform.finish(image, crop)).abs()
    assert difference.max() <= 250 / min(img_size)  # what lies between two neighbours, or less


def test_an_evaluation_never_draws_its_interpolation():
    data, bicubic = DataConfig(interpolation="random"), DataConfig(interpolation="bicubic")
    image = picture(90, 60)
    expected = theirs(bicubic, False, (32, 32))(image)
    assert all(torch.equal(in_two_steps(build_transform(data, False, (32, 32)), image), expected) for _ in range(4))


def test_a_crop_is_drawn_without_making_the_picture():
    transform = build_transform(DataConfig(), True, (32, 32))
    with sample_randomness(0, SampleKey(0, 0)):
        crop = transform.crop((2_000_000, 1_000_000))
    assert 0.08 * 2e12 * 0.99 < crop.box.area <= 2e12 and crop.min_size == (32, 32)


def test_mean_and_deviation_are_imagenets_where_none_are_given():
    assert normalisation(DataConfig()) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert normalisation(DataConfig(mean=[0.1, 0.2, 0.3], std=[1, 2, 3])) == ((0.1, 0.2, 0.3), (1, 2, 3))


@pytest.mark.parametrize("knobs", [{"auto_augment": "rnad-m9"}, {"interpolation": "bicubik"}, {"color_jitter": -1.0}])
def test_what_timm_refuses_is_named(knobs):
    [(name, value)] = knobs.items()
    with pytest.raises(ConfigError, match=f"data.{name}={value}.* do not make a timm transform .*Use for example"):
        build_transform(DataConfig(**knobs), True, (32, 32))


@pytest.mark.parametrize("size", [(1, 5000), (65000, 1)])
def test_a_picture_like_a_thread_is_a_fault_and_not_the_end_of_the_memory(size):
    """Its shorter side grown to the input's would make hundreds of millions of pixels."""
    with pytest.raises(DataError, match=r"is resized to cover .*\. Leave it out, or cut it"):
        build_transform(DataConfig(), False, (224, 224)).crop(size)
    build_transform(DataConfig(), False, (224, 224)).crop((300, 5000))
