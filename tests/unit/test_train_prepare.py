"""Pixels on their way into the model: timm's and torchvision's numbers, the same on every rank that holds them."""

import numpy as np
import pytest
import torch
from timm.data import Mixup
from timm.data.loader import PrefetchLoader
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import v2

from vit_tp.config import Config
from vit_tp.data.spec import DataSpec
from vit_tp.parallel.rng import seed_from
from vit_tp.train.prepare import Normalise, Preparations

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SPEC = DataSpec(100, 10, 7, 3, MEAN, STD)
CPU = torch.device("cpu")


def pixels(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def preparations(first=0, **knobs):
    config = Config()
    for path, value in knobs.items():
        owner, (*groups, leaf) = config, path.split("__")
        for group in groups:
            owner = getattr(owner, group)
        setattr(owner, leaf, value)
    return Preparations(config, SPEC, CPU, first)


def test_normalised_images_are_torchvisions_and_timms():
    images = pixels(4, 3, 8, 6)
    found = Normalise(SPEC, CPU)(images)
    assert found.dtype == torch.float32
    torchvisions = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])(images)
    torch.testing.assert_close(found, torchvisions, rtol=0, atol=1e-6)
    timms = PrefetchLoader([(images, torch.zeros(4))], MEAN, STD, device=CPU, re_prob=0.0)
    [(wanted, _)] = list(timms)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_a_clip_is_normalised_frame_by_frame():
    clips = pixels(2, 3, 5, 8, 6)
    normalise = Normalise(SPEC, CPU)
    for frame in range(5):
        assert torch.equal(normalise(clips)[:, :, frame], normalise(clips[:, :, frame]))


def test_evaluation_is_normalised_alone():
    on = {"data__random_erasing": 1.0, "recipe__mixing__mixup_alpha": 1.0}
    images, targets = pixels(4, 3, 8, 8), torch.arange(4)
    preparation = preparations(**on).evaluation()
    assert torch.equal(preparation.images(images, None, 0), Normalise(SPEC, CPU)(images))
    assert preparation.targets(targets, images, 0) is targets and not preparation.needs_seeds


def test_training_is_normalised_erased_and_mixed_as_timm_does_it():
    """timm's own pieces under the seeds of the samples and of the global micro-batch."""
    on = {
        "data__random_erasing": 0.9, "recipe__mixing__mixup_alpha": 0.8, "recipe__mixing__cutmix_alpha": 1.0,
        "recipe__smoothing": 0.1, "run__seed": 5,
    }  # fmt: skip
    images, targets, seeds = pixels(6, 3, 16, 16), torch.arange(6), torch.arange(6) * 1000 + 7
    preparation = preparations(first=8, **on).training(3)
    assert preparation.needs_seeds
    found = preparation.images(images, seeds, 1)
    soft = preparation.targets(targets, images, 1)

    import random

    wanted = Normalise(SPEC, CPU)(images)
    erase = RandomErasing(0.9, mode="pixel", device="cpu")
    for image, seed in zip(wanted, seeds.tolist()):
        random.seed(seed)
        torch.manual_seed(seed)
        erase(image)
    np.random.seed(np.random.SeedSequence(seed_from(5, 3, 9, "mix")).generate_state(4))
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=7)
    wanted, wanted_soft = mixup(wanted, targets)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(soft, wanted_soft)


@pytest.mark.parametrize(("step", "index"), [(3, 0), (4, 1)])
def test_another_micro_batch_is_mixed_otherwise(step, index):
    images, seeds = pixels(6, 3, 16, 16), torch.arange(6)
    several = preparations(recipe__mixing__mixup_alpha=0.8)
    one, again = (several.training(3).images(images, seeds, 1) for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one, several.training(step).images(images, seeds, index))
