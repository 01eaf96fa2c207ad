"""What must the rest of the package know about a data set?

Its size (DataSpec), and how one sample is asked for (Source). Does not know: file formats, batches, ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class DataSpec:
    """Sizes of a data set, known before any sample is read.

    Args:
        num_train: Training samples.
        num_val: Validation samples.
        num_classes: Classes, K.
        in_chans: Channels of an image, C.
    """

    num_train: int
    num_val: int
    num_classes: int
    in_chans: int


class Source(Protocol):
    """One split of a data set. A sample depends on nothing but (seed, epoch, index)."""

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Shape (C, Y, X) of every image."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def load(self, index: int, epoch: int) -> tuple[Tensor, int]:
        """Read, augment and normalise one sample.

        Args:
            index: Place in the split, 0 .. len - 1.
            epoch: Pass over the split, from 0; chooses the augmentation.

        Returns:
            Image (C, Y, X) float32 and its class, 0 .. K - 1.
        """

    def name(self, index: int) -> str:
        """Return what a person would look for when this sample is broken, for example its path."""
