"""How do the numbers of a file become RGB of 8 bits, as the picture is to be looked at?

16 bits are scaled to 8 (PIL's own convert clips them), transparency is dropped, as timm drops it, and EXIF's
orientation is applied, which timm does not do.

Does not know: file formats, which part of a picture is wanted.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from vit_tp.data.boxes import WidthHeight
from vit_tp.errors import DataError

_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_WHITE_OF_16_BITS = 2**16 - 1


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """Return a stored picture as it is to be looked at.

    Args:
        image: Any mode.
        orientation: EXIF's, 1 to 8; any other number is none.
    """
    return image.transpose(_TRANSPOSES[orientation]) if orientation in _TRANSPOSES else image


def to_rgb(image: Image.Image, is_scaled_int: bool = False, is_zero_white: bool = False) -> Image.Image:
    """Return a picture of any mode in RGB.

    Args:
        image: Any mode.
        is_scaled_int: Whether 32-bit whole numbers are known to go from 0 to 65535.
        is_zero_white: Whether 16-bit pixels are lighter the smaller they are; with 8 bits PIL minds that itself.

    Raises:
        DataError: Its numbers have no range that is known.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and is_scaled_int):
        grey = to_8_bits(np.asarray(image), _WHITE_OF_16_BITS)
        return Image.fromarray(255 - grey if is_zero_white else grey).convert("RGB")
    if image.mode in ("I", "F"):
        kind = "32-bit whole" if image.mode == "I" else "floating-point"
        raise DataError(unknown_range(kind))
    if image.mode == "RGB":
        image.load()  # convert would copy it
        return image
    return image.convert("RGB")


def unknown_range(kind: str) -> str:
    """Return why pixels of a kind are refused."""
    return f"its pixels are {kind} numbers, and which of them is white is not known; write it with 8 or 16 bits"


def to_8_bits(pixels: np.ndarray, white: int) -> np.ndarray:
    """Scale pixels so that white becomes 255, to the nearest.

    Args:
        pixels: Whole numbers from 0 to white, any shape.
        white: At most 2**16 - 1.

    Returns:
        uint8 of that shape.
    """
    scaled = pixels.astype(np.uint32)
    scaled *= 255
    scaled += white // 2
    scaled //= white
    return scaled.astype(np.uint8)


def pixel_limit() -> float:
    """Return how many pixels may be decoded at once: where PIL stops by itself."""
    return float("inf") if Image.MAX_IMAGE_PIXELS is None else 2 * Image.MAX_IMAGE_PIXELS


def require_decodable(size: WidthHeight, advice: str) -> None:
    """Refuse to decode more pixels at once than PIL would.

    Args:
        size: Width and height of what is to be decoded, in pixels.
        advice: What to do about it.

    Raises:
        DataError: They are too many.
    """
    width, height = size
    if width * height > pixel_limit():
        raise DataError(
            f"{width} x {height} pixels would have to be decoded, more than PIL's limit of {pixel_limit():.0f}; "
            f"{advice}"
        )
