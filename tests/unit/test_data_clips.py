"""Clips: frames augmented alike by timm's transforms, views of an evaluation, workers, memory, and broken videos."""

import io
import os
import pickle
import random
import threading
import time
import tracemalloc

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import functional as TF

from tests.videos import (
    DECODERS,
    PLAIN,
    REAL_CLIPS,
    frames_of,
    header_length,
    needs_real_clips,
    numbers_of,
    on_display,
    uneven_times,
    write_sound,
    write_video,
    write_without_duration,
)
from vit_tp.config import BatchPlan, DataConfig
from vit_tp.data.clips import ClipPipeline, require_clips
from vit_tp.data.deadline import DecodeTimeout
from vit_tp.data.decode import open_video
from vit_tp.data.faults import load_or_replace
from vit_tp.data.frames import dense_times
from vit_tp.data.loader import Loading, eval_batches, train_batches
from vit_tp.data.order import SampleKey
from vit_tp.data.sampling import sample_randomness
from vit_tp.data.spec import Form, Sample
from vit_tp.errors import ConfigError

pytest.importorskip("av", reason="PyAV is not installed")

STRONG = {"auto_augment": "rand-m9-n3-mstd0.5-inc1", "vflip": 0.5, "interpolation": "random"}


class Videos:
    """A source of the simplest kind: the paths of some videos."""

    in_chans = 3

    def __init__(self, paths, form, **knobs):
        self.paths, self.form = paths, form
        self.pipeline = ClipPipeline(DataConfig(source="video_folder", **knobs), form)
        self.views = self.pipeline.views

    def __len__(self):
        return len(self.paths)

    def load(self, key):
        return Sample(self.pipeline.load(self.paths[key.index], key), key.index)

    def name(self, index):
        return str(self.paths[index])


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uneven")
    return [write_video(folder / f"{seed}.mp4", uneven_times(seed=seed), gop=12) for seed in range(4)]


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """Ten frames that do not differ, of a picture with something to see in it."""
    import av

    path = tmp_path_factory.mktemp("still") / "still.mkv"
    pixels = np.kron(np.random.default_rng(0).integers(0, 255, (8, 10, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[:2], "bgr0"
        for _ in range(10):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return path, pixels


def training(size=(32, 40), num_frames=6, seed=3, schedule=()):
    return Form("train", seed, size, num_frames, schedule)


def evaluation(size=(32, 40), num_frames=6):
    return Form("val", 0, size, num_frames)


def plan(micro_batch_size):
    return BatchPlan(micro_batch_size, micro_batch_size, 1, micro_batch_size, 1)


def images(clip):
    """Frames (..., T, Y, X, 3) of a clip (..., 3, T, Y, X)."""
    return clip.movedim(-4, -1).numpy()


# frames alike


@pytest.mark.parametrize("knobs", [{}, STRONG, {"color_jitter": 0.4}, {"auto_augment": "original-mstd0.5"}])
def test_each_frame_of_a_still_video_is_timms_transform_of_it(still, knobs):
    path, pixels = still
    pipeline = ClipPipeline(DataConfig(**knobs), training())
    transform = create_transform(
        (3, 32, 40),
        is_training=True,
        use_prefetcher=True,
        scale=(0.08, 1.0),
        color_jitter=knobs.get("color_jitter"),
        auto_augment=knobs.get("auto_augment"),
        vflip=knobs.get("vflip", 0.0),
        interpolation=knobs.get("interpolation", "bicubic"),
    )
    seen = []
    for index in range(8):
        clip = pipeline.load(path, SampleKey(0, index))
        with sample_randomness(3, SampleKey(0, index)):
            expected = transform(Image.fromarray(pixels))
        assert clip.shape == (3, 6, 32, 40) and clip.dtype == torch.uint8
        assert all(torch.equal(clip[:, frame], expected) for frame in range(6))
        seen.append(clip)
    assert not any(torch.equal(a, b) for a, b in zip(seen, seen[1:]))


def frames_one_by_one(path, form, key, sampling, **knobs):
    """The same clip from frames that are decoded and held at once, each of them given to timm's transform."""
    data = DataConfig(sampling=sampling, **knobs)
    with sample_randomness(form.seed, key):
        drawn = random.Random(random.getrandbits(64))
    [times, frames] = frames_of(path)
    with open_video(path, "pyav") as video:
        span = video.span
    if sampling == "segments":
        length = (span.end_s - span.start_s) / form.num_frames
        wanted = [span.start_s + (part + drawn.random()) * length for part in range(form.num_frames)]
    else:
        wanted = dense_times(span, form.num_frames, data.frame_stride, drawn.random())
    knobs = {"interpolation": "bicubic", "color_jitter": None, **knobs}
    transform = create_transform((3, *form.img_size), is_training=True, use_prefetcher=True, scale=(0.08, 1.0), **knobs)
    clip = []
    for number in on_display(times, wanted):
        with sample_randomness(form.seed, key):
            clip.append(transform(Image.fromarray(frames[number])))
    return torch.stack(clip, 1)


@needs_real_clips
@pytest.mark.parametrize("sampling", ["segments", "dense"])
@pytest.mark.parametrize("knobs", [{}, STRONG])
def test_a_real_clip_in_training_is_timms_transform_of_its_frames(sampling, knobs):
    """Frames are augmented one by one between two steps of decoding: that changes no draw and no pixel."""
    pipeline = ClipPipeline(DataConfig(decoder="pyav", sampling=sampling, **knobs), training())
    for index in range(2):
        key = SampleKey(1, index)
        expected = frames_one_by_one(REAL_CLIPS[0], training(), key, sampling, **knobs)
        assert torch.equal(pipeline.load(REAL_CLIPS[0], key), expected)


@pytest.mark.parametrize("policy", ["rand-m10-n4-inc1", "rand-m9-n4-mstdinf-inc0", "augmix-m10", "originalr", "3a"])
def test_no_policy_makes_a_video_unreadable(still, policy):
    """Pillow 13 raises where timm posterizes to 0 bits, which was black before."""
    path, _ = still
    pipeline = ClipPipeline(DataConfig(auto_augment=policy), training(num_frames=1))
    for index in range(60):
        pipeline.load(path, SampleKey(0, index))


def test_a_clip_follows_from_seed_and_key_alone_and_leaves_the_generators_alone(uneven):
    def states():
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()

    pipeline = ClipPipeline(DataConfig(**STRONG), training())
    clip = pipeline.load(uneven[0], SampleKey(1, 7))
    random.random(), np.random.rand(), torch.rand(1)
    before = states()
    again = ClipPipeline(DataConfig(**STRONG), training()).load(uneven[0], SampleKey(1, 7))
    assert torch.equal(clip, again) and states() == before
    for other in (SampleKey(2, 7), SampleKey(1, 8), SampleKey(1, 7, 1)):
        assert not torch.equal(clip, pipeline.load(uneven[0], other))


def test_moments_and_crops_are_drawn_apart(uneven):
    """One stream for both would show early moments in large crops and late ones in small crops, or the other way."""
    places, crops = [], []
    pipeline = ClipPipeline(DataConfig(**PLAIN), training(num_frames=1))
    times, _ = frames_of(uneven[0])
    for index in range(200):
        key = SampleKey(0, index)
        [number] = numbers_of(images(pipeline.load(uneven[0], key)))
        places.append(times[number])
        with sample_randomness(3, key):
            crops.append(random.random())  # the first number that timm's crop draws
    assert abs(np.corrcoef(places, crops)[0, 1]) < 0.25
    assert np.std(places) > 0.2 * (times[-1] - times[0])


def test_the_size_follows_the_schedule(uneven):
    pipeline = ClipPipeline(DataConfig(), training(schedule=((0, (16, 24)), (2, (32, 40)))))
    assert [tuple(pipeline.load(uneven[0], SampleKey(e, 0)).shape[-2:]) for e in (0, 1, 2)] == [(16, 24)] * 2 + [
        (32, 40)
    ]


# the right frames


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_give_the_frames_of_the_rule(uneven, num_workers, decoder):
    """P88: through workers too, of files of a variable rate that do not begin at 0."""
    source = Videos(uneven, evaluation(), decoder=decoder, **PLAIN)
    _, batches = eval_batches(source, micro_batch_size=2, dp_rank=0, dp_size=1, loading=Loading(num_workers))
    clips = torch.cat([batch.images for batch in batches])
    for path, clip in zip(uneven, clips, strict=True):
        times, _ = frames_of(path)
        length = header_length(path)
        if times[0] + length < times[-1]:  # it leaves out frames
            length = (times[-1] - times[0]) * len(times) / (len(times) - 1)
        wanted = [times[0] + (part + 0.5) / 6 * length for part in range(6)]
        assert numbers_of(images(clip)) == on_display(times, wanted)


@pytest.mark.parametrize("sampling", ["segments", "dense"])
def test_training_draws_other_moments_each_time_in_their_order(uneven, sampling):
    pipeline = ClipPipeline(DataConfig(sampling=sampling, frame_stride=2, **PLAIN), training())
    clips = [numbers_of(images(pipeline.load(uneven[0], SampleKey(epoch, 0)))) for epoch in range(12)]
    assert all(clip == sorted(clip) for clip in clips)
    assert len({tuple(clip) for clip in clips}) > 6
    times, _ = frames_of(uneven[0])
    for clip in clips if sampling == "segments" else ():
        length = times[-1] + 0.03 - times[0]
        for part, number in enumerate(clip):  # on display at some moment of its part
            shown_from, shown_to = times[number], times[number + 1] if number + 1 < len(times) else np.inf
            assert shown_from <= times[0] + (part + 1) / 6 * length and shown_to >= times[0] + part / 6 * length - 0.05


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_tar_member_makes_the_clip_of_its_file(uneven, decoder):
    pipeline = ClipPipeline(DataConfig(decoder=decoder), training())
    key = SampleKey(0, 0)
    assert torch.equal(pipeline.load(io.BytesIO(uneven[0].read_bytes()), key), pipeline.load(uneven[0], key))


# views


@needs_real_clips
@pytest.mark.parametrize("path", REAL_CLIPS, ids=lambda path: path.stem)
def test_a_real_clip_in_evaluation_is_timms_transform_of_its_frames(path):
    data = DataConfig(decoder="pyav", eval_crop=0.9, timeout_s=None)
    clip = ClipPipeline(data, evaluation((96, 96), 4)).load(path, SampleKey(0, 0))
    times, _ = frames_of(path, only=())
    end = times[-1] + (times[-1] - times[0]) / (len(times) - 1)
    numbers = on_display(times, [(part + 0.5) / 4 * end for part in range(4)])
    _, frames = frames_of(path, only=numbers)
    transform = create_transform((3, 96, 96), interpolation="bicubic", crop_pct=0.9, use_prefetcher=True)
    expected = torch.stack([transform(Image.fromarray(frames[number])) for number in numbers], 1)
    assert torch.equal(clip, expected)


@needs_real_clips
@pytest.mark.parametrize("sampling", ["segments", "dense"])
def test_views_are_clips_times_crops_along_the_longer_side(sampling):
    path = next(path for path in REAL_CLIPS if path.stem == "bikes")  # 640 x 272 at 25 frames/s for 10 s
    data = DataConfig(decoder="pyav", sampling=sampling, eval_clips=2, eval_crops=3)
    pipeline = ClipPipeline(data, evaluation((64, 64), 2))
    views = pipeline.load(path, SampleKey(0, 0))
    assert views.shape == (pipeline.views, 3, 2, 64, 64) == (6, 3, 2, 64, 64)
    firsts = {"segments": [[31, 156], [93, 218]], "dense": [[0, 4], [245, 249]]}[sampling]
    _, frames = frames_of(path, only={number for clip in firsts for number in clip})
    for clip, numbers in enumerate(firsts):
        for index, number in enumerate(numbers):
            image = TF.resize(Image.fromarray(frames[number]), [64, 151], TF.InterpolationMode.BICUBIC)
            for crop, left in enumerate((0, 44, 87)):
                expected = TF.pil_to_tensor(image)[:, :, left : left + 64]
                assert torch.equal(views[3 * clip + crop, :, index], expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_views_fill_rows_of_an_evaluation(uneven, num_workers):
    source = Videos(uneven, evaluation(), eval_clips=2, eval_crops=3, **PLAIN)
    count, batches = eval_batches(source, micro_batch_size=12, dp_rank=0, dp_size=1, loading=Loading(num_workers))
    batches = list(batches)
    assert count == 2 and [batch.targets.tolist() for batch in batches] == [[0] * 6 + [1] * 6, [2] * 6 + [3] * 6]
    expected = source.load(SampleKey(0, 1)).pixels
    assert torch.equal(batches[0].images[6:], expected) and not torch.equal(expected[0], expected[3])


def test_training_has_one_view(uneven):
    pipeline = ClipPipeline(DataConfig(eval_clips=4, eval_crops=3), training())
    assert pipeline.views == 1 and pipeline.load(uneven[0], SampleKey(0, 0)).shape == (3, 6, 32, 40)


# workers and memory


def open_files():
    return [file.path for file in psutil.Process().open_files()]


@pytest.mark.parametrize("decoder", DECODERS)
def test_workers_read_what_one_process_reads_for_200_batches(uneven, decoder):
    """P85: a source holds paths only, so nothing open is inherited."""
    before = open_files()
    source = Videos(uneven, training((16, 16), 2), decoder=decoder)
    source.load(SampleKey(0, 0))  # whatever a first reading leaves behind is inherited too
    assert open_files() == before
    again = pickle.loads(pickle.dumps(source))
    assert torch.equal(again.load(SampleKey(0, 1)).pixels, source.load(SampleKey(0, 1)).pixels)

    def checksums(num_workers):
        how = {"plan": plan(2), "dp_rank": 0, "first_step": 0, "last_step": 200, "loading": Loading(num_workers)}
        return [(batch.images.long().sum().item(), batch.targets.tolist()) for batch in train_batches(source, **how)]

    expected = checksums(0)
    assert len(expected) == 200 and len({total for total, _ in expected}) > 100
    assert checksums(2) == expected


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_clip_needs_the_memory_of_a_few_frames(tmp_path, decoder):
    """24 frames of 1600 x 1200 are 138 MB at once; the tracer of Python sees what numpy and PIL's copies take."""
    path = write_video(tmp_path / "large.mp4", range(0, 24 * 40, 40), levels=[100] * 24, size=(1600, 1200), gop=6)
    for form, views in ((training((16, 16), 24), 1), (evaluation((16, 16), 8), 3)):
        pipeline = ClipPipeline(DataConfig(decoder=decoder, eval_clips=views, timeout_s=60.0), form)
        tracemalloc.start()
        pipeline.load(path, SampleKey(0, 0))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 * 1600 * 1200 * 3, peak


@pytest.mark.slow
@pytest.mark.parametrize("decoder", DECODERS)
def test_memory_does_not_grow_with_the_number_of_videos_read(uneven, tmp_path, decoder):
    """P86: 2,000 readings, among them a file without duration and a broken one."""
    size = (160, 120)
    paths = [
        write_video(tmp_path / "large.mp4", uneven_times(), size=size, gop=12),
        write_without_duration(tmp_path / "no_duration.mkv", uneven_times(), size=size, gop=12),
        uneven[0],
    ]
    (tmp_path / "broken.mp4").write_bytes(paths[0].read_bytes()[:-3000])
    source = Videos([*paths, tmp_path / "broken.mp4"], training((32, 32), 4), decoder=decoder)
    process, memory = psutil.Process(), []
    for number in range(2000):
        load_or_replace(source, SampleKey(number // 4, number % 4))
        if number % 200 == 199:
            memory.append(process.memory_info().rss / 2**20)
    later = memory[2:]
    slope = np.polyfit(np.arange(len(later)) * 200, later, 1)[0]
    assert slope * 2000 < 20, memory  # MiB; a leaked frame of 160 x 120 in each reading would be 115


# what cannot be read


BROKEN = {
    "empty": lambda path, good: path.write_bytes(b""),
    "text": lambda path, good: path.write_text("this is no video\n" * 100),
    "cut": lambda path, good: path.write_bytes(good.read_bytes()[: good.stat().st_size // 2]),
    "sound": lambda path, good: write_sound(path),
    "missing": lambda path, good: None,
    "pipe": lambda path, good: os.mkfifo(path),
}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_read_is_replaced_in_training_and_left_out_in_evaluation(uneven, tmp_path, kind, decoder):
    """A pipe that nobody writes to would be waited for without end."""
    path = tmp_path / "broken.mp4"
    BROKEN[kind](path, uneven[0])
    knobs = {"decoder": decoder, "timeout_s": 0.3 if kind == "pipe" else 20.0}
    began = time.monotonic()
    loaded = load_or_replace(Videos([path, *uneven], training(), **knobs), SampleKey(0, 0))
    assert loaded.sample.pixels.shape == (3, 6, 32, 40) and loaded.sample.label == loaded.key.index > 0
    fault = loaded.faults[0]
    assert fault.name == str(path) and fault.replaced_by == str(uneven[loaded.key.index - 1])
    kind_of_error = (
        "DecodeTimeout: decoding took longer" if kind == "pipe" else "DataError: not a video that can be read: "
    )
    assert fault.reason.startswith(kind_of_error) and "\n" not in fault.reason and len(fault.reason) < 300
    left_out = load_or_replace(Videos([path, *uneven], evaluation(), **knobs), SampleKey(0, 0))
    assert left_out.sample is None and left_out.faults[0].replaced_by is None
    assert time.monotonic() - began < 10
    if kind == "pipe":  # lets the threads that wait for it end
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        for thread in [thread for thread in threading.enumerate() if thread.name == "decode"]:
            thread.join(10)


class SlowBytes(io.BytesIO):
    """A file that takes its time for each piece that is asked for."""

    def __init__(self, data, seconds):
        super().__init__(data)
        self.seconds, self.taken = seconds, 0.0

    def read(self, size=-1):
        time.sleep(self.seconds)
        self.taken += self.seconds
        return super().read(size)


def slow_video(folder, seconds):
    video = {"levels": [90] * 100, "ticks_per_s": 25, "codec": "rawvideo", "size": (160, 120)}
    return SlowBytes(write_video(folder / "a.avi", range(100), **video).read_bytes(), seconds)


def test_each_clip_of_an_evaluation_has_a_deadline_of_its_own(tmp_path):
    slow, pipeline = slow_video(tmp_path, 0.01), ClipPipeline(DataConfig(decoder="pyav", eval_clips=8), evaluation())
    pipeline.data.timeout_s = None
    expected = pipeline.load(slow, SampleKey(0, 0))
    pipeline.data.timeout_s = slow.taken / 3  # too little for one deadline, enough for eight
    assert torch.equal(pipeline.load(slow, SampleKey(0, 0)), expected)
    pipeline.data.timeout_s = slow.taken / 40
    with pytest.raises(DecodeTimeout, match=r"decoding took longer than data\.timeout_s="):
        pipeline.load(slow, SampleKey(0, 0))


def test_transforms_have_no_deadline(tmp_path):
    pipeline = ClipPipeline(DataConfig(decoder="pyav", timeout_s=1.0), evaluation())
    transform = pipeline._transform((32, 40))
    pipeline._transforms[32, 40] = lambda image: time.sleep(0.2) or transform(image)  # six frames
    assert pipeline.load(slow_video(tmp_path, 0.0), SampleKey(0, 0)).shape == (3, 6, 32, 40)


def test_a_video_with_fewer_frames_than_the_clip_shows_some_of_them_again(tmp_path):
    path = write_video(tmp_path / "short.mp4", [0, 40, 80])
    for sampling in ("segments", "dense"):
        pipeline = ClipPipeline(DataConfig(sampling=sampling, frame_stride=2, **PLAIN), evaluation(num_frames=6))
        numbers = numbers_of(images(pipeline.load(path, SampleKey(0, 0))))
        assert numbers == {"segments": [0, 0, 1, 1, 2, 2], "dense": [0, 2, 2, 2, 2, 2]}[sampling]


# what is refused before anything is read


def test_images_cannot_be_asked_of_videos():
    with pytest.raises(ConfigError, match=r"gives clips, but model\.video\.num_frames=null.*Use for example"):
        ClipPipeline(DataConfig(source="video_folder"), Form("train", 0, (32, 32)))


def test_every_complaint_about_clips_comes_at_once():
    data = DataConfig(decoder="pyav", decoder_device="cuda", num_workers=2, auto_augment="rnad-m9", eval_crops=2)
    with pytest.raises(ConfigError) as caught:
        require_clips(data)
    crops, workers, device, policy = caught.value.complaints
    assert "data.eval_crops=2 is neither 1 nor 3" in crops
    assert "data.num_workers=2 cannot work" in workers and "data.decoder=pyav does not decode" in device
    assert "data.auto_augment=rnad-m9" in policy
