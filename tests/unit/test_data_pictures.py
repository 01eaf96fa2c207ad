"""Pictures of every kind come out as PIL and numpy say they should, decoded no further than asked."""

import importlib.util
import io
import os
import struct
import subprocess
import sys
import warnings
import zlib
from contextlib import nullcontext
from functools import lru_cache

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps, UnidentifiedImageError

from vit_tp.data.boxes import Box, Grid
from vit_tp.data.pictures import open_picture
from vit_tp.errors import ConfigError, DataError

HAS_CODECS = importlib.util.find_spec("imagecodecs") is not None


def noise(*shape, dtype=np.uint8, seed=0):
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def smooth(width, height):
    """A picture that looks alike at any size: red grows to the right, green downwards, blue in a bow."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    return Image.fromarray((np.stack([x, y, np.sin(3 * x + 2 * y) / 2 + 0.5], -1) * 255).astype(np.uint8))


def pixels(file, *args, **kwargs):
    image = open_picture(file, **kwargs).read(*args)
    assert image.mode == "RGB"
    return np.asarray(image)


def png(path, array, bits, colour):
    """Write a PNG by hand: PIL writes no 16-bit colours."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = array.shape[:2]
    rows = b"".join(b"\0" + row.astype(f">u{bits // 8}").tobytes() for row in array)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))
    return path


# modes and formats


def with_transparent_palette():
    image = Image.fromarray(noise(9, 14, 3)).quantize(16)
    image.info["transparency"] = bytes(range(0, 256, 16))
    return image


KINDS = {
    "rgb.jpg": Image.fromarray(noise(9, 14, 3)),
    "grey.jpg": Image.fromarray(noise(9, 14)),
    "cmyk.jpg": Image.fromarray(noise(9, 14, 4), "CMYK"),
    "rgb.png": Image.fromarray(noise(9, 14, 3)),
    "grey.png": Image.fromarray(noise(9, 14)),
    "bits.png": Image.fromarray(noise(9, 14)).convert("1"),
    "grey_alpha.png": Image.fromarray(noise(9, 14, 2), "LA"),
    "rgb_alpha.png": Image.fromarray(noise(9, 14, 4), "RGBA"),
    "palette.png": Image.fromarray(noise(9, 14, 3)).quantize(16),
    "transparent_palette.png": with_transparent_palette(),
    "rgb.webp": Image.fromarray(noise(9, 14, 3)),
    "rgb_alpha.webp": Image.fromarray(noise(9, 14, 4), "RGBA"),
    "rgb.bmp": Image.fromarray(noise(9, 14, 3)),
    "palette.gif": Image.fromarray(noise(9, 14, 3)).quantize(16),
    "rgb.tif": Image.fromarray(noise(9, 14, 3)),
    "cmyk.tif": Image.fromarray(noise(9, 14, 4), "CMYK"),
    "bits.tif": Image.fromarray(noise(9, 14)).convert("1"),
    "rgb.ppm": Image.fromarray(noise(9, 14, 3)),
}


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("box", [None, Box(2, 1, 11, 7)], ids=["whole", "box"])
def test_a_picture_of_8_bits_is_what_pil_makes_rgb_of(tmp_path, name, box):
    KINDS[name].save(tmp_path / name)
    with Image.open(tmp_path / name) as image:
        expected = np.asarray(image.convert("RGB").crop(box) if box else image.convert("RGB"))
    picture = open_picture(tmp_path / name)
    assert picture.size == (14, 9)
    np.testing.assert_array_equal(np.asarray(picture.read(box)), expected)
    np.testing.assert_array_equal(pixels(io.BytesIO((tmp_path / name).read_bytes()), box), expected)


def test_transparent_pixels_keep_their_colour(tmp_path):
    colours = noise(4, 5, 4)
    colours[..., 3] = 0
    Image.fromarray(colours, "RGBA").save(tmp_path / "a.png")
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), colours[..., :3])


def test_a_jpeg_of_adobes_ycck(tmp_path):
    """One colour. Adobe stores ink upside down, 255 is none, and Y, Cb, Cr are those of 255 minus that."""
    y, cb, cr, k = 180, 100, 160, 230
    stored = Image.new("CMYK", (16, 16), (255 - y, 255 - cb, 255 - cr, 255 - k))  # PIL inverts as it writes
    stored.save(tmp_path / "a.jpg", quality=100)
    data = (tmp_path / "a.jpg").read_bytes()
    at = data.index(b"Adobe") + 11
    assert data[at] == 0, "no longer stored as CMYK"
    (tmp_path / "a.jpg").write_bytes(data[:at] + b"\2" + data[at + 1 :])
    ink = np.array([y + 1.402 * (cr - 128), y - 0.344 * (cb - 128) - 0.714 * (cr - 128), y + 1.772 * (cb - 128)])
    np.testing.assert_allclose(pixels(tmp_path / "a.jpg")[8, 8], (255 - ink) * k / 255, atol=3)


def test_16_bit_grey_is_scaled_and_not_clipped(tmp_path):
    grey = noise(40, 50, dtype=np.uint16)
    expected = np.repeat(np.rint(grey / 257)[..., None], 3, -1)
    tifffile.imwrite(tmp_path / "strips.tif", grey, compression="deflate")
    tifffile.imwrite(tmp_path / "big_endian.tif", grey, byteorder=">")
    tifffile.imwrite(tmp_path / "white_is_zero.tif", 65535 - grey, photometric="miniswhite")
    Image.fromarray(grey).save(tmp_path / "a.png")
    Image.fromarray(grey).save(tmp_path / "a.pgm", "PPM")
    for path in tmp_path.iterdir():
        np.testing.assert_array_equal(pixels(path), expected, err_msg=path.name)
        np.testing.assert_array_equal(pixels(path, Box(3, 4, 30, 20)), expected[4:20, 3:30], err_msg=path.name)
    with Image.open(tmp_path / "a.png") as image, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert np.abs(np.asarray(image.convert("RGB"), int) - expected).max() > 100  # what PIL makes of it


def test_16_bit_colours(tmp_path):
    """PIL takes the high byte of these, which is one less than the nearest of 8 bits at times."""
    colours = noise(40, 50, 3, dtype=np.uint16)
    tifffile.imwrite(tmp_path / "strips.tif", colours, photometric="rgb")
    png(tmp_path / "rgb.png", colours, 16, 2)
    png(tmp_path / "rgba.png", np.concatenate([colours, colours[..., :1]], -1), 16, 6)
    for path in tmp_path.iterdir():
        assert np.abs(pixels(path) - colours / 257).max() <= 1, path.name


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("tile", [None, (16, 16)], ids=["strips", "tiles"])
def test_numbers_without_a_known_range_are_refused(tmp_path, dtype, tile):
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((40, 50), dtype), tile=tile)
    with pytest.raises(DataError, match="numbers, and which of them is white is not known; write it with 8 or 16 bits"):
        open_picture(tmp_path / "a.tif").read()


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png"])
def test_of_an_animation_the_first_frame_is_read(tmp_path, name):
    frames = [Image.new("RGB", (20, 10), colour) for colour in ((250, 0, 0), (0, 250, 0))]
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
    assert np.abs(pixels(tmp_path / name).astype(int) - [250, 0, 0]).max() < 6


def test_of_a_document_the_first_page_is_read(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", noise(3, 20, 30, 3), photometric="rgb")
    np.testing.assert_array_equal(pixels(tmp_path / "a.tif"), noise(3, 20, 30, 3)[0])


# orientation


def write_oriented(path, orientation):
    if path.name == "tiled.tif":
        tag = (274, "H", 1, orientation, True)
        tifffile.imwrite(path, noise(70, 90, 3), tile=(16, 32), photometric="rgb", extratags=[tag])
        return
    exif = Image.Exif()
    exif[274] = orientation
    Image.fromarray(noise(70, 90, 3)).save(path, exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif", "tiled.tif"])
def test_a_picture_is_turned_as_exif_says(tmp_path, name, orientation):
    write_oriented(tmp_path / name, orientation)
    with Image.open(tmp_path / name) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    picture = open_picture(tmp_path / name)
    assert picture.size == expected.shape[1::-1] == ((70, 90) if orientation > 4 else (90, 70))
    np.testing.assert_array_equal(np.asarray(picture.read()), expected)
    np.testing.assert_array_equal(pixels(tmp_path / name, Box(5, 7, 41, 60)), expected[7:60, 5:41])


@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
def test_a_turned_jpeg_is_reduced_at_the_right_place(tmp_path, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    smooth(800, 640).save(tmp_path / "a.jpg", exif=exif, quality=95)
    box = Box(100, 60, 420, 620)
    full = open_picture(tmp_path / "a.jpg").read(box)
    reduced = open_picture(tmp_path / "a.jpg").read(box, (70, 130))
    assert reduced.size == (80, 140)
    expected = np.asarray(full.resize(reduced.size, Image.Resampling.BOX), float)
    assert np.abs(np.asarray(reduced) - expected).max() < 8


# reduced decoding


@pytest.mark.parametrize(
    ("min_size", "size"),
    [(None, (801, 603)), ((801, 603), (801, 603)), ((401, 302), (401, 302)), ((402, 302), (801, 603))]
    + [((201, 1), (201, 151)), ((101, 76), (101, 76)), ((10, 10), (101, 76)), ((102, 10), (201, 151))],
)
def test_a_jpeg_is_decoded_at_the_smallest_scale_that_is_enough(tmp_path, min_size, size):
    smooth(801, 603).save(tmp_path / "a.jpg", quality=95)
    assert open_picture(tmp_path / "a.jpg").read(None, min_size).size == size
    assert open_picture(tmp_path / "a.jpg", reduce_jpeg=False).read(None, min_size).size == (801, 603)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("scale", [2, 4, 8])
def test_a_reduced_box_shows_what_the_box_shows(tmp_path, progressive, scale):
    smooth(1003, 777).save(tmp_path / "a.jpg", quality=95, progressive=progressive)
    box = Box(211, 105, 811, 699)
    full = open_picture(tmp_path / "a.jpg").read(box)
    reduced = open_picture(tmp_path / "a.jpg").read(box, (box.width // scale - 1, box.height // scale - 1))
    assert abs(reduced.width - box.width / scale) <= 1 and abs(reduced.height - box.height / scale) <= 1
    expected = np.asarray(full.resize(reduced.size, Image.Resampling.BOX), float)
    assert np.abs(np.asarray(reduced) - expected).mean() < 2


def test_a_tiny_jpeg_is_not_reduced_to_nothing(tmp_path):
    smooth(3, 40).save(tmp_path / "a.jpg")
    assert open_picture(tmp_path / "a.jpg").read(None, (1, 1)).size == (2, 20)
    assert open_picture(tmp_path / "a.jpg").read(Box(2, 39, 3, 40), (1, 1)).size == (1, 1)


# tiles and levels


TILED = {
    "rgb": (noise(101, 203, 3), {"photometric": "rgb"}),
    "rgb 16 bits": (noise(101, 203, 3, dtype=np.uint16), {"photometric": "rgb"}),
    "big endian": (noise(101, 203, 3, dtype=np.uint16), {"photometric": "rgb", "byteorder": ">"}),
    "BigTIFF": (noise(101, 203, 3), {"photometric": "rgb", "bigtiff": True}),
    "rgba": (noise(101, 203, 4), {"photometric": "rgb", "extrasamples": ["unassalpha"]}),
    "planes": (noise(3, 101, 203), {"photometric": "rgb", "planarconfig": "separate"}),
    "grey": (noise(101, 203), {"photometric": "minisblack"}),
    "grey 16 bits": (noise(101, 203, dtype=np.uint16), {"photometric": "minisblack"}),
    "white is 0": (noise(101, 203), {"photometric": "miniswhite"}),
    "grey and alpha": (noise(101, 203, 2), {"photometric": "minisblack", "extrasamples": ["unassalpha"]}),
    "bits": (noise(101, 203) > 127, {"photometric": "minisblack"}),
}


def rgb_of(array, kind):
    """What numpy says."""
    if kind == "planes":
        array = array.transpose(1, 2, 0)
    if array.dtype == np.uint16:
        array = np.rint(array / 257)
    if array.dtype == bool:
        array = array * 255
    if array.ndim == 2 or array.shape[-1] == 2:
        array = np.repeat(array.reshape(*array.shape[:2], -1)[..., :1], 3, -1)
    return 255 - array if kind == "white is 0" else array[..., :3]


@pytest.mark.parametrize("compression", [None, "deflate"])
@pytest.mark.parametrize("kind", TILED)
def test_a_window_of_a_tiled_tiff_is_numpys(tmp_path, kind, compression):
    array, how = TILED[kind]
    if kind == "bits" and not HAS_CODECS and compression:
        pytest.skip("packed bits need imagecodecs")
    tifffile.imwrite(tmp_path / "a.tif", array, tile=(32, 48), compression=compression, **how)
    expected = rgb_of(array, kind)
    for box in (None, Box(0, 0, 1, 1), Box(47, 31, 49, 33), Box(90, 60, 203, 101), Box(202, 100, 203, 101)):
        here = slice(None) if box is None else (slice(box.top, box.bottom), slice(box.left, box.right))
        np.testing.assert_array_equal(pixels(tmp_path / "a.tif", box), expected[here], err_msg=str(box))
    with open(tmp_path / "a.tif", "rb") as file:
        np.testing.assert_array_equal(pixels(file, Box(5, 6, 50, 70)), expected[6:70, 5:50])
        assert not file.closed


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_strips_that_pil_does_not_read(tmp_path):
    planes = noise(3, 101, 203, dtype=np.uint16)
    tifffile.imwrite(tmp_path / "planes.tif", planes, photometric="rgb", planarconfig="separate")
    tifffile.imwrite(tmp_path / "big.tif", noise(101, 203, 3), photometric="rgb", bigtiff=True, byteorder=">")
    with Image.open(tmp_path / "planes.tif") as image:
        assert np.abs(np.asarray(image, int) - planes.transpose(1, 2, 0) // 257).max() > 200, "PIL reads these now"
    with pytest.raises(UnidentifiedImageError):
        Image.open(tmp_path / "big.tif")
    np.testing.assert_array_equal(pixels(tmp_path / "planes.tif"), np.rint(planes.transpose(1, 2, 0) / 257))
    np.testing.assert_array_equal(pixels(tmp_path / "big.tif", Box(3, 4, 50, 60)), noise(101, 203, 3)[4:60, 3:50])


def test_a_tiled_palette(tmp_path):
    index, palette = noise(50, 60), noise(3, 256, dtype=np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", index, tile=(16, 16), photometric="palette", colormap=palette)
    np.testing.assert_array_equal(pixels(tmp_path / "a.tif"), np.rint(palette[:, index].transpose(1, 2, 0) / 257))


def write_pyramid(path, how, dtype=np.uint8):
    """Levels of 400, 200 and 100 pixels whose blue is 0, 100 and 200, so that it is seen which one was read."""
    levels = []
    for number, side in enumerate((400, 200, 100)):
        x, y = np.meshgrid(np.arange(side), np.arange(side))
        levels.append(np.stack([x * 250 // side, y * 250 // side, np.full_like(x, number * 100)], -1))
    levels = [level.astype(dtype) * (257 if dtype == np.uint16 else 1) for level in levels]
    options = {"tile": (32, 32), "photometric": "rgb", "compression": "deflate", "metadata": None}
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(levels[0], subifds=2 if how == "SubIFDs" else 0, **options)
        for level in levels[1:]:
            tiff.write(level, subfiletype=1, **options)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("how", ["SubIFDs", "pages"])
@pytest.mark.parametrize(
    ("box", "min_size", "level", "size"),
    [
        (None, None, 0, (400, 400)),
        (None, (400, 400), 0, (400, 400)),
        (None, (201, 10), 0, (400, 400)),
        (None, (200, 200), 1, (200, 200)),
        (None, (10, 100), 2, (100, 100)),
        (Box(100, 40, 300, 360), (50, 80), 2, (50, 80)),
        (Box(100, 40, 300, 360), (51, 80), 1, (100, 160)),
    ],
)
def test_the_smallest_level_that_is_enough_is_read(tmp_path, how, dtype, box, min_size, level, size):
    write_pyramid(tmp_path / "a.tif", how, dtype)
    picture = open_picture(tmp_path / "a.tif")
    assert picture.size == (400, 400)
    image = picture.read(box, min_size)
    assert image.size == size
    red, green, blue = image.getpixel((0, 0))
    assert blue == level * 100
    assert (red, green) == pytest.approx((box.left * 250 / 400, box.top * 250 / 400) if box else (0, 0), abs=1)


def test_strips_with_smaller_pages_are_a_pyramid_too(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.tif") as tiff:
        tiff.write(np.full((90, 90, 3), 10, np.uint8), photometric="rgb", rowsperstrip=8, metadata=None)
        tiff.write(np.full((45, 45, 3), 20, np.uint8), photometric="rgb", subfiletype=1, metadata=None)
    assert pixels(tmp_path / "a.tif", Box(10, 10, 60, 61)).shape == (51, 50, 3)
    assert (pixels(tmp_path / "a.tif", None, (40, 40)) == 20).all()


def write_jpeg_tiles(path):
    image = smooth(64, 64)
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=95)
    tiles = iter([encoded.getvalue()] * 4)
    options = {"tile": (64, 64), "compression": "deflate", "photometric": "rgb"}
    tifffile.imwrite(path, tiles, shape=(128, 128, 3), dtype=np.uint8, **options)
    with tifffile.TiffFile(path, mode="r+") as tiff:  # tifffile writes JPEG only where it could encode it
        tiff.pages[0].tags["Compression"].overwrite(7)
        tiff.pages[0].tags["PhotometricInterpretation"].overwrite(6)
    return np.asarray(Image.open(encoded))


def test_tiles_of_jpeg(tmp_path):
    expected = write_jpeg_tiles(tmp_path / "a.tif")
    if not HAS_CODECS:
        with pytest.raises(ConfigError, match=r"COMPRESSION\.JPEG.*'imagecodecs'.*Use pip install 'vit-tp\[tiff\]'"):
            open_picture(tmp_path / "a.tif").read()
        return
    assert np.abs(pixels(tmp_path / "a.tif", Box(64, 64, 128, 128)).astype(int) - expected).max() <= 4


def test_a_tiled_tiff_without_tifffile_names_what_to_install(tmp_path, monkeypatch):
    tifffile.imwrite(tmp_path / "tiles.tif", noise(64, 64), tile=(16, 16))
    tifffile.imwrite(tmp_path / "strips.tif", noise(64, 64))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(ConfigError, match=r"tifffile, which does, is not installed\. Use pip install 'vit-tp\[tiff\]'"):
        open_picture(tmp_path / "tiles.tif")
    assert open_picture(tmp_path / "strips.tif").read().size == (64, 64)


# huge pictures


@pytest.fixture(scope="module")
def huge(tmp_path_factory):
    """20000 x 20000 pixels, 1.2 GB when decoded: the red and green of a tile say where it is."""
    path, side, tile = tmp_path_factory.mktemp("huge") / "huge.tif", 20000, 512
    count = -(-side // tile)

    @lru_cache
    def encoded(red, green):
        return zlib.compress(np.tile(np.uint8([red, green, 77]), (tile, tile, 1)).tobytes())

    tiles = (encoded(row % 8 * 30, column % 8 * 30) for row in range(count) for column in range(count))
    tifffile.imwrite(
        path, tiles, shape=(side, side, 3), dtype=np.uint8, tile=(tile, tile), compression="deflate", photometric="rgb"
    )
    return path


def test_a_window_of_a_huge_tiff_takes_little_memory(huge):
    script = f"""
from vit_tp.data.boxes import Box
from vit_tp.data.pictures import open_picture
import tifffile

def peak_mb():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak_mb()
picture = open_picture({str(huge)!r})
image = picture.read(Box(5000, 7000, 5512, 7512))
print(picture.size, image.size, image.getpixel((0, 0)), image.getpixel((511, 511)), sep="|")
print(peak_mb() - before)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    seen, grown_mb = ended.stdout.splitlines()
    assert seen == "(20000, 20000)|(512, 512)|(150, 30, 77)|(180, 60, 77)"
    assert float(grown_mb) < 50


def test_a_huge_tiff_without_levels_is_refused_whole_and_averaged_where_less_is_enough(huge, monkeypatch):
    with pytest.raises(DataError, match=r"20000 x 20000 pixels would have to be decoded.*data\.tile_size"):
        open_picture(huge).read()
    box = Box(4096, 1024, 8192, 5120)  # tiles 8 to 15, 2 to 9
    expected = open_picture(huge).read(box).reduce(8)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2_000_000)
    averaged = open_picture(huge).read(box, (500, 300))
    assert averaged.size == (512, 512)
    np.testing.assert_array_equal(np.asarray(averaged), np.asarray(expected))


def test_the_average_of_a_region_is_pils(tmp_path, monkeypatch):
    array = noise(700, 900, 3)
    tifffile.imwrite(tmp_path / "a.tif", array, tile=(64, 64), photometric="rgb")
    box = Box(33, 21, 888, 690)
    expected = Image.fromarray(array).crop(box).reduce(4)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100_000)
    np.testing.assert_array_equal(pixels(tmp_path / "a.tif", box, (200, 160)), np.asarray(expected))


def test_a_huge_png_is_refused_with_what_to_do(tmp_path):
    png(tmp_path / "a.png", np.zeros((1, 1), np.uint8), 8, 0)
    data = bytearray((tmp_path / "a.png").read_bytes())
    data[16:24] = struct.pack(">II", 20000, 20000)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(DataError, match=r"400000000 pixels.*decoded whole\. Write it as a tiled TIFF"):
        open_picture(tmp_path / "a.png")


@pytest.mark.parametrize("name", ["a.jpg", "strips.tif"])
def test_what_is_decoded_whole_is_refused_past_pils_limit(tmp_path, monkeypatch, name):
    if name == "a.jpg":
        smooth(400, 300).save(tmp_path / name)
    else:
        tifffile.imwrite(tmp_path / name, np.asarray(smooth(400, 300)), photometric="rgb", rowsperstrip=10)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 7000)
    if name == "a.jpg":
        with pytest.raises(DataError, match="400 x 300 pixels would have to be decoded, more than .* 14000"):
            open_picture(tmp_path / name).read()
        assert open_picture(tmp_path / name).read(None, (100, 75)).size == (100, 75)
    else:  # strip by strip
        assert open_picture(tmp_path / name).read(Box(0, 0, 50, 60)).size == (50, 60)


# what is broken


def test_a_png_by_the_name_of_jpg_is_read(tmp_path):
    Image.fromarray(noise(8, 8, 3)).save(tmp_path / "a.jpg", "PNG")
    np.testing.assert_array_equal(pixels(tmp_path / "a.jpg"), noise(8, 8, 3))


def one_line(path):
    with pytest.raises(Exception) as caught:
        open_picture(path).read()
    assert not isinstance(caught.value, AssertionError | UnidentifiedImageError)
    assert str(caught.value).strip() and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.bmp", "a.tif", "tiles.tif", "pyramid.tif"])
@pytest.mark.parametrize("share", [0.03, 0.3, 0.45, 0.95])
def test_a_file_that_is_cut_short(tmp_path, name, share):
    if name == "tiles.tif":
        tifffile.imwrite(tmp_path / name, noise(128, 128), tile=(16, 16))
    elif name == "pyramid.tif":
        write_pyramid(tmp_path / name, "pages")
        share /= 2  # full size comes first, and is read without the rest
    else:
        Image.fromarray(noise(64, 64, 3)).save(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(len(data) * share)])
    one_line(tmp_path / name)


STARTS = [b"", b"no picture", b"\xff\xd8\xff", b"II*\0", b"MM\0*\0\0\0\x08", b"\x89PNG\r\n\x1a\n"]


@pytest.mark.parametrize("content", STARTS)
def test_a_file_that_is_no_picture(tmp_path, content):
    (tmp_path / "a.jpg").write_bytes(content)
    reason = one_line(tmp_path / "a.jpg")
    if not content:
        assert reason == "it is empty: 0 bytes"


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_picture(tmp_path / "a.jpg")
    with pytest.raises(OSError):
        open_picture(tmp_path)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "strips.tif", "tiles.tif"])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_reading_closes_the_file_and_so_does_close(tmp_path, name, is_damaged):
    path = tmp_path / name
    if name == "tiles.tif":
        tifffile.imwrite(path, noise(128, 128), tile=(16, 16))
    else:
        Image.fromarray(noise(128, 128)).save(path)

    def is_open():
        return any(os.path.realpath(f"/proc/self/fd/{fd}") == str(path) for fd in os.listdir("/proc/self/fd"))

    first, second = open_picture(path), open_picture(path)
    assert is_open()
    second.close()
    if is_damaged:
        os.truncate(path, path.stat().st_size // 3)
    with pytest.raises(Exception) if is_damaged else nullcontext():
        first.read()
    assert not is_open()


# windows of many pictures


def test_windows_cover_every_pixel_and_are_full():
    sizes = [(1000, 700), (512, 512), (513, 100), (30, 20), None, (1, 5000)]
    grid = Grid(sizes, 512)
    found = [grid.window(index) for index in range(len(grid))]
    assert [sum(picture == number for picture, _ in found) for number in range(6)] == [4, 1, 2, 1, 1, 10]
    assert [picture for picture, _ in found] == sorted(picture for picture, _ in found)
    assert found[8] == (4, None)
    for number, size in enumerate(sizes):
        if size is None:
            continue
        width, height = size
        seen = np.zeros((height, width), int)
        for box in (box for picture, box in found if picture == number):
            assert (box.width, box.height) == (min(512, width), min(512, height))
            seen[box.top : box.bottom, box.left : box.right] += 1
        assert seen.min() == 1
    with pytest.raises(AssertionError):
        grid.window(len(grid))
    assert len(Grid([], 512)) == 0
