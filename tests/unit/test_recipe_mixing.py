"""Mixing is timm's, follows from its seed, and keeps each target with its image."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from timm.data import Mixup

from vit_tp.config import MixingConfig
from vit_tp.errors import ConfigError
from vit_tp.recipe.mixing import Mixer

MIXUP, CUTMIX = MixingConfig(mixup_alpha=0.8), MixingConfig(cutmix_alpha=1.0)
BOTH = MixingConfig(mixup_alpha=0.8, cutmix_alpha=1.0, prob=0.9)
MINMAX = MixingConfig(mixup_alpha=0.8, cutmix_minmax=[0.2, 0.8])
K = 6


CONFIGS = {"mixup": MIXUP, "cutmix": CUTMIX, "both": BOTH, "minmax": MINMAX}
MODES = ["batch", "pair", "elem"]
SHAPES = {"images": (1, 10, 14), "clips": (2, 3, 10, 14)}


def batch(size=6, shape=(1, 10, 14)):
    """Samples of one value each: sample i is all i, of class i."""
    values = torch.arange(size).float().view(size, *[1] * len(shape))
    return values.expand(size, *shape).contiguous(), torch.arange(size) % K


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_targets_follow_the_pixels(name, mode, shape):
    """The share of image i in the pixels is the share of class i in the target, for each draw."""
    images, targets = batch(shape=SHAPES[shape])
    mixer, values = Mixer(replace(CONFIGS[name], mode=mode), 0.0, K), torch.arange(6.0)
    for seed in range(20):
        mixed, soft = mixer.mix(images, targets, seed)
        assert mixed.shape == images.shape and soft.shape == (6, K) and soft.dtype == torch.float32
        torch.testing.assert_close(soft.sum(1), torch.ones(6))
        torch.testing.assert_close(soft @ values, mixed.flatten(1).mean(1))


def timms(cfg, images, targets, seed):
    """timm's Mixup called whole."""
    mixup = Mixup(
        cfg.mixup_alpha,
        cfg.cutmix_alpha,
        cfg.cutmix_minmax,
        cfg.prob,
        cfg.switch_prob,
        cfg.mode,
        label_smoothing=0.1,
        num_classes=K,
    )
    state = np.random.get_state()
    np.random.seed(np.random.SeedSequence(seed).generate_state(4))
    mixed = mixup(images.clone(), targets)
    np.random.set_state(state)
    return mixed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_images_and_targets_are_timms_wherever_each_is_mixed(name, mode):
    cfg = replace(CONFIGS[name], mode=mode, prob=0.7)
    images, targets = torch.rand(6, 3, 10, 14, generator=torch.Generator().manual_seed(0)), torch.arange(6) % K
    for seed in range(30):
        expected = timms(cfg, images, targets, seed)
        here, there = Mixer(cfg, 0.1, K), Mixer(cfg, 0.1, K)
        assert torch.equal(here.mix_images(images, seed), expected[0])
        assert torch.equal(there.mix_targets(targets, seed, (10, 14)), expected[1])
        assert all(torch.equal(a, b) for a, b in zip(here.mix(images, targets, seed), expected, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_clip_is_mixed_as_its_frames_are(name, mode):
    mixer = Mixer(replace(CONFIGS[name], mode=mode), 0.1, K)
    clips = torch.rand(6, 3, 4, 10, 14, generator=torch.Generator().manual_seed(0))
    for seed in range(10):
        mixed = mixer.mix_images(clips, seed)
        for frame in range(4):
            assert torch.equal(mixed[:, :, frame], mixer.mix_images(clips[:, :, frame], seed))
        in_another_format = clips.contiguous(memory_format=torch.channels_last_3d)
        assert torch.equal(mixer.mix_images(in_another_format, seed), mixed)


def test_the_size_of_the_image_counts_for_the_targets():
    """A box that stands out of a small image is cut at another place."""
    mixer = Mixer(CUTMIX, 0.0, K)
    sizes = [mixer.mix_targets(torch.arange(6), 3, size) for size in ((10, 14), (14, 10), (224, 224))]
    assert not torch.equal(sizes[0], sizes[1]) and not torch.equal(sizes[0], sizes[2])


def test_a_mix_follows_from_its_seed_alone():
    images, targets = batch()
    mixer = Mixer(BOTH, 0.1, K)
    first = mixer.mix(images, targets, 3)
    mixer.mix(images, targets, 4), np.random.rand(3)
    again, other = mixer.mix(images, targets, 3), mixer.mix(images, targets, 2**63)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])


def test_arguments_and_global_generators_stay_as_they_are():
    images, targets = batch()
    kept = images.clone()
    numpy_state, torch_state = np.random.get_state()[1].tobytes(), torch.get_rng_state()
    for seed in range(5):
        for mode in MODES:
            Mixer(replace(BOTH, mode=mode), 0.1, K).mix(images, targets, seed)
    assert torch.equal(images, kept)
    assert np.random.get_state()[1].tobytes() == numpy_state and torch.equal(torch.get_rng_state(), torch_state)


def test_off_by_default():
    assert not Mixer(MixingConfig(), 0.1, K).is_on
    assert Mixer(MIXUP, 0.1, K).is_on and Mixer(CUTMIX, 0.1, K).is_on
    assert Mixer(MixingConfig(cutmix_minmax=[0.2, 0.8]), 0.1, K).is_on
    Mixer(MixingConfig(), 0.1, K).check_micro_batch_size(3)


def test_an_odd_micro_batch_is_refused():
    with pytest.raises(ConfigError, match=r"compute\.micro_batch_size=5 is odd.*Use compute\.micro_batch_size=6"):
        Mixer(MIXUP, 0.0, K).mix(*batch(5), 0)
    with pytest.raises(ConfigError, match="is odd"):
        Mixer(replace(BOTH, mode="elem"), 0.0, K).mix_targets(torch.arange(5), 0, (8, 8))


@pytest.mark.parametrize("sides", [[0.8, 0.2], [0.3, 0.3], [0.2], [-0.1, 0.5], [0.5, 1.1]])
def test_a_range_of_boxes_that_is_none(sides):
    with pytest.raises(ConfigError, match=r"recipe\.mixing\.cutmix_minmax=\[.*0 <= low < high <= 1\. Use for example"):
        Mixer(MixingConfig(cutmix_minmax=sides), 0.0, K)


def test_a_mode_that_timm_would_take_for_another():
    with pytest.raises(ConfigError, match=r"recipe\.mixing\.mode=half .*batch, pair, elem.*Use recipe\.mixing"):
        Mixer(replace(BOTH, mode="half"), 0.0, K)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
def test_on_a_device(mode):
    mixer = Mixer(replace(BOTH, mode=mode), 0.1, K)
    images, targets = torch.rand(6, 3, 10, 14), torch.arange(6) % K
    for seed in range(10):
        mixed, soft = mixer.mix(images.cuda(), targets.cuda(), seed)
        torch.testing.assert_close(mixed.cpu(), mixer.mix_images(images, seed))
        torch.testing.assert_close(soft.cpu(), mixer.mix_targets(targets, seed, (10, 14)))
