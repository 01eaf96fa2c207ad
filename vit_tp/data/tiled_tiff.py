"""How is a window of a huge TIFF read?

By decoding the tiles under it and nothing else, at the level of the pyramid that is just large enough. tifffile finds
the levels and decodes a tile; the tiles are fetched here and not through tifffile's zarr store, which would bring an
event loop with threads of its own into every loader process, and takes longer for windows of a few tiles.

    TIFF -> series 0 -> levels: SubIFDs, or pages that are half as large, or a third, a quarter -> strips or tiles

A region that has more pixels than PIL would decode, at the best level still, is averaged down as it is read.

Does not know: what is random about a sample, other formats.

Source: TIFF 6.0, sections 2 and 15; https://github.com/cgohlke/tifffile (TiffPage.decode, TiffPage.segments).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from PIL import Image

from vit_tp.data.boxes import Box, WidthHeight, covers, halvings, oriented_size, reduced_box, stored_box, whole
from vit_tp.data.pixels import pixel_limit, require_decodable, to_8_bits, turned, unknown_range
from vit_tp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tifffile import TiffFrame, TiffPage

_WIDTH, _LENGTH, _ORIENTATION, _PLANAR_CONFIGURATION = 256, 257, 274, 284
_TILE_WIDTH, _SUB_IFDS, _NEW_SUBFILE_TYPE = 322, 330, 254
_WHITE_IS_0, _GREY, _RGB, _PALETTE, _CMYK, _YCBCR = 0, 1, 2, 3, 5, 6
_JPEG_COMPRESSIONS = (6, 7, 34892, 33007)
_BLOCK = 2048
_INSTALL = "pip install 'vit-tp[tiff]'"


def is_read_by_tile(stream: BinaryIO, start: bytes) -> bool:
    """Return whether a TIFF has tiles, levels or planes of a colour each, or is too large to be decoded whole.

    Of planes of 16 bits PIL makes a wrong picture, without a word.

    Args:
        stream: At its start, and there again afterwards.
        start: Its first 16 bytes.

    Raises:
        DataError: Its header is damaged.
    """
    try:
        pages = list(islice(_directories(stream, start), 2))
    except (struct.error, ValueError, OSError) as error:
        raise DataError(f"its TIFF header cannot be read: {error}") from error
    finally:
        stream.seek(0)
    first = pages[0] if pages else {}
    has_smaller_page = len(pages) == 2 and pages[1].get(_NEW_SUBFILE_TYPE, 0) & 1
    is_huge = first.get(_WIDTH, 0) * first.get(_LENGTH, 0) > pixel_limit()
    has_planes = first.get(_PLANAR_CONFIGURATION, 1) == 2
    return _TILE_WIDTH in first or _SUB_IFDS in first or bool(has_smaller_page) or is_huge or has_planes


def _directories(stream: BinaryIO, start: bytes) -> Iterator[dict[int, int]]:
    """Yield the tags of each page: tag -> its number where that is one short or long, else anything."""
    order = "<" if start.startswith(b"II") else ">"
    is_big = 43 in start[2:4]
    count_format, offset_format = (order + "Q", order + "Q") if is_big else (order + "H", order + "L")
    entry_bytes, value_at = (20, 12) if is_big else (12, 8)
    (offset,) = struct.unpack_from(offset_format, start, 8 if is_big else 4)
    while offset:
        stream.seek(offset)
        (count,) = struct.unpack(count_format, stream.read(struct.calcsize(count_format)))
        entries = stream.read(count * entry_bytes)
        tags = {}
        for at in range(0, count * entry_bytes, entry_bytes):
            tag, kind = struct.unpack_from(order + "HH", entries, at)
            (tags[tag],) = struct.unpack_from(order + ("H" if kind == 3 else "L"), entries, at + value_at)
        yield tags
        (offset,) = struct.unpack(offset_format, stream.read(struct.calcsize(offset_format)))


class TiledTiff:
    """A TIFF of which only what is needed is decoded; see vit_tp.data.pictures.Picture.

    Args:
        stream: At its start.
        owned: A file to close; None where it is the caller's.

    Raises:
        ConfigError: tifffile is not installed.
        DataError: Its pixels are of a kind that has no known range or colour.
    """

    def __init__(self, stream: BinaryIO, owned: BinaryIO | None) -> None:
        try:
            from tifffile import TiffFile
        except ImportError as error:
            raise ConfigError(
                f"it is a TIFF with tiles, levels or planes, of more than {pixel_limit():.0f} pixels, or of a kind "
                f"that PIL does not read; tifffile, which does, is not installed. Use {_INSTALL}."
            ) from error
        self._owned = owned
        series = TiffFile(stream).series
        if not series or series[0].levels[0].pages[0] is None:
            raise DataError("it is a TIFF without a picture")
        self._levels: list[TiffPage | TiffFrame] = [level.pages[0] for level in series[0].levels]
        page = self._levels[0].keyframe
        _require_known_pixels(page)
        tag = page.tags.get(_ORIENTATION)
        self._orientation = 1 if tag is None else int(tag.value)
        self.size = oriented_size(_size(page), self._orientation)

    def read(self, box: Box | None = None, min_size: WidthHeight | None = None) -> Image.Image:
        try:
            asked = stored_box(box or whole(self.size), _size(self._levels[0].keyframe), self._orientation)
            image = self._read(asked, min_size and oriented_size(min_size, self._orientation))
        finally:
            self.close()
        return turned(image, self._orientation)

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()

    def _read(self, box: Box, min_size: WidthHeight | None) -> Image.Image:
        page, box = self._best_level(box, min_size)
        if box.area <= pixel_limit():
            return Image.fromarray(_decode(page, box))
        by = halvings(box, min_size) if min_size else 1
        require_decodable(
            (box.width // by, box.height // by), "cut it into windows with data.tile_size, or ask for smaller crops"
        )
        return _averaged(page, box, by)

    def _best_level(self, box: Box, min_size: WidthHeight | None) -> tuple[TiffPage | TiffFrame, Box]:
        """Return the smallest level at which a box has the size that is enough, and where the box lies there."""
        size = _size(self._levels[0].keyframe)
        best = self._levels[0], box
        for level in self._levels[1:] if min_size else ():
            level_size = _size(level.keyframe)
            factors = size[0] / level_size[0], size[1] / level_size[1]
            smaller = reduced_box(box, size, level_size, factors)
            if covers(smaller, min_size) and smaller.area < best[1].area:
                best = level, smaller
        return best


def _size(page: TiffPage) -> WidthHeight:
    return page.imagewidth, page.imagelength


def _require_known_pixels(page: TiffPage) -> None:
    if page.dtype is None or page.dtype.kind not in "ub" or page.dtype.itemsize > 2:
        raise DataError(unknown_range(str(page.dtype)))
    colour, samples = int(page.photometric), page.samplesperpixel
    is_known = {
        _WHITE_IS_0: samples in (1, 2),
        _GREY: samples in (1, 2),  # the second is transparency
        _RGB: samples >= 3,
        _PALETTE: samples == 1,
        _CMYK: samples >= 4,
        _YCBCR: samples == 3 and page.compression in _JPEG_COMPRESSIONS,  # decoded to RGB
    }
    if not is_known.get(colour, False) or page.imagedepth != 1:
        raise DataError(
            f"its pixels are {samples} samples of {page.photometric!r} with compression {page.compression!r}, which is "
            f"neither grey, RGB, CMYK nor a palette; write it as RGB"
        )


def _averaged(page: TiffPage | TiffFrame, box: Box, by: int) -> Image.Image:
    """Return a box at 1/by of its size, each pixel the mean of by * by of them, without ever holding it whole."""
    image = Image.new("RGB", (-(-box.width // by), -(-box.height // by)))
    step = -(-_BLOCK // by) * by
    for top in range(box.top, box.bottom, step):
        for left in range(box.left, box.right, step):
            block = Box(left, top, min(left + step, box.right), min(top + step, box.bottom))
            image.paste(
                Image.fromarray(_decode(page, block)).reduce(by), ((left - box.left) // by, (top - box.top) // by)
            )
    return image


def _decode(page: TiffPage | TiffFrame, box: Box) -> np.ndarray:
    """Return the pixels (Y, X, 3) uint8 of a box of one level; what the file leaves out is black."""
    layout: TiffPage = page.keyframe
    width, length = _size(layout)
    tile_width, tile_length = (
        (layout.tilewidth, layout.tilelength) if layout.is_tiled else (width, min(layout.rowsperstrip, length))
    )
    require_decodable((tile_width, tile_length), "it is stored in one piece. Write it with tiles")
    columns, rows = -(-width // tile_width), -(-length // tile_length)
    planes = layout.shaped[0]
    pixels = np.zeros((box.height, box.width, 3), np.uint8)
    for row in range(box.top // tile_length, -(-box.bottom // tile_length)):
        for column in range(box.left // tile_width, -(-box.right // tile_width)):
            first = row * columns + column
            parts = [_decode_tile(page, first + plane * rows * columns) for plane in range(planes)]
            if any(part is None for part in parts):
                continue
            tile = _to_rgb(layout, parts[0] if planes == 1 else np.concatenate(parts, axis=-1))
            left, top = column * tile_width, row * tile_length
            x0, y0 = max(box.left, left), max(box.top, top)
            x1, y1 = min(box.right, left + tile.shape[1]), min(box.bottom, top + tile.shape[0])
            pixels[y0 - box.top : y1 - box.top, x0 - box.left : x1 - box.left] = tile[
                y0 - top : y1 - top, x0 - left : x1 - left
            ]
    return pixels


def _decode_tile(page: TiffPage | TiffFrame, index: int) -> np.ndarray | None:
    """Return a tile or strip (Y, X, samples), or None where the file leaves it out."""
    file = page.parent.filehandle
    file.seek(page.dataoffsets[index])
    data = file.read(page.databytecounts[index])
    if len(data) != page.databytecounts[index]:
        raise DataError(f"it is cut short: {len(data)} of {page.databytecounts[index]} bytes of tile {index} are there")
    layout = page.keyframe
    for_jpeg = {"jpegtables": page.jpegtables, "jpegheader": layout.jpegheader}
    try:
        # (depth = 1, Y, X, samples)
        segment, _, _ = layout.decode(
            data or None, index, **(for_jpeg if layout.compression in _JPEG_COMPRESSIONS else {})
        )
    except (ValueError, NotImplementedError) as error:
        if "imagecodecs" not in str(error):
            raise
        raise ConfigError(f"its compression cannot be read: {error}. Use {_INSTALL}.") from error
    return None if segment is None else segment[0]


def _to_rgb(page: TiffPage, tile: np.ndarray) -> np.ndarray:
    """Return a tile (Y, X, samples) as (Y, X, 3) uint8."""
    colour = int(page.photometric)
    if colour == _PALETTE:
        return to_8_bits(page.colormap[:, tile[..., 0]].transpose(1, 2, 0), 2**16 - 1)
    bits = page.bitspersample
    tile = tile.view(np.uint8) if tile.dtype == bool else tile
    tile = tile if bits == 8 else to_8_bits(tile, 2**bits - 1)
    if colour == _CMYK:
        return np.asarray(Image.fromarray(np.ascontiguousarray(tile[..., :4]), "CMYK").convert("RGB"))
    if colour == _WHITE_IS_0:
        tile = 255 - tile
    return tile[..., :3] if tile.shape[-1] >= 3 else np.broadcast_to(tile[..., :1], (*tile.shape[:2], 3))
