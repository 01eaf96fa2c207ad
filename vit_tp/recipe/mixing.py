"""How are the images and targets of a micro-batch mixed?

By timm's Mixup (mixup and cutmix, image i with image B-1-i, one draw for the micro-batch), from a seed that the caller
derives from the micro-batch's global number: whoever mixes it, on whatever grid, mixes it alike.

Does not know: where the seed comes from, the loss.
"""

from __future__ import annotations

import numpy as np
from timm.data import Mixup
from torch import Tensor

from vit_tp.config import MixingConfig
from vit_tp.errors import ConfigError


class Mixer:
    """Mixup and cutmix of whole micro-batches.

    Args:
        cfg: The mixing group of the recipe.
        smoothing: Label smoothing, worked into the soft targets; the loss must not apply it again.
        num_classes: Classes, K.
    """

    def __init__(self, cfg: MixingConfig, smoothing: float, num_classes: int) -> None:
        self.is_on = cfg.mixup_alpha > 0 or cfg.cutmix_alpha > 0
        self._mixup = Mixup(
            mixup_alpha=cfg.mixup_alpha,
            cutmix_alpha=cfg.cutmix_alpha,
            prob=cfg.prob,
            switch_prob=cfg.switch_prob,
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
                f"recipe.mixing.mixup_alpha=0 recipe.mixing.cutmix_alpha=0."
            )

    def mix(self, images: Tensor, targets: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Mix one micro-batch; the arguments stay as they are.

        Args:
            images: (B, C, Y, X) float.
            targets: Classes (B,) int64.
            seed: Decides every draw, 0 or more.

        Returns:
            Images (B, C, Y, X) and soft targets (B, K) float32.

        Raises:
            ConfigError: B is odd.
        """
        assert self.is_on, "nothing to mix with: both alphas are 0"
        self.check_micro_batch_size(len(images))
        # timm draws from numpy's global generator
        state = np.random.get_state()
        try:
            np.random.seed(np.random.SeedSequence(seed).generate_state(4))
            return self._mixup(images.clone(), targets)  # timm mixes in place
        finally:
            np.random.set_state(state)
