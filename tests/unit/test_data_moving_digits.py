"""Moving digits: real files, real digits, directions that only several frames tell."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from tests.videos import frames_of
from vit_tp.compose import compose
from vit_tp.config import DataConfig
from vit_tp.data.digits import load_digits
from vit_tp.data.order import SampleKey
from vit_tp.data.sources import build_source, describe
from vit_tp.data.spec import Form
from vit_tp.errors import ConfigError, DataError

pytest.importorskip("av", reason="PyAV is not installed")

STEPS = {"down": (1, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0)}  # in the order of classes


def config(root):
    data = compose(["data=moving_digits"]).data
    data.root = str(root)
    return data


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    deep = tmp_path_factory.mktemp("data") / "deep"
    for name in (".moving_digits-killed", ".moving_digits-writing", ".moving_digits2-killed"):
        video = deep / name / "train" / "up" / "0.mp4"
        video.parent.mkdir(parents=True)
        video.touch()
        for path in (deep / name).rglob("*") if name.endswith("writing") else (deep / name, *(deep / name).rglob("*")):
            os.utime(path, (time.time() - 3700,) * 2)
    data = config(deep / "moving_digits")
    return data, describe(data)


def clips(data, split, indices):
    source = build_source(data, Form(split, 0, (32, 32), 16))
    samples = [source.load(SampleKey(0, index)) for index in indices]
    return torch.stack([sample.pixels[0] for sample in samples]).numpy(), np.array([sample.label for sample in samples])


def test_the_sizes_are_those_of_the_digits(written):
    data, spec = written
    assert (spec.num_train, spec.num_val, spec.num_classes, spec.in_chans, spec.is_video) == (1437, 360, 4, 3, True)
    assert build_source(data, Form("val", 0, (32, 32), 8)).class_to_idx == {name: k for k, name in enumerate(STEPS)}


def test_every_clip_moves_where_its_label_says(written):
    """The place where two frames agree best, by the Fourier transform of their correlation."""
    for split, count in (("train", 1437), ("val", 360)):
        pixels, labels = clips(written[0], split, range(0, count, 7))
        spectrum = np.fft.fft2(pixels.astype(float))
        agreement = np.fft.ifft2(spectrum[:, 5] * spectrum[:, 0].conj()).real
        moved = [np.unravel_index(each.argmax(), each.shape) for each in agreement]
        expected = [tuple(5 * step % 32 for step in list(STEPS.values())[label]) for label in labels]
        assert moved == expected
        assert np.bincount(labels, minlength=4).min() > len(labels) / 5


def test_one_frame_does_not_tell_the_direction(written):
    pixels, labels = clips(written[0], "train", range(1437))
    frames = pixels[:, 0, ::2, ::2].reshape(len(pixels), -1) / 255
    right = LogisticRegression(max_iter=200).fit(frames[:1000], labels[:1000]).score(frames[1000:], labels[1000:])
    assert right < 0.33  # chance is 0.25, and 437 guesses spread by 0.02
    places = pixels[:, 7].argmax(axis=-1).max(axis=-1)
    for label in range(4):
        assert abs(places[labels == label].mean() - places.mean()) < 2


def test_validation_shows_the_digits_of_validation(written):
    """Moved back to the corner and made small again, a frame is scikit-learn's digit of the file's name."""
    data, _ = written
    source = build_source(data, Form("val", 0, (32, 32), 16))
    images, classes = load_digits("val")
    for index in range(0, 360, 60):
        path = source.name(index)
        digit_class, number = os.path.basename(path).removesuffix(".mp4").split("_")
        assert int(digit_class) == classes[int(number)]
        frame = frames_of(path, only=[0])[1][0][..., 0].astype(float)
        digit = np.kron(images[int(number), 0].numpy() / 16 * 255, np.ones((2, 2)))
        ground = np.zeros((32, 32))
        ground[:16, :16] = digit
        agreement = np.fft.ifft2(np.fft.fft2(frame) * np.fft.fft2(ground).conj()).real
        back = np.roll(frame, -np.array(np.unravel_index(agreement.argmax(), agreement.shape)), (0, 1))
        assert np.corrcoef(back.ravel(), ground.ravel())[0, 1] > 0.9
        assert back[17:, :].max() < 40 and back[:, 17:].max() < 40


def test_files_are_real_videos_of_sixteen_frames(written):
    source = build_source(written[0], Form("train", 0, (32, 32), 8))
    times, frames = frames_of(source.name(0))
    np.testing.assert_allclose(times, np.arange(16) / 8)
    assert frames[0].shape == (32, 32, 3)


def test_a_complete_folder_is_used_again(written):
    data, spec = written
    before = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(data.root)}
    assert describe(data) == spec
    assert {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(data.root)} == before
    # No draft is left but one that may still be written, and those of another folder.
    others = [".moving_digits-writing", ".moving_digits2-killed"]
    assert sorted(os.listdir(os.path.dirname(data.root))) == [*others, "moving_digits"]


def test_what_a_killed_process_has_left_is_not_used(tmp_path):
    code = f"""
import os
from vit_tp.config import DataConfig
from vit_tp.data import moving_digits
written = []
def write_video(file, frames, really=moving_digits.write_video):
    really(file, frames)
    written.append(file)
    if len(written) == 5: os.kill(os.getpid(), 9)
moving_digits.write_video = write_video
moving_digits.describe_moving_digits(DataConfig(source="moving_digits", root={str(tmp_path / "md")!r}))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -9
    [draft] = tmp_path.iterdir()
    assert draft.name.startswith(".md-") and not (tmp_path / "md").exists()


@pytest.mark.slow
def test_two_processes_at_once_write_one_folder(tmp_path, written):
    code = f"""
from vit_tp.config import DataConfig
from vit_tp.data.sources import describe
print(describe(DataConfig(source="moving_digits", root={str(tmp_path / "md")!r})).num_train)
"""
    jobs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [job.communicate(timeout=200)[0] for job in jobs] == ["1437\n"] * 2
    assert os.listdir(tmp_path) == ["md"]
    ours, theirs = (
        build_source(config(root), Form("val", 0, (32, 32), 8)) for root in (tmp_path / "md", written[0].root)
    )
    for index in range(0, 360, 40):  # the same files each time they are written
        with open(ours.name(index), "rb") as one, open(theirs.name(index), "rb") as other:
            assert one.read() == other.read()


def test_something_else_is_there(tmp_path):
    (tmp_path / "mine" / "train").mkdir(parents=True)
    with pytest.raises(
        DataError, match=r"holds something else \(train\).*Use data\.root=<a folder that does not exist"
    ):
        describe(config(tmp_path / "mine"))
    (tmp_path / "mine" / "moving_digits.json").write_text('{"version": 0}')
    with pytest.raises(DataError, match="holds moving digits of another version"):
        describe(config(tmp_path / "mine"))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"holds something else \(the file file\)"):
        describe(config(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot be written \(.*Use data\.root="):
        describe(config(tmp_path / "file" / "below"))


def test_a_root_that_is_not_set():
    with pytest.raises(ConfigError, match=r"data\.root is not set; data\.source=moving_digits writes"):
        describe(DataConfig(source="moving_digits"))
