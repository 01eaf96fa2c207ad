"""How are the images and targets of a micro-batch mixed?

By timm's Mixup (mixup and cutmix, image i with image B-1-i), from a seed that the caller derives from the micro-batch's
global number: whoever mixes it, on whatever grid, mixes it alike. Images and targets may lie in different processes;
each mixes what it has, from the same seed.

Does not know: where the seed comes from, the loss.

Source: timm 1.0, timm/data/mixup.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from timm.data import Mixup
from timm.data.mixup import cutmix_bbox_and_lam, mixup_target
from torch import Tensor

from vit_tp.config import MixingConfig
from vit_tp.config.limits import NAMES
from vit_tp.errors import ConfigError

MODES = NAMES["recipe.mixing.mode"]


class Mixer:
    """Mixup and cutmix of whole micro-batches.

    Args:
        cfg: The mixing group of the recipe.
        smoothing: Label smoothing, worked into the soft targets; the loss must not apply it again.
        num_classes: Classes, K.

    Raises:
        ConfigError: timm would not mix as the knobs say.
    """

    def __init__(self, cfg: MixingConfig, smoothing: float, num_classes: int) -> None:
        _require_possible(cfg)
        self.is_on = cfg.mixup_alpha > 0 or cfg.cutmix_alpha > 0 or cfg.cutmix_minmax is not None
        self._mixup = Mixup(
            mixup_alpha=cfg.mixup_alpha,
            cutmix_alpha=cfg.cutmix_alpha,
            cutmix_minmax=cfg.cutmix_minmax,
            prob=cfg.prob,
            switch_prob=cfg.switch_prob,
            mode=cfg.mode,
            label_smoothing=smoothing,
            num_classes=num_classes,
        )

    def check_micro_batch_size(self, micro_batch_size: int) -> None:
        """Refuse what cannot be mixed, before any rank starts.

        Args:
            micro_batch_size: Samples of one forward pass, B.

        Raises:
            ConfigError: Mixing is on and the size is odd.
        """
        if self.is_on and micro_batch_size % 2:
            raise ConfigError(
                f"compute.micro_batch_size={micro_batch_size} is odd; mixup and cutmix mix images in pairs. "
                f"Use compute.micro_batch_size={micro_batch_size + 1}, or switch mixing off with "
                f"recipe.mixing.mixup_alpha=0 recipe.mixing.cutmix_alpha=0 recipe.mixing.cutmix_minmax=null."
            )

    def mix(self, images: Tensor, targets: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Mix one micro-batch; the arguments stay as they are.

        Args:
            images: (B, C, Y, X) or (B, C, T, Y, X) float.
            targets: Classes (B,) int64.
            seed: Decides every draw, 0 or more.

        Returns:
            As images, and soft targets (B, K) float32.

        Raises:
            ConfigError: B is odd.
        """
        return self.mix_images(images, seed), self.mix_targets(targets, seed, images.shape[-2:])

    def mix_images(self, images: Tensor, seed: int) -> Tensor:
        """Mix the images of a micro-batch; the argument stays as it is.

        Args:
            images: (B, C, Y, X) float, or (B, C, T, Y, X), whose box is the same in all frames. Any device.
            seed: Decides every draw, 0 or more.

        Returns:
            As images.

        Raises:
            ConfigError: B is odd.
        """
        self._require_even(len(images))
        planes = images.flatten(1, -3).clone()  # timm cuts along dims 2 and 3, and mixes in place
        with _seeded(seed):
            mixed, _ = self._mixup(planes, torch.zeros(len(images), dtype=torch.int64, device=images.device))
        return mixed.view(images.shape)

    def mix_targets(self, targets: Tensor, seed: int, img_size: tuple[int, int]) -> Tensor:
        """Mix the targets of a micro-batch as mix_images mixes its images.

        Args:
            targets: Classes (B,) int64.
            seed: That of the images.
            img_size: Height and width (Y, X) of the images: a box that stands out of them weighs less.

        Returns:
            Soft targets (B, K) float32.

        Raises:
            ConfigError: B is odd.
        """
        self._require_even(len(targets))
        with _seeded(seed):
            share = self._share(len(targets), tuple(img_size))
        if isinstance(share, np.ndarray):
            share = torch.from_numpy(share).to(targets.device).unsqueeze(1)
        return mixup_target(targets, self._mixup.num_classes, share, self._mixup.label_smoothing)

    def _require_even(self, micro_batch_size: int) -> None:
        assert self.is_on, "nothing to mix with: both alphas are 0"
        self.check_micro_batch_size(micro_batch_size)

    def _share(self, size: int, img_size: tuple[int, int]) -> float | np.ndarray:
        """Return what is left of each image, one number or (B,) float32, drawing as timm draws when it mixes images."""
        timm = self._mixup
        if timm.mode == "batch":
            share, is_cut = timm._params_per_batch()
            return self._share_of_box(share, img_size) if is_cut and share != 1 else share
        shares, are_cut = timm._params_per_elem(size if timm.mode == "elem" else size // 2)
        for place, is_cut in enumerate(are_cut):
            if is_cut and shares[place] != 1:
                shares[place] = self._share_of_box(shares[place], img_size)
        return shares if timm.mode == "elem" else np.concatenate((shares, shares[::-1]))

    def _share_of_box(self, share: float, img_size: tuple[int, int]) -> float:
        _, share = cutmix_bbox_and_lam(
            img_size, share, ratio_minmax=self._mixup.cutmix_minmax, correct_lam=self._mixup.correct_lam
        )
        return share


def _require_possible(cfg: MixingConfig) -> None:
    if cfg.mode not in MODES:
        raise ConfigError(
            f"recipe.mixing.mode={cfg.mode} does not say what is drawn anew for each; it is one of {', '.join(MODES)}, "
            f"and timm would take any other word for batch. Use recipe.mixing.mode=batch."
        )
    sides = cfg.cutmix_minmax
    if sides is not None and not (len(sides) == 2 and 0 <= sides[0] < sides[1] <= 1):
        raise ConfigError(
            f"recipe.mixing.cutmix_minmax={list(sides)} is not a range of a box's sides; it takes two shares of the "
            f"image's, 0 <= low < high <= 1. Use for example recipe.mixing.cutmix_minmax=[0.2,0.8]."
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed numpy's global generator, which timm draws from, and put its state back."""
    state = np.random.get_state()
    try:
        np.random.seed(np.random.SeedSequence(seed).generate_state(4))
        yield
    finally:
        np.random.set_state(state)
