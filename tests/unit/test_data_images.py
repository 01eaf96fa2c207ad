"""An image from file to sample: timm's at full size, near it when reduced, and never later than the deadline."""

import io
import os
import pickle
import random
import time

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image, ImageOps

from tests.unit.test_data_transforms import theirs
from vit_tp.config import DataConfig
from vit_tp.data.boxes import Box
from vit_tp.data.deadline import DecodeTimeout
from vit_tp.data.images import ImagePipeline, picture_size
from vit_tp.data.order import SampleKey
from vit_tp.data.sampling import sample_randomness
from vit_tp.data.spec import Form
from vit_tp.errors import ConfigError, DataError

TRAIN, VAL = Form("train", 0, (32, 48)), Form("val", 0, (32, 48))
AUGMENTED = {"auto_augment": "rand-m9-mstd0.5-inc1", "interpolation": "random", "color_jitter": 0.3}


def smooth(width, height):
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    return Image.fromarray((np.stack([x, y, np.sin(5 * x + 4 * y) / 2 + 0.5], -1) * 255).astype(np.uint8))


@pytest.fixture
def large(tmp_path):
    smooth(900, 700).save(tmp_path / "large.jpg", quality=95)
    return tmp_path / "large.jpg"


def timms(path, data, form, key):
    with Image.open(path) as image:
        image = image.convert("RGB")
    transform = theirs(data, form.is_training, form.size_at(key.epoch))
    if not form.is_training:
        return transform(image)
    with sample_randomness(form.seed, key):
        return transform(image)


@pytest.mark.parametrize(("reduced", "form"), [("never", TRAIN), ("never", VAL), ("train", VAL)])
def test_at_full_size_an_image_is_timms(large, reduced, form):
    data = DataConfig(reduced_decode=reduced, **(AUGMENTED if form.is_training else {}))
    pipeline = ImagePipeline(data, form)
    for key in (SampleKey(0, 0), SampleKey(0, 1), SampleKey(2, 1), SampleKey(2, 1, 1)):
        assert torch.equal(pipeline.load(large, key), timms(large, data, form, key))


@pytest.mark.parametrize("name", ["a.png", "a.webp", "small.jpg", "strips.tif", "tiles.tif"])
def test_what_cannot_be_reduced_is_timms_with_any_knob(tmp_path, name):
    image = smooth(60, 50)
    if name == "tiles.tif":
        tifffile.imwrite(tmp_path / name, np.asarray(image), tile=(16, 16), photometric="rgb", compression="deflate")
    else:
        image.save(tmp_path / name)
    for form in (TRAIN, VAL):
        data = DataConfig(reduced_decode="always", **(AUGMENTED if form.is_training else {}))
        pipeline = ImagePipeline(data, form)
        for index in range(6):
            key = SampleKey(1, index)
            assert torch.equal(pipeline.load(tmp_path / name, key), timms(tmp_path / name, data, form, key))


@pytest.mark.parametrize(("reduced", "form"), [("train", TRAIN), ("always", TRAIN), ("always", VAL)])
def test_a_reduced_image_shows_the_same(large, reduced, form):
    data = DataConfig(reduced_decode=reduced)
    pipeline = ImagePipeline(data, form)
    differences = []
    for index in range(10):
        full, seen = timms(large, data, form, SampleKey(0, index)), pipeline.load(large, SampleKey(0, index))
        differences.append((full.int() - seen.int()).abs().float())
    assert max(difference.mean() for difference in differences) < 2
    assert max(difference.max() for difference in differences) > 0, "nothing was reduced"


def test_a_reduced_image_takes_a_fraction_of_the_time(tmp_path):
    smooth(2000, 1500).save(tmp_path / "a.jpg")
    seconds = {}
    for reduced in ("never", "train"):
        pipeline = ImagePipeline(DataConfig(reduced_decode=reduced, crop_scale=[0.5, 1.0]), TRAIN)
        begun = time.process_time()
        for index in range(5):
            pipeline.load(tmp_path / "a.jpg", SampleKey(0, index))
        seconds[reduced] = time.process_time() - begun
    assert seconds["train"] < seconds["never"] / 2


def test_a_level_of_a_pyramid_is_read_in_evaluation_too(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.tif") as tiff:
        options = {"tile": (16, 16), "photometric": "rgb", "metadata": None}
        tiff.write(np.full((160, 160, 3), 10, np.uint8), subifds=1, **options)
        tiff.write(np.full((80, 80, 3), 200, np.uint8), subfiletype=1, **options)
    assert (ImagePipeline(DataConfig(), VAL).load(tmp_path / "a.tif", SampleKey(0, 0)) == 200).all()
    large = Form("val", 0, (96, 96))
    assert (ImagePipeline(DataConfig(), large).load(tmp_path / "a.tif", SampleKey(0, 0)) == 10).all()


@pytest.mark.parametrize("form", [TRAIN, VAL])
@pytest.mark.parametrize("name", ["a.png", "tiles.tif"])
def test_a_window_is_an_image_of_its_own(tmp_path, form, name):
    array = np.asarray(smooth(200, 160))
    tifffile.imwrite(tmp_path / "tiles.tif", array, tile=(16, 16), photometric="rgb")
    Image.fromarray(array).save(tmp_path / "a.png")
    Image.fromarray(array[20:84, 100:180]).save(tmp_path / "window.png")
    pipeline = ImagePipeline(DataConfig(**(AUGMENTED if form.is_training else {})), form)
    for index in range(6):
        key = SampleKey(0, index)
        window = pipeline.load(tmp_path / name, key, Box(100, 20, 180, 84))
        assert torch.equal(window, pipeline.load(tmp_path / "window.png", key))


def test_an_open_file_is_read_and_left_open(large):
    data = large.read_bytes()
    file = io.BytesIO(data)
    pipeline = ImagePipeline(DataConfig(**AUGMENTED), TRAIN)
    assert torch.equal(pipeline.load(file, SampleKey(0, 3)), pipeline.load(large, SampleKey(0, 3)))
    assert not file.closed


def test_the_size_follows_from_the_epoch(large):
    form = Form("train", 0, (32, 48), schedule=((0, (16, 16)), (2, (24, 32)), (5, (32, 48))))
    pipeline = ImagePipeline(DataConfig(**AUGMENTED), form)
    for epoch, size in ((0, (16, 16)), (1, (16, 16)), (2, (24, 32)), (4, (24, 32)), (7, (32, 48))):
        key = SampleKey(epoch, 0)
        image = pipeline.load(large, key)
        assert image.shape == (3, *size) == form.shape_at(epoch, 3)
        fixed = ImagePipeline(DataConfig(**AUGMENTED), Form("train", 0, size))
        assert torch.equal(image, fixed.load(large, key))


def test_an_image_follows_from_its_key_alone_and_leaves_the_generators_alone(large):
    pipeline = ImagePipeline(DataConfig(**AUGMENTED), TRAIN)
    image = pipeline.load(large, SampleKey(0, 1))
    pipeline.load(large, SampleKey(0, 2))
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()
    assert torch.equal(pickle.loads(pickle.dumps(pipeline)).load(large, SampleKey(0, 1)), image)
    assert before == (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes())
    others = [SampleKey(0, 2), SampleKey(1, 1), SampleKey(0, 1, 1)]
    assert not any(torch.equal(pipeline.load(large, key), image) for key in others)
    reseeded = ImagePipeline(DataConfig(**AUGMENTED), Form("train", 1, (32, 48)))
    assert not torch.equal(reseeded.load(large, SampleKey(0, 1)), image)


def test_a_photo_is_turned_before_it_is_cropped(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    smooth(90, 60).save(tmp_path / "turned.jpg", exif=exif, quality=100)
    with Image.open(tmp_path / "turned.jpg") as image:
        ImageOps.exif_transpose(image).save(tmp_path / "upright.png")
    for form in (TRAIN, VAL):
        pipeline = ImagePipeline(DataConfig(reduced_decode="never"), form)
        turned, upright = (pipeline.load(tmp_path / name, SampleKey(0, 0)) for name in ("turned.jpg", "upright.png"))
        assert torch.equal(turned, upright)
    assert picture_size(tmp_path / "turned.jpg", None) == (60, 90)


def test_a_file_that_never_answers_is_given_up_in_time(tmp_path):
    os.mkfifo(tmp_path / "stuck.jpg")
    pipeline = ImagePipeline(DataConfig(timeout_s=0.3), TRAIN)
    begun = time.monotonic()
    with pytest.raises(DecodeTimeout, match=r"longer than data\.timeout_s=0\.3"):
        pipeline.load(tmp_path / "stuck.jpg", SampleKey(0, 0))
    with pytest.raises(DecodeTimeout):
        picture_size(tmp_path / "stuck.jpg", 0.3)
    assert time.monotonic() - begun < 5
    # lets the two threads go, which are still waiting for somebody to write
    os.close(os.open(tmp_path / "stuck.jpg", os.O_RDWR))


class StopsAfterTheHeader(io.BytesIO):
    """A file whose pixels do not come: PIL asks for these in large pieces."""

    def read(self, size=-1):
        if size > 10_000:
            time.sleep(3)
        return super().read(size)


def test_a_file_that_stops_after_the_header_is_given_up_in_time(large):
    pipeline = ImagePipeline(DataConfig(timeout_s=0.5), TRAIN)
    state, begun = random.getstate(), time.monotonic()
    with pytest.raises(DecodeTimeout):
        pipeline.load(StopsAfterTheHeader(large.read_bytes()), SampleKey(0, 0))
    assert time.monotonic() - begun < 2.5 and random.getstate() == state


def test_no_file_stays_open(large, tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((64, 64, 3), np.uint8), tile=(16, 16), photometric="rgb")
    (tmp_path / "broken.jpg").write_bytes(large.read_bytes()[:3000])
    (tmp_path / "text.jpg").write_text("text")
    pipeline = ImagePipeline(DataConfig(), TRAIN)
    for path in (large, tmp_path / "a.tif"):
        pipeline.load(path, SampleKey(0, 0)), picture_size(path, 5.0)
    for name, error in (("broken.jpg", OSError), ("text.jpg", DataError)):
        with pytest.raises(error):
            pipeline.load(tmp_path / name, SampleKey(0, 0))
    open_now = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    assert not any(str(tmp_path) in path for path in open_now)


def test_a_choice_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"data\.reduced_decode=sometimes .*never, train, always.*Use data\."):
        ImagePipeline(DataConfig(reduced_decode="sometimes"), TRAIN)
    with pytest.raises(ConfigError, match=r"data\.auto_augment=rnad"):
        ImagePipeline(DataConfig(auto_augment="rnad"), TRAIN)
