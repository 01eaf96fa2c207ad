"""Which random numbers does one sample see?

Those that follow from the seed and its key, whatever was drawn before and whoever reads it. timm's and torchvision's
transforms draw from the global generators of Python, numpy and torch, so these are seeded for the length of one
sample and put back afterwards: dropout elsewhere in the process never notices that a sample was read.

Does not know: what a transform does, nor which rank or worker asks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from vit_tp.data.order import SampleKey
from vit_tp.parallel.rng import default_generator

# SeedSequence pads short keys with zeros: (seed, epoch) of data/order.py and (seed, epoch, 0) would be one stream
# without a first word that tells them apart.
_SAMPLE_STREAM = 1
_DEVICE_STREAM = 4


def sample_seed(seed: int, key: SampleKey) -> int:
    """Return 63 bits for what is random about a sample once it has left its reader.

    Args:
        seed: run.seed, 0 or more.
        key: The sample.
    """
    [bits] = np.random.SeedSequence((_DEVICE_STREAM, seed, *key)).generate_state(1, np.uint64)
    return int(bits) >> 1


@contextmanager
def sample_randomness(seed: int, key: SampleKey) -> Iterator[None]:
    """Seed the global CPU generators for one sample, and restore their previous states on the way out.

    Args:
        seed: run.seed, 0 or more.
        key: The sample.
    """
    for_python, for_numpy, for_torch = np.random.SeedSequence((_SAMPLE_STREAM, seed, *key)).generate_state(3)
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(int(for_python))
        np.random.seed(int(for_numpy))
        # Not torch.manual_seed: it would reseed the accelerators too, and those are not restored here.
        torch.default_generator.manual_seed(int(for_torch))
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


@contextmanager
def device_randomness(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds what is drawn for a sample on a device, and restore the states on the way out.

    Args:
        device: Whose default generator is seeded, beside Python's.

    Yields:
        A function of sample_seed's bits.
    """
    generator = default_generator(device)

    def seed_all(bits: int) -> None:
        random.seed(bits)
        generator.manual_seed(bits)

    python_state, torch_state = random.getstate(), generator.get_state()
    try:
        yield seed_all
    finally:
        random.setstate(python_state)
        generator.set_state(torch_state)
