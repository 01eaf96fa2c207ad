"""Decoding: the frame on display at a time, whoever decodes and whatever the file is like; broken files; no decoder."""

import io
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.videos import (
    DECODERS,
    LUMA_WEIGHTS,
    REAL_CLIPS,
    frames_at,
    frames_of,
    header_length,
    needs_real_clips,
    numbers_of,
    on_display,
    turned,
    uneven_times,
    write_colours,
    write_sound,
    write_video,
    write_without_duration,
)
from vit_tp.data.decode import PYAV, TORCHCODEC, choose_decoder, decoder_version, open_video, torchcodec_problem
from vit_tp.data.decode_pyav import PyAVReader
from vit_tp.data.decode_torchcodec import explained
from vit_tp.data.frames import dense_times
from vit_tp.errors import ConfigError, DataError

av = pytest.importorskip("av", reason="PyAV is not installed")

CONTAINERS = {
    "plain.mp4": {},
    "no_b_frames.mov": {"b_frames": 0},
    "many_keyframes.mp4": {"gop": 6},
    "index_first.mp4": {"movflags": "faststart"},
    "fragments.mp4": {"movflags": "frag_keyframe+empty_moov", "gop": 9},
    "cues.mkv": {"gop": 9},
    "vp8.webm": {"codec": "libvpx"},
    "broadcast.ts": {"format": "mpegts", "gop": 9},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    made = {name: write_video(folder / name, uneven_times(), **how) for name, how in CONTAINERS.items()}
    made["no_duration.mkv"] = write_without_duration(folder / "no_duration.mkv", uneven_times(), gop=9)
    return made


def wanted_times(times, seed=0):
    """All times of frames, some just before them, some between, and some before the first and after the last."""
    rng = np.random.default_rng(seed)
    wanted = np.concatenate([times, times - 1e-4, rng.uniform(times[0] - 1, times[-1] + 1, 40)])
    return rng.permutation(wanted).tolist()


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", [*CONTAINERS, "no_duration.mkv"])
def test_the_frame_on_display_is_the_last_one_that_has_come(files, name, decoder):
    """P88: a variable rate and a start that is not 0; the times written are those of the oracle."""
    if decoder == TORCHCODEC and name.endswith(".ts"):
        pytest.skip("torchcodec does not seek in this container: it says so, and the file is replaced")
    times, _ = frames_of(files[name])
    if not name.startswith("fragments"):  # whose muxer moves the start
        np.testing.assert_allclose(times - times[0], (np.array(uneven_times()) - uneven_times()[0]) / 1000, atol=2e-3)
        assert times[0] > 0.5
    wanted = wanted_times(times)
    before = open_files()
    with open_video(files[name], decoder) as video:
        assert numbers_of(frames_at(video, wanted)) == on_display(times, wanted)
        assert video.span.start_s == pytest.approx(times[0])
        assert times[-1] <= video.span.end_s < times[-1] + 0.2
        assert video.span.rate == pytest.approx((len(times) - 1) / (times[-1] - times[0]), rel=0.03)
    for time in wanted[::7]:  # each from a file just opened: what a seek finds does not depend on what came before
        with open_video(files[name], decoder) as video:
            assert numbers_of(frames_at(video, [time])) == on_display(times, [time])
    assert open_files() == before


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("name", "codec"), [("a.flv", "flv"), ("a.wmv", "wmv2"), ("a.ts", "libx264")])
def test_a_dense_clip_shows_every_frame_once_where_packets_have_no_duration(tmp_path, name, codec, decoder):
    if decoder == TORCHCODEC and name == "a.ts":
        pytest.skip("torchcodec does not seek in this container: it says so, and the file is replaced")
    path = write_video(
        tmp_path / name, range(40), ticks_per_s=25, codec=codec, b_frames=2 * (codec == "libx264"), gop=12
    )
    with open_video(path, decoder) as video:
        times = dense_times(video.span, 40, 1, 0.0)
        assert numbers_of(frames_at(video, times)) == list(range(40))
        assert video.span.rate == pytest.approx(25) and video.span.end_s - video.span.start_s == pytest.approx(1.6)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_header_that_ends_before_the_last_frame_is_not_believed(tmp_path, decoder):
    """FFmpeg's muxer takes a track's length from the times of decoding, of which the last gap is not one."""
    times = uneven_times()[:10]
    path = write_video(tmp_path / "a.mp4", [*times, times[-1] + 10000], gop=4)
    assert header_length(path) < 1
    with open_video(path, decoder) as video:
        last = (times[-1] + 10000) / 1000
        assert video.span == pytest.approx((times[0] / 1000, last + (last - times[0] / 1000) / 10, 10 / (last - 0.778)))
        assert numbers_of(frames_at(video, [last + 0.1, 5.0, times[3] / 1000])) == [10, 9, 3]


@needs_real_clips
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("path", REAL_CLIPS, ids=lambda path: path.stem)
def test_real_clips_decode_to_what_a_whole_pass_gives(path, decoder):
    times, _ = frames_of(path, only=())
    wanted = np.random.default_rng(1).uniform(times[0] - 0.1, times[-1] + 0.2, 12).tolist()
    with open_video(path, decoder) as video:
        found = frames_at(video, wanted)
        assert video.span.start_s == times[0] and len(times) / video.span.rate == pytest.approx(
            video.span.end_s - video.span.start_s
        )
    # The two decoders may come with different versions of FFmpeg, whose conversion to RGB may differ by a level.
    tolerance = 0 if decoder == PYAV else 2
    numbers = on_display(times, wanted)
    _, frames = frames_of(path, only=numbers)
    for number, frame in zip(numbers, found):
        assert np.abs(frame.astype(int) - frames[number].astype(int)).max() <= tolerance


@pytest.mark.parametrize("decoder", DECODERS)
def test_bytes_read_like_the_file_they_came_from(files, decoder):
    data = io.BytesIO(files["plain.mp4"].read_bytes())
    data.seek(100)  # wherever somebody left it
    with open_video(data, decoder) as from_bytes, open_video(files["plain.mp4"], decoder) as from_file:
        assert np.array_equal(frames_at(from_bytes, [1.0, 2.0]), frames_at(from_file, [1.0, 2.0]))
    assert not data.closed


@needs_real_clips
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_a_video_that_was_taken_sideways_is_upright(tmp_path, quarters, decoder):
    sideways = tmp_path / "sideways.mp4"
    shutil.copy(REAL_CLIPS[1], sideways)
    _, frames = frames_of(sideways, only=[0])
    with open_video(turned(sideways, quarters), decoder) as video:
        found = frames_at(video, [video.span.start_s])[0]
    expected = np.rot90(frames[0], -quarters)
    assert found.shape == expected.shape
    # torchcodec turns before it converts to RGB, so colours are interpolated elsewhere
    assert np.abs(found.astype(int) - expected.astype(int)).mean() <= (0 if decoder == PYAV else 1.0)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("is_full_range", [False, True])
@pytest.mark.parametrize("matrix", LUMA_WEIGHTS)
def test_colours_are_those_that_the_file_says(tmp_path, matrix, is_full_range, decoder):
    """The other matrix would be wrong by up to 30 levels, the other range by up to 20."""
    colours = write_colours(tmp_path / "colours.mp4", matrix, is_full_range)
    with open_video(tmp_path / "colours.mp4", decoder) as video:
        [frame] = frames_at(video, [0.25])
    assert np.abs(frame[8::16, 8::16].astype(int) - colours).max() <= 4


def test_no_more_is_decoded_than_the_way_from_the_keyframe_before(tmp_path):
    path = write_video(tmp_path / "long.mp4", range(0, 40 * 400, 40), levels=[0] * 400, gop=10)
    reader = PyAVReader(path)
    counted, decoded = [], reader._decoded

    def counting(*args, **kwargs):
        for moment in decoded(*args, **kwargs):
            counted.append(moment.seconds)
            yield moment

    reader._decoded = counting
    assert len(list(reader.shown([8.1, 15.05]))) == 2
    assert len(counted) <= 2 * 12 and min(counted) > 7
    reader.close()


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_size_that_changes_on_the_way_stays_that_of_the_first_frame(tmp_path, decoder):
    if decoder == TORCHCODEC:
        pytest.skip("torchcodec does not seek in this container")
    parts = [
        write_video(io.BytesIO(), range(first, first + 400, 40), format="mpegts", size=size, b_frames=0)
        for first, size in ((0, (64, 48)), (400, (96, 80)))
    ]
    (tmp_path / "joined.ts").write_bytes(b"".join(part.getvalue() for part in parts))
    with open_video(tmp_path / "joined.ts", decoder) as video:
        middle = video.span.start_s + 0.42
        assert frames_at(video, [video.span.start_s, middle + 0.2]).shape == (2, 48, 64, 3)
        assert numbers_of(frames_at(video, [middle + 0.2])) == [5]


def test_a_name_with_a_colon_is_no_protocol(tmp_path, monkeypatch):
    path = write_video(tmp_path / "12:30:00.mp4", [0, 40])
    monkeypatch.chdir(tmp_path)
    with open_video(path.name, PYAV) as video:
        assert numbers_of(frames_at(video, [0.05])) == [1]


# broken files


def cut(data, share):
    return data[: int(len(data) * share)]


def spoilt(data):
    noisy = np.frombuffer(data, np.uint8).copy()
    noisy[len(noisy) // 3 :] = np.random.default_rng(0).integers(0, 256, len(noisy) - len(noisy) // 3)
    return noisy.tobytes()


BROKEN = {
    "empty": (lambda file: b"", "Invalid data"),
    "text": (lambda file: b"this is no video, whatever its name says\n" * 30, "Invalid data"),
    "noise": (lambda file: np.random.default_rng(0).bytes(20000), "Invalid data"),
    "half of it": (lambda file: cut(file["plain.mp4"].read_bytes(), 0.5), "Invalid data"),
    "half of its frames": (lambda file: cut(file["index_first.mp4"].read_bytes(), 0.6), "Invalid data|cut off"),
    "spoilt": (lambda file: spoilt(file["index_first.mp4"].read_bytes()), "."),
}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_in_one_line_and_closed(files, tmp_path, kind, decoder):
    content, reason = BROKEN[kind]
    path = tmp_path / "broken.mp4"
    path.write_bytes(content(files))
    before = open_files()
    for file in (path, io.BytesIO(path.read_bytes())):
        with (
            pytest.raises(DataError, match=f"^not a video that can be read: .*({reason})") as caught,
            open_video(file, decoder) as video,
        ):
            frames_at(video, [video.span.start_s, video.span.end_s - 0.05])
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    del caught
    assert open_files() == before


@pytest.mark.parametrize("decoder", DECODERS)
def test_sound_alone_a_missing_file_and_a_folder(tmp_path, decoder):
    for path, reason in (
        (write_sound(tmp_path / "sound.mp4"), "holds no video stream"),
        (tmp_path / "none.mp4", "No such file"),
        (tmp_path, "Is a directory|Invalid data"),
    ):
        with pytest.raises(DataError, match=reason), open_video(path, decoder):
            pass


def test_frames_that_the_header_promises_and_the_file_lacks(tmp_path):
    """An AVI without its end decodes without complaint; holding its last frame would be a clip of something else."""
    path = write_video(tmp_path / "whole.avi", range(100), levels=range(100), ticks_per_s=25, codec="mpeg4", b_frames=0)
    data = path.read_bytes()
    (tmp_path / "cut.avi").write_bytes(cut(data, 0.5))
    with open_video(path, PYAV) as video:
        frames_at(video, [video.span.end_s - 0.1])
    with (
        pytest.raises(DataError, match=r"frames end at .* though its header says .*: it has been cut off"),
        open_video(tmp_path / "cut.avi", PYAV) as video,
    ):
        frames_at(video, [0.1, video.span.end_s - 0.1])


def test_decoding_has_an_end_where_a_header_is_wrong(tmp_path):
    path = write_video(tmp_path / "long.mp4", range(0, 10 * 700, 10), levels=[0] * 700, gop=1000, size=(16, 16))
    reader = PyAVReader(path)
    reader._num_frames = 20
    with pytest.raises(DataError, match="297 frames were decoded where about 20"):
        list(reader.shown([6.9]))
    reader.close()


def test_looking_for_the_length_has_an_end(files, monkeypatch):
    monkeypatch.setattr("vit_tp.data.decode_pyav._MOST_PACKETS", 30)
    refused = pytest.raises(DataError, match="gives no length, and 30 packets are not all of it")
    with refused, open_video(files["no_duration.mkv"], PYAV):
        pass


def test_a_device_without_memory_is_no_broken_file():
    with pytest.raises(torch.OutOfMemoryError), explained():
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(DataError, match="not a video that can be read: Could not"), explained():
        raise RuntimeError("decoder.cpp:12, Could not push packet")


# which decoder


def run_without(names, code):
    hide = f"import sys\nfor name in {names}: sys.modules[name] = None\n"
    return subprocess.run([sys.executable, "-c", hide + code], capture_output=True, text=True)


CHOOSE = "from vit_tp.data.decode import choose_decoder\nprint(choose_decoder({!r}, {!r}))"


def test_without_any_decoder_the_extras_are_named():
    """P89."""
    ended = run_without(["av", "torchcodec"], CHOOSE.format("auto", "cpu"))
    assert "ConfigError: data.decoder=auto finds nothing that decodes videos" in ended.stderr
    assert "pip install 'vit-tp[video]'" in ended.stderr and "pip install 'vit-tp[torchcodec]'" in ended.stderr


def test_one_decoder_is_enough():
    assert run_without(["torchcodec"], CHOOSE.format("auto", "cpu")).stdout == "pyav\n"
    ended = run_without(["torchcodec"], CHOOSE.format("torchcodec", "cpu"))
    assert "needs torchcodec, which cannot be used here (it is not installed)" in ended.stderr
    assert "data.decoder=pyav" in ended.stderr
    expected = "pip install 'vit-tp[video]'" if torchcodec_problem() else "torchcodec\n"
    ended = run_without(["av"], CHOOSE.format("auto", "cpu"))
    assert expected in ended.stdout + ended.stderr


def test_auto_takes_torchcodec_where_its_libraries_load():
    assert choose_decoder("auto", "cpu") == (PYAV if torchcodec_problem() else TORCHCODEC)
    assert choose_decoder("pyav", "cpu") == PYAV


def test_pyav_decodes_on_the_cpu_alone():
    with pytest.raises(ConfigError, match=r"data\.decoder=pyav does not decode on data\.decoder_device=cuda.*Use "):
        choose_decoder("pyav", "cuda")


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_record_of_a_run_can_say_who_decodes(decoder):
    version = av.__version__ if decoder == PYAV else __import__("torchcodec").__version__
    assert decoder_version(decoder).startswith(f"{decoder} {version} (FFmpeg ")


def test_images_alone_never_import_a_decoder():
    code = """
import sys
from vit_tp.config import DataConfig
from vit_tp.data.order import SampleKey
from vit_tp.data.sources import build_source, describe, Form
import vit_tp.data.clips, vit_tp.data.decode
describe(DataConfig())
build_source(DataConfig(), Form("val", 0, (8, 8))).load(SampleKey(0, 0))
print([name for name in ("av", "torchcodec") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "[]\n", ended.stderr
