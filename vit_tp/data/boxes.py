"""Which pixels of a stored picture does a box of the picture as it is looked at stand for?

Orientation, reduced sizes and the windows that a large picture is cut into: integers only.

Does not know: file formats, what is done with the pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

WidthHeight = tuple[int, int]
"""PIL's order; vit_tp.data.spec.Size is (height, width)."""


class Box(NamedTuple):
    """A rectangle of pixels in PIL's order: columns left <= x < right, rows top <= y < bottom."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def height(self) -> int:
        return self.bottom - self.top

    @property
    def area(self) -> int:
        return self.width * self.height


def whole(size: WidthHeight) -> Box:
    """Return the box of a whole picture."""
    return Box(0, 0, *size)


def inside(window: Box, box: Box) -> Box:
    """Return where a box that is counted from a window's corner lies in the picture."""
    x, y = window.left, window.top
    return Box(box.left + x, box.top + y, box.right + x, box.bottom + y)


# EXIF's tag 274 says how stored rows and columns are to be looked at: 2, 4: mirrored; 3: upside down; 5 to 8: rows and
# columns change places, and one of the above.
_SWAPS, _MIRRORS_X, _MIRRORS_Y = (5, 6, 7, 8), (2, 3, 7, 8), (3, 4, 6, 7)


def oriented_size(size: WidthHeight, orientation: int) -> WidthHeight:
    """Return the size of a stored picture as it is looked at, and the other way round.

    Args:
        size: Width and height in pixels.
        orientation: EXIF's, 1 to 8.
    """
    return (size[1], size[0]) if orientation in _SWAPS else size


def stored_box(box: Box, stored_size: WidthHeight, orientation: int) -> Box:
    """Return where a box of a picture as it is looked at lies in the picture as it is stored.

    Args:
        box: In the oriented picture.
        stored_size: Width and height of the stored picture in pixels.
        orientation: EXIF's, 1 to 8.
    """
    left, top, right, bottom = box
    if orientation in _SWAPS:
        left, top, right, bottom = top, left, bottom, right
    width, height = stored_size
    if orientation in _MIRRORS_X:
        left, right = width - right, width - left
    if orientation in _MIRRORS_Y:
        top, bottom = height - bottom, height - top
    return Box(left, top, right, bottom)


def reduced_box(box: Box, size: WidthHeight, reduced_size: WidthHeight, factors: tuple[float, float]) -> Box:
    """Return a box in a smaller rendering of the picture: to the nearest pixel, at least one, inside.

    Args:
        box: In the picture at full size.
        size: Width and height of that.
        reduced_size: Width and height of the smaller rendering.
        factors: How many pixels of a row, of a column make one of the smaller rendering.
    """
    left, right = _reduced_side(box.left, box.right, size[0], reduced_size[0], factors[0])
    top, bottom = _reduced_side(box.top, box.bottom, size[1], reduced_size[1], factors[1])
    return Box(left, top, right, bottom)


def _reduced_side(low: int, high: int, length: int, reduced_length: int, factor: float) -> tuple[int, int]:
    first = min(round(low / factor), reduced_length - 1)
    last = reduced_length if high == length else min(round(high / factor), reduced_length)
    return first, max(first + 1, last)


def covers(box: Box, min_size: WidthHeight) -> bool:
    """Return whether a box is at least so wide and so high."""
    return box.width >= min_size[0] and box.height >= min_size[1]


class Grid:
    """The windows of every picture of a list, numbered through.

    Windows stand side by side; the last column and row are moved inwards, so that every pixel lies in a window and
    windows are full. A picture smaller than a window in one direction has windows of its own size in that direction.

    Args:
        sizes: Width and height of each picture; None where it is not known: such a picture is one window.
        tile_size: Side of a window in pixels.
    """

    def __init__(self, sizes: Sequence[WidthHeight | None], tile_size: int) -> None:
        self._tile_size = tile_size
        # (P, 2) int64; 0 where the size is not known
        self._sizes = np.array([size or (0, 0) for size in sizes], dtype=np.int64).reshape(-1, 2)
        self._columns, rows = np.maximum(1, -(-self._sizes // tile_size)).T
        self._ends = np.cumsum(self._columns * rows)

    def __len__(self) -> int:
        """Return the number of windows of all pictures."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def window(self, index: int) -> tuple[int, Box | None]:
        """Return which picture a window belongs to, and where in it the window lies.

        Args:
            index: Number of the window over all pictures.

        Returns:
            Number of the picture, and the box; None for the whole of a picture whose size is not known.
        """
        assert 0 <= index < len(self), (index, len(self))
        picture = int(self._ends.searchsorted(index, side="right"))
        width, height = self._sizes[picture].tolist()
        if not width:
            return picture, None
        columns = int(self._columns[picture])
        first = int(self._ends[picture - 1]) if picture else 0
        row, column = divmod(index - first, columns)
        left, top = (
            max(0, min(at * self._tile_size, side - self._tile_size)) for at, side in ((column, width), (row, height))
        )
        return picture, Box(left, top, min(left + self._tile_size, width), min(top + self._tile_size, height))


def halvings(box: Box, min_size: WidthHeight) -> int:
    """Return the largest power of two that a box can be divided by and still be at least so wide and so high."""
    by = min(box.width / min_size[0], box.height / min_size[1])
    return 2 ** max(0, math.floor(math.log2(by))) if by >= 1 else 1
