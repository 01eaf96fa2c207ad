"""Where do the handwritten digits come from?

From scikit-learn, which ships 1,797 real 8x8 grey images in 10 classes (UCI "Optical Recognition of Handwritten
Digits"): nothing is downloaded. The split is fixed, so that accuracies of different runs and seeds compare.

Does not know: batches, ranks, the model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vit_tp.config import DataConfig
from vit_tp.data.spec import DataSpec

# Written down so that describing the data set loads nothing; a test compares them with scikit-learn's.
SPEC = DataSpec(num_train=1437, num_val=360, num_classes=10, in_chans=1)
MEAN, STD = 0.30538, 0.37612
_MAX_PIXEL = 16.0


def describe_digits(data: DataConfig) -> DataSpec:
    """Return the sizes of the data set, which no knob changes."""
    return SPEC


class Digits:
    """One split of the digits, held in memory.

    Args:
        data: Not read; every source is built alike.
        split: "train" or "val".
        img_size: Height and width (Y, X) to resize to, in pixels.
        seed: Not read: nothing about a digit is random.
    """

    def __init__(self, data: DataConfig, split: str, img_size: tuple[int, int], seed: int) -> None:
        # scikit-learn takes more than a second to import: only where digits are read.
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        train, val = train_test_split(
            range(len(digits.target)), test_size=SPEC.num_val, random_state=0, stratify=digits.target
        )
        chosen = train if split == "train" else val
        pixels = torch.from_numpy(digits.images[chosen]).float().unsqueeze(1) / _MAX_PIXEL
        self._images = (pixels - MEAN) / STD  # (N, 1, 8, 8)
        self._labels = digits.target[chosen].tolist()
        self._split = split
        self._img_size = tuple(img_size)

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Shape (1, Y, X) of every image."""
        return (SPEC.in_chans, *self._img_size)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._labels)

    def load(self, index: int, epoch: int) -> tuple[Tensor, int]:
        """Return the image (1, Y, X) float32 and its class. The epoch makes no difference."""
        image = self._images[index]
        if image.shape[-2:] != self._img_size:
            image = F.interpolate(image.unsqueeze(0), self._img_size, mode="bilinear", antialias=True).squeeze(0)
        return image, self._labels[index]

    def name(self, index: int) -> str:
        """Return how to find this digit."""
        return f"digit {index} of split {self._split}"
