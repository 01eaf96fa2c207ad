"""Mixing is timm's, follows from its seed, and keeps each target with its image."""

import numpy as np
import pytest
import torch
from timm.data import Mixup

from vit_tp.config import MixingConfig
from vit_tp.errors import ConfigError
from vit_tp.recipe.mixing import Mixer

MIXUP, CUTMIX = MixingConfig(mixup_alpha=0.8), MixingConfig(cutmix_alpha=1.0)
BOTH = MixingConfig(mixup_alpha=0.8, cutmix_alpha=1.0, prob=0.9)
K = 6


def batch(size=6):
    """Images of one value each: image i is all i, of class i."""
    return torch.arange(size).float().view(size, 1, 1, 1).expand(size, 1, 10, 10).contiguous(), torch.arange(size) % K


@pytest.mark.parametrize("cfg", [MIXUP, CUTMIX, BOTH], ids=["mixup", "cutmix", "both"])
def test_targets_follow_the_pixels(cfg):
    """The share of image i in the pixels is the share of class i in the target, for each draw."""
    images, targets = batch()
    values = torch.arange(6.0)
    for seed in range(20):
        mixed, soft = Mixer(cfg, 0.0, K).mix(images, targets, seed)
        assert soft.shape == (6, K) and soft.dtype == torch.float32
        torch.testing.assert_close(soft.sum(1), torch.ones(6))
        torch.testing.assert_close(soft @ values, mixed.mean((1, 2, 3)))


def test_the_draw_is_timms():
    images, targets = batch()
    state = np.random.get_state()
    np.random.seed(np.random.SeedSequence(11).generate_state(4))
    theirs = Mixup(0.8, 1.0, prob=0.9, label_smoothing=0.1, num_classes=K)(images.clone(), targets)
    np.random.set_state(state)
    ours = Mixer(BOTH, 0.1, K).mix(images, targets, 11)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


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
        Mixer(BOTH, 0.1, K).mix(images, targets, seed)
    assert torch.equal(images, kept)
    assert np.random.get_state()[1].tobytes() == numpy_state and torch.equal(torch.get_rng_state(), torch_state)


def test_off_by_default():
    assert not Mixer(MixingConfig(), 0.1, K).is_on
    assert Mixer(MIXUP, 0.1, K).is_on and Mixer(CUTMIX, 0.1, K).is_on
    Mixer(MixingConfig(), 0.1, K).check_micro_batch_size(3)


def test_an_odd_micro_batch_is_refused():
    with pytest.raises(ConfigError, match=r"compute\.micro_batch_size=5 is odd.*Use compute\.micro_batch_size=6"):
        Mixer(MIXUP, 0.0, K).mix(*batch(5), 0)
