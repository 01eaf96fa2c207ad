"""How are boxes of an image erased, alike on every rank that holds it?

By timm's RandomErasing, on the device and after normalising, sample by sample under a seed that travels with the
sample: tensor-parallel peers erase the same boxes with the same noise, and the micro-batch that a sample comes in makes
no difference. The global generators are put back, those of the device included.

Does not know: where seeds come from, processes.

Source: timm 1.0, timm/data/random_erasing.py; Zhong et al., arXiv 1708.04896.
"""

from __future__ import annotations

import torch
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from vit_tp.config.limits import NAMES
from vit_tp.data.sampling import device_randomness
from vit_tp.errors import ConfigError

MODES = NAMES["data.erasing_mode"]


class Erasing:
    """Random erasing of the samples of a micro-batch.

    Args:
        prob: Probability that a sample is erased at all.
        mode: What is there instead: "pixel": noise | "rand": one colour | "const": 0, which is the mean.
        count: At most so many boxes of a sample; their areas are divided by their number.

    Raises:
        ConfigError: One of them makes no sense.
    """

    def __init__(self, prob: float, mode: str = "pixel", count: int = 1) -> None:
        if not 0 <= prob <= 1 or mode not in MODES or count < 1:
            raise ConfigError(
                f"data.random_erasing={prob}, data.erasing_mode={mode} and data.erasing_count={count} do not say how "
                f"to erase; they are a probability, one of {', '.join(MODES)}, and a number of boxes from 1 on. Use "
                f"for example data.random_erasing=0.25 data.erasing_mode=pixel data.erasing_count=1."
            )
        self._prob, self._mode, self._count = prob, mode, count

    @property
    def is_on(self) -> bool:
        return self._prob > 0

    def apply(self, images: Tensor, seeds: Tensor) -> Tensor:
        """Erase boxes; the argument stays as it is. The box of a clip is the same in all frames, and so is its colour.

        Args:
            images: (B, C, Y, X) or (B, C, T, Y, X), normalised.
            seeds: (B,) int64, 0 or more; each decides about its sample.

        Returns:
            As images.
        """
        if not self.is_on:
            return images
        images = images.clone(memory_format=torch.contiguous_format)
        erase = RandomErasing(
            self._prob, mode=self._mode, max_count=self._count, num_splits=0, device=str(images.device)
        )
        with device_randomness(images.device) as seed_all:
            for image, seed in zip(images, seeds.tolist()):
                for plane in self._planes(image):
                    seed_all(seed)
                    erase(plane)
        return images

    def _planes(self, image: Tensor) -> list[Tensor]:
        """Return what timm is to erase at once, each (channels, Y, X), as views."""
        if image.ndim == 3:
            return [image]
        if self._mode == "rand":
            # A colour is drawn for each channel: frame after frame under one seed, or it would flicker.
            return list(image.unbind(1))
        return [image.flatten(0, 1)]
