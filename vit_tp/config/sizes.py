"""Sizes in pixels as they are typed: one number for a square, or height and width.

Does not know: which sizes a model takes.
"""

from __future__ import annotations

from typing import Any

from vit_tp.config.schema import Config

Size = tuple[int, int]
"""Height and width in pixels."""


def is_size(value: Any) -> bool:
    """Say whether a value is a number of pixels or a list of two."""
    sides = value if isinstance(value, list) and len(value) == 2 else [value]
    return all(type(side) is int and side >= 1 for side in sides)


def size_of(value: Any) -> Size:
    """Return height and width of a value that `is_size`."""
    height, width = value if isinstance(value, (list, tuple)) else (value, value)
    return height, width


def resolution_schedule(config: Config) -> tuple[tuple[int, Size], ...]:
    """Return (epoch, size) pairs, by epoch: from that epoch on training images have that size."""
    return tuple((epoch, size_of(size)) for epoch, size in config.recipe.resolution_schedule)
