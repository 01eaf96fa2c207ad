"""timm's policies may posterize to 0 bits; Pillow 13 refuses what earlier ones turned black.

"rand-m9-mstd0.5-inc1", DeiT's policy, comes there wherever the magnitude is drawn as 10. The draws and all other
results stay timm's; timm's own tables are left alone.

Does not know: which policy is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from PIL import Image, ImageOps
from timm.data.auto_augment import AugmentOp, AutoAugment, posterize


def keep_bits(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Return the image with so many bits of each channel, 0 to 8; with 0 it is black, as in Pillow up to 12."""
    if bits <= 0:
        return Image.new(image.mode, image.size)
    return image if bits >= 8 else ImageOps.posterize(image, bits)


def allow_no_bits_(transforms: Iterable[Any]) -> None:
    """Let every operation of timm's policies among transforms posterize to any number of bits, in place."""
    for transform in transforms:
        ops = getattr(transform, "ops", ())
        if isinstance(transform, AutoAugment):
            ops = [op for sub_policy in transform.policy for op in sub_policy]
        for op in ops:
            if isinstance(op, AugmentOp) and op.aug_fn is posterize:
                op.aug_fn = keep_bits
