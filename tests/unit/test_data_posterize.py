"""timm's policies at their strongest, which Pillow 13 refuses."""

import random

import numpy as np
import pytest
from PIL import Image, ImageOps
from timm.data.auto_augment import rand_augment_transform

from vit_tp.data.posterize import allow_no_bits_, keep_bits


def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))


def test_no_bits_are_black_and_the_others_pillows():
    assert not np.asarray(keep_bits(image(), 0)).any()
    for bits in range(1, 8):
        assert np.array_equal(keep_bits(image(), bits), ImageOps.posterize(image(), bits))
        mask = 256 - 2 ** (8 - bits)
        assert np.array_equal(keep_bits(image(), bits), np.asarray(image()) & mask), "what Pillow 12 computes for 0 too"
    assert np.array_equal(keep_bits(image(), 8), image())


def test_deits_policy_never_fails_and_is_timms_wherever_that_works():
    timms, ours = (rand_augment_transform("rand-m10-inc1", {}) for _ in range(2))
    allow_no_bits_([ours])
    refused = 0
    for seed in range(300):
        random.seed(seed)
        np.random.seed(seed)
        try:
            wanted = timms(image())
        except ValueError as error:
            assert "bits must be" in str(error)
            refused, wanted = refused + 1, None
        random.seed(seed)
        np.random.seed(seed)
        found = ours(image())
        assert wanted is None or np.array_equal(found, wanted)
    if refused == 0:
        pytest.skip("this Pillow takes 0 bits")
