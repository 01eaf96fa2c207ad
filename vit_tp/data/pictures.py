"""How is a picture opened, and as little of it decoded as will do?

    format                        decoded
    JPEG                          whole, at 1/2, 1/4 or 1/8 by the decoder itself where that is enough
    tiled or pyramidal TIFF       the tiles under the box, at the best level (tiled_tiff.py)
    all else that PIL reads       whole

What comes out is RGB of 8 bits, as it is to be looked at (pixels.py). Of an animation the first frame is read, of a
document the first page.

Does not know: what is random about a sample, how long reading may take.
"""

from __future__ import annotations

import io
import os
from typing import BinaryIO, Protocol

from PIL import Image, ImageFile, JpegImagePlugin, TiffImagePlugin, UnidentifiedImageError

from vit_tp.data.boxes import Box, WidthHeight, covers, oriented_size, reduced_box, stored_box, whole
from vit_tp.data.pixels import require_decodable, to_rgb, turned
from vit_tp.data.tiled_tiff import TiledTiff, is_read_by_tile
from vit_tp.errors import DataError

_JPEG, _TIFF = b"\xff\xd8\xff", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_ORIENTATION = 0x0112
_TOO_LARGE = (
    "a picture of this format is decoded whole. Write it as a tiled TIFF, of which only what is needed is decoded, or "
    "set PIL.Image.MAX_IMAGE_PIXELS in a module of yours that plugins=[...] names"
)


class Picture(Protocol):
    """A picture of which nothing but the header has been read. It holds its file open.

    Attributes:
        size: Width and height in pixels, as it is to be looked at.
    """

    size: WidthHeight

    def read(self, box: Box | None = None, min_size: WidthHeight | None = None) -> Image.Image:
        """Decode a box, once, and close the file.

        Args:
            box: In pixels of `size`; None for all.
            min_size: Width and height in pixels that are enough: the box may come out smaller than it is, but not
                smaller than this. None for full size.

        Returns:
            The box in RGB.

        Raises:
            Exception: The file is damaged, or cannot be read for a reason that is named.
        """

    def close(self) -> None:
        """Close the file unread."""


def open_picture(file: str | os.PathLike | BinaryIO, reduce_jpeg: bool = True) -> Picture:
    """Open a picture and read its header. What it is follows from its first bytes, not from its name.

    Args:
        file: Path, or a file open for reading; that one is left open.
        reduce_jpeg: Whether a JPEG may be decoded at a fraction of its size where that is enough. TIFFs that come with
            smaller levels are read at the best of them in any case.

    Raises:
        DataError: It is empty, no picture, or larger than what may be decoded.
        ConfigError: It is a tiled TIFF, and the package that reads those is not installed.
        OSError: It cannot be opened.
    """
    if isinstance(file, str | os.PathLike):
        stream = owned = open(file, "rb")  # noqa: SIM115 the picture closes it
    else:
        stream, owned = file if file.seekable() else io.BytesIO(file.read()), None
    try:
        return _open(stream, owned, reduce_jpeg)
    except BaseException:
        if owned is not None:
            owned.close()
        raise


def _open(stream: BinaryIO, owned: BinaryIO | None, reduce_jpeg: bool) -> Picture:
    start = stream.read(16)
    stream.seek(0)
    if not start:
        raise DataError("it is empty: 0 bytes")
    if start.startswith(_TIFF):
        if is_read_by_tile(stream, start):
            return TiledTiff(stream, owned)
        try:
            return _Decoded(_parsed(TiffImagePlugin.TiffImageFile, stream), owned)
        except DataError:  # a BigTIFF of the other byte order, for example
            stream.seek(0)
            return TiledTiff(stream, owned)
    if start.startswith(_JPEG):
        return _Decoded(_parsed(JpegImagePlugin.JpegImageFile, stream), owned, (8, 4, 2, 1) if reduce_jpeg else (1,))
    try:
        return _Decoded(Image.open(stream), owned)
    except Image.DecompressionBombError as error:
        raise DataError(f"{error} {_TOO_LARGE}") from error
    except UnidentifiedImageError as error:
        raise DataError(f"it is no picture that PIL knows; it begins with {start!r}") from error


def _parsed(plugin: type[ImageFile.ImageFile], stream: BinaryIO) -> ImageFile.ImageFile:
    # Not Image.open: it would refuse a huge picture before anybody knows how much of it is wanted.
    try:
        return plugin(stream)
    except SyntaxError as error:  # PIL's way of saying that a header cannot be read
        raise DataError(f"its {plugin.format} header cannot be read: {error}") from error


class _Decoded:
    """A picture that PIL decodes whole; see Picture.

    Args:
        image: Opened, not loaded.
        owned: A file to close; None where it is the caller's.
        scales: What the decoder can divide width and height by, the largest first.
    """

    def __init__(self, image: ImageFile.ImageFile, owned: BinaryIO | None, scales: tuple[int, ...] = (1,)) -> None:
        self._image, self._owned, self._scales = image, owned, scales
        self._orientation, self._stored_size = _orientation(image), image.size
        self._is_zero_white = getattr(image, "tag_v2", {}).get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
        self.size = oriented_size(image.size, self._orientation)

    def read(self, box: Box | None = None, min_size: WidthHeight | None = None) -> Image.Image:
        assert self._image is not None, "a picture is read once"
        image, self._image = self._image, None
        try:
            asked = stored_box(box or whole(self.size), self._stored_size, self._orientation)
            scale, asked = self._reduced(asked, min_size and oriented_size(min_size, self._orientation))
            if scale > 1:
                # draft takes a size, and decodes at the smallest that is not below it
                image.draft(None, tuple(side // scale for side in self._stored_size))
                assert image.size == self._size_at(scale), (image.size, self._stored_size, scale)
            require_decodable(image.size, _TOO_LARGE)
            part = image if asked == whole(image.size) else image.crop(asked)
            # PIL gives 16-bit pixels in 32 bits where the format has no other whole numbers
            rgb = to_rgb(part, image.format in ("PNG", "PPM"), self._is_zero_white)
        finally:
            self.close()
        return turned(rgb, self._orientation)

    def close(self) -> None:
        self._image = None
        if self._owned is not None:
            self._owned.close()

    def _size_at(self, scale: int) -> WidthHeight:
        width, height = self._stored_size
        return (-(-width // scale), -(-height // scale))

    def _reduced(self, box: Box, min_size: WidthHeight | None) -> tuple[int, Box]:
        """Return by how much to reduce, and where the box lies then."""
        for scale in self._scales if min_size else ():
            smaller = reduced_box(box, self._stored_size, self._size_at(scale), (scale, scale))
            if covers(smaller, min_size) and scale <= min(self._stored_size):
                return scale, smaller
        return 1, box


def _orientation(image: ImageFile.ImageFile) -> int:
    if image.format == "TIFF":
        return 1  # PIL turns these itself
    # PIL decodes a whole PNG to see whether its EXIF block comes last; where it comes first, as it should, it is known.
    if image.format == "PNG" and not {"exif", "Raw profile type exif", "XML:com.adobe.xmp"} & image.info.keys():
        return 1
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # whatever PIL's parser raises: a spoilt block says nothing about the pixels, which may be sound
        return 1
