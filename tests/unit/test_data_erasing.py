"""Erasing is timm's, follows from each sample's seed, and leaves the generators as they were."""

import random

import pytest
import torch
from timm.data.random_erasing import RandomErasing

from vit_tp.data.erasing import Erasing
from vit_tp.errors import ConfigError

SEEDS = torch.tensor([5, 7, 2**62 + 3, 0, 11, 12, 13, 14])


def images(*shape, dtype=torch.float32):
    return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).to(dtype)


def by_hand(batch, seeds, prob, mode, count):
    """timm, with the generators seeded for each sample."""
    states = random.getstate(), torch.get_rng_state()
    erase, erased = RandomErasing(prob, mode=mode, max_count=count, device="cpu"), batch.clone()
    for image, seed in zip(erased, seeds.tolist(), strict=True):
        random.seed(seed), torch.manual_seed(seed)
        erase(image)
    random.setstate(states[0]), torch.set_rng_state(states[1])
    return erased


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mode", ["pixel", "rand", "const"])
@pytest.mark.parametrize("prob", [0.5, 1.0])
def test_it_is_timms(prob, mode, count, dtype):
    batch = images(8, 3, 20, 24, dtype=dtype)
    ours = Erasing(prob, mode, count).apply(batch, SEEDS)
    assert torch.equal(ours, by_hand(batch, SEEDS, prob, mode, count))
    touched = (ours != batch).flatten(1).any(1)
    assert touched.any() and touched.all() == (prob == 1)


@pytest.mark.parametrize("mode", ["pixel", "rand", "const"])
def test_a_sample_is_erased_alike_in_any_micro_batch(mode):
    batch, erasing = images(8, 3, 20, 24), Erasing(0.7, mode, 2)
    whole = erasing.apply(batch, SEEDS)
    parts = [erasing.apply(batch[at : at + 2], SEEDS[at : at + 2]) for at in (0, 2, 4, 6)]
    backwards = erasing.apply(batch.flip(0), SEEDS.flip(0)).flip(0)
    assert torch.equal(whole, torch.cat(parts)) and torch.equal(whole, backwards)


@pytest.mark.parametrize("mode", ["pixel", "rand", "const"])
def test_the_box_of_a_clip_is_the_same_in_all_frames(mode):
    clips = images(8, 3, 5, 20, 24)
    erased = Erasing(1.0, mode).apply(clips, SEEDS)
    is_erased = erased != clips
    assert is_erased.flatten(1).any(1).all()
    assert (is_erased == is_erased[:, :1, :1]).all()
    boxes = Erasing(1.0, mode).apply(clips[:, :, 0].contiguous(), SEEDS) != clips[:, :, 0]
    assert torch.equal(is_erased[:, :, 3], boxes), "the box is that of an image under the same seed"
    for sample, where in zip(erased, is_erased[:, 0, 0]):
        colours = sample[..., where]  # (C, T, pixels)
        if mode == "rand":
            assert (colours == colours[:, :1, :1]).all() and len(colours[:, 0, 0].unique()) == 3
        elif mode == "const":
            assert (colours == 0).all()
        else:
            assert len(colours.unique()) > colours.numel() * 0.9


def test_clips_in_another_memory_format():
    clips = images(2, 3, 4, 20, 24)
    expected = Erasing(1.0).apply(clips, SEEDS[:2])
    assert torch.equal(Erasing(1.0).apply(clips.contiguous(memory_format=torch.channels_last_3d), SEEDS[:2]), expected)


def test_arguments_and_generators_stay_as_they_are():
    batch = images(8, 3, 20, 24)
    before = random.getstate(), torch.get_rng_state()
    Erasing(1.0, "pixel", 3).apply(batch, SEEDS)
    with pytest.raises(RuntimeError):  # no noise in whole numbers
        Erasing(1.0).apply(batch.long(), SEEDS)
    assert torch.equal(batch, images(8, 3, 20, 24))
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_off_is_off():
    batch = images(2, 3, 8, 8)
    assert not Erasing(0.0).is_on and Erasing(0.1).is_on
    assert Erasing(0.0).apply(batch, SEEDS[:2]) is batch


@pytest.mark.parametrize("wrong", [{"prob": 1.5}, {"prob": 0.5, "mode": "noise"}, {"prob": 0.5, "count": 0}])
def test_what_makes_no_sense(wrong):
    with pytest.raises(ConfigError, match=r"data\.random_erasing=.*data\.erasing_count.*Use for example"):
        Erasing(**wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["pixel", "rand", "const"])
def test_on_a_device_the_generator_of_the_device_is_put_back(mode):
    batch = images(8, 3, 20, 24).cuda()
    before = torch.cuda.get_rng_state()
    first, second = (Erasing(0.8, mode, 2).apply(batch, SEEDS.cuda()) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(torch.cuda.get_rng_state(), before)
    on_cpu = Erasing(0.8, mode, 2).apply(images(8, 3, 20, 24), SEEDS)
    assert torch.equal((first != batch).cpu(), on_cpu != images(8, 3, 20, 24)), "boxes are drawn by Python"
