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
from vit_tp.data.order import SampleKey
from vit_tp.data.spec import DataSpec, Form, Sample

# Written down so that describing the data set loads nothing; a test compares them with scikit-learn's.
SPEC = DataSpec(num_train=1437, num_val=360, num_classes=10, in_chans=1, mean=(0.30538,), std=(0.37612,))
_MAX_PIXEL = 16.0


def describe_digits(data: DataConfig) -> DataSpec:
    """Return the sizes of the data set, which no knob changes."""
    return SPEC


class Digits:
    """One split of the digits, held in memory.

    Args:
        data: Not read; every source is built alike.
        form: What the images are to look like; their seed is not read, for nothing about a digit is random.
    """

    in_chans, views = SPEC.in_chans, 1

    def __init__(self, data: DataConfig, form: Form) -> None:
        self.form = form
        pixels, self._labels = load_digits(form.split)
        self._pixels = pixels / _MAX_PIXEL * 255  # (N, 1, 8, 8)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._labels)

    def load(self, key: SampleKey) -> Sample:
        """Return the image (1, Y, X) and its class. Epoch and copy make no difference but in size."""
        image, size = self._pixels[key.index], self.form.size_at(key.epoch)
        if image.shape[-2:] != size:
            image = F.interpolate(image.unsqueeze(0), size, mode="bilinear", antialias=True).squeeze(0)
        return Sample(image.round().clamp(0, 255).to(torch.uint8), self._labels[key.index])

    def name(self, index: int) -> str:
        """Return how to find this digit."""
        return f"digit {index} of split {self.form.split}"


def load_digits(split: str) -> tuple[Tensor, list[int]]:
    """Return the digits of a split: pixels (N, 1, 8, 8) float32, 0 to 16, and their classes."""
    # scikit-learn takes more than a second to import: only where digits are read.
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    digits = datasets.load_digits()
    train, val = train_test_split(
        range(len(digits.target)), test_size=SPEC.num_val, random_state=0, stratify=digits.target
    )
    chosen = train if split == "train" else val
    return torch.from_numpy(digits.images[chosen]).float().unsqueeze(1), digits.target[chosen].tolist()
