"""What becomes of pixels between the reader and the model?

They travel as uint8. On the device of every rank of a first stage they become float32, are normalised, erased and mixed
as timm does it; the reader mixes the targets. What is random follows from the sample, or from the micro-batch's global
number, so that tensor-parallel peers and both ends of a pipeline agree without a word.

Does not know: files, who receives what (feed.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vit_tp.config import Config
from vit_tp.data.erasing import Erasing
from vit_tp.data.spec import DataSpec
from vit_tp.parallel.rng import seed_from
from vit_tp.recipe.mixing import Mixer


class Normalise:
    """uint8 pixels -> float32, (x / 255 - mean) / std for each channel.

    Args:
        spec: Whose mean and std are meant.
        device: Where pixels are.
    """

    def __init__(self, spec: DataSpec, device: torch.device) -> None:
        self.mean, self.std = (
            torch.tensor(values, dtype=torch.float64).mul(255).float().to(device) for values in (spec.mean, spec.std)
        )

    def __call__(self, images: Tensor) -> Tensor:
        """(B, C, Y, X) or (B, C, T, Y, X) uint8 -> float32 of the same shape."""
        channels = (-1, *[1] * (images.dim() - 2))
        return images.float().sub_(self.mean.view(channels)).div_(self.std.view(channels))


@dataclass(frozen=True)
class Preparation:
    """What is done to the micro-batches of a step; in evaluation they are normalised alone.

    Args:
        normalise: uint8 to float32.
        erasing: In training, random erasing; None where there is none.
        mixer: In training, mixup and cutmix; None where there is none.
        seed: run.seed.
        first: Global number of this replica's first micro-batch of a step.
        step: Which step; None evaluates.
    """

    normalise: Normalise
    erasing: Erasing | None = None
    mixer: Mixer | None = None
    seed: int = 0
    first: int = 0
    step: int | None = None

    @property
    def needs_seeds(self) -> bool:
        """Whether every rank that has images needs the seeds of their samples."""
        return self.erasing is not None

    def images(self, images: Tensor, seeds: Tensor | None, index: int) -> Tensor:
        """Return what the model is given of a replica's index-th micro-batch of the step.

        Args:
            images: (B, C, Y, X) or (B, C, T, Y, X) uint8 on the device.
            seeds: (B,) int64, of the samples, on the CPU; None where they are not needed.
            index: 0 .. grad_accum_steps - 1.
        """
        images = self.normalise(images)
        if self.erasing is not None:
            images = self.erasing.apply(images, seeds)
        if self.mixer is not None:
            images = self.mixer.mix_images(images, self._mix_seed(index))
        return images

    def targets(self, targets: Tensor, images: Tensor, index: int) -> Tensor:
        """Return what the loss is given: classes (B,), or soft targets (B, K) where they are mixed.

        Args:
            targets: Classes (B,) int64.
            images: Of the same micro-batch, for their size.
            index: 0 .. grad_accum_steps - 1.
        """
        if self.mixer is None:
            return targets
        return self.mixer.mix_targets(targets, self._mix_seed(index), tuple(images.shape[-2:]))

    def _mix_seed(self, index: int) -> int:
        return seed_from(self.seed, self.step, self.first + index, "mix")


class Preparations:
    """Makes the preparation of each step of one replica.

    Args:
        config: The run.
        spec: Sizes of its data.
        device: Where pixels are.
        first: Global number of this replica's first micro-batch of a step.
    """

    def __init__(self, config: Config, spec: DataSpec, device: torch.device, first: int) -> None:
        recipe, data = config.recipe, config.data
        mixer = Mixer(recipe.mixing, recipe.smoothing, spec.num_classes)
        erasing = Erasing(data.random_erasing, data.erasing_mode, data.erasing_count)
        self._evaluation = Preparation(Normalise(spec, device))
        self._training = replace(
            self._evaluation,
            erasing=erasing if erasing.is_on else None,
            mixer=mixer if mixer.is_on else None,
            seed=config.run.seed,
            first=first,
        )

    def training(self, step: int) -> Preparation:
        """Return what is done to the micro-batches of one optimizer step."""
        return replace(self._training, step=step)

    def evaluation(self) -> Preparation:
        """Return what is done to the micro-batches of an evaluation."""
        return self._evaluation
