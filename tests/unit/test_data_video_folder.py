"""Folders and lists of videos: classes, what is refused, and batches of real clips."""

import numpy as np
import psutil
import pytest
import torch
from timm.data.readers.reader_image_folder import find_images_and_targets

from tests.videos import (
    PLAIN,
    REAL_CLIPS,
    frames_of,
    header_length,
    needs_real_clips,
    numbers_of,
    on_display,
    write_video,
)
from vit_tp.config import BatchPlan, DataConfig
from vit_tp.data.loader import Loading, eval_batches, train_batches
from vit_tp.data.order import SampleKey
from vit_tp.data.sources import build_source, describe
from vit_tp.data.spec import Form
from vit_tp.errors import ConfigError, DataError

pytest.importorskip("av", reason="PyAV is not installed")


def config(root, **knobs):
    return DataConfig(source="video_folder", root=str(root), **knobs)


def form(split="train", size=(32, 32), num_frames=4, seed=0):
    return Form(split, seed, size, num_frames)


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"not opened")
    return path


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 3), ("val", 2)):
        for name in ("2", "10", "1"):
            for number in range(count):
                touch(tmp_path / split / name / f"{number}{('.mp4', '.WEBM', '.avi')[number]}")
    touch(tmp_path / "train" / "1" / "notes.txt")
    return tmp_path


def write_lists(root, train, val):
    (root / "train.csv").write_text(train)
    (root / "val.csv").write_text(val)
    for number in range(4):
        touch(root / "videos" / f"{number}.mp4")
    return root


# folders


def test_a_folder_is_described_without_opening_a_video(folder):
    spec = describe(config(folder, mean=[0.5, 0.4, 0.3]))
    assert (spec.num_train, spec.num_val, spec.num_classes, spec.in_chans, spec.is_video) == (9, 6, 3, 3, True)
    assert spec.mean == (0.5, 0.4, 0.3) and spec.std == (0.229, 0.224, 0.225) and spec.notes == ()


def test_classes_and_their_order_are_timms(folder):
    theirs, class_to_idx = find_images_and_targets(str(folder / "train"), types=(".mp4", ".webm", ".avi"))
    source = build_source(config(folder), form())
    assert source.class_to_idx == class_to_idx == {"1": 0, "2": 1, "10": 2}
    ours = [(source.name(index), int(source._labels[index])) for index in range(len(source))]
    assert sorted(ours) == sorted(theirs) and [label for _, label in ours] == [0] * 3 + [1] * 3 + [2] * 3


def test_a_validation_split_with_fewer_classes_keeps_the_numbers_of_training(folder):
    for path in (folder / "val" / "1").iterdir():
        path.unlink()
    assert describe(config(folder)).num_val == 4
    assert build_source(config(folder), form("val"))._labels.tolist() == [1, 1, 2, 2]


def test_a_root_that_is_not_set_or_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.root is not set; data\.source=video_folder reads .*Use data\.root="):
        describe(DataConfig(source="video_folder"))
    with pytest.raises(DataError, match=r"nowhere is not a folder.*Use data\.root="):
        describe(config(tmp_path / "nowhere"))


def test_every_missing_split_is_named_at_once(tmp_path):
    with pytest.raises(DataError) as caught:
        describe(config(tmp_path))
    assert [f"{tmp_path / split} is not a folder" in str(caught.value) for split in ("train", "val")] == [True, True]


def test_no_classes_and_no_videos(tmp_path):
    (tmp_path / "train").mkdir()
    touch(tmp_path / "val" / "cat" / "notes.txt")
    with pytest.raises(DataError, match=r"train holds no class folder") as caught:
        describe(config(tmp_path))
    assert "val holds 1 class folders but no video" in str(caught.value)


def test_a_class_that_only_validation_has(folder):
    touch(folder / "val" / "dog" / "0.mp4")
    with pytest.raises(DataError, match=r"1 of 4 classes of val in .* are missing in train \(dog\)"):
        describe(config(folder))


def test_an_empty_class_folder_would_shift_the_numbers_of_the_others(folder):
    (folder / "train" / "0").mkdir()
    for ask in (lambda: describe(config(folder)), lambda: build_source(config(folder), form("val"))):
        with pytest.raises(DataError, match=r"1 of 4 class folders in .*train hold no video \(0\)"):
            ask()


@pytest.mark.parametrize("place", ["stray.mp4", "1/nested/deep.mp4"])
def test_a_video_outside_the_class_folders(folder, place):
    touch(folder / "train" / place)
    with pytest.raises(DataError, match=r"1 of 10 videos in .*train do not lie in .*<class> itself"):
        describe(config(folder))


# lists

TRAIN = "videos/0.mp4{0}7\nvideos/1.mp4{0}0\n"


@pytest.mark.parametrize("between", [",", ", ", " ", "\t"])
@pytest.mark.parametrize("titles", ["", "path{0}label\n"])
def test_a_list_of_numbers(tmp_path, between, titles):
    root = write_lists(tmp_path, (titles + TRAIN).format(between), f"{tmp_path}/videos/2.mp4{between}03\n")
    spec = describe(config(root))
    assert (spec.num_train, spec.num_val, spec.num_classes) == (2, 1, 8)
    assert spec.notes == (
        f"no training video of {root} has label 1, 2, 3, 4, 5 and 1 more: nothing teaches these outputs",
    )
    train, val = (build_source(config(root), form(split)) for split in ("train", "val"))
    assert [train.name(0), train.name(1)] == [str(root / "videos" / f"{n}.mp4") for n in (0, 1)]
    assert train._labels.tolist() == [7, 0] and val._labels.tolist() == [3] and val.name(0) == f"{root}/videos/2.mp4"


def test_a_list_of_names_and_of_paths_with_blanks_and_commas(tmp_path):
    touch(tmp_path / "a b, c.mp4")
    root = write_lists(tmp_path, '"a b, c.mp4",ride bike\nvideos/1.mp4,walk\n', "videos/2.mp4,walk\n")
    source = build_source(config(root), form())
    assert source.class_to_idx == {"ride bike": 0, "walk": 1} and source.name(0) == str(root / "a b, c.mp4")
    (root / "train.csv").write_text("videos/a b.mp4 0\nvideos/1.mp4 1\n")
    (root / "val.csv").write_text("videos/2.mp4 1\n")
    assert build_source(config(root), form()).name(0) == str(root / "videos" / "a b.mp4")


def test_lists_come_before_folders(folder):
    write_lists(folder, "videos/0.mp4,0\nvideos/1.mp4,1\n", "videos/2.mp4,1\n")
    assert describe(config(folder)).num_train == 2


@pytest.mark.parametrize(
    ("train", "val", "complaint"),
    [
        (
            "videos/0.mp4,0\nvideos/1.mp4\n",
            "videos/2.mp4,0\n",
            r"1 of 2 lines of .*train\.csv are not a path and a label",
        ),
        ("videos/0.mp4,0,12\n", "videos/2.mp4,0\n", r"1 of 1 lines of .*train\.csv are not"),
        ("videos/0.mp4,0\n", "", r"val\.csv lists no video"),
        ("videos/0.mp4,0\n", "videos/1.mp4,1\nvideos/2.mp4,3\n", r"2 of 2 classes of val .*missing in train \(1, 3\)"),
        ("videos/0.mp4,cat\n", "videos/1.mp4,0\n", r"1 of 1 classes of val .*missing in train \(0\)"),
        ("a/0.mp4,0\na/1.mp4,0\nvideos/0.mp4,0\n", "videos/1.mp4,0\n", r"2 of 3 listed videos .*do not exist"),
    ],
)
def test_lists_that_are_refused(tmp_path, train, val, complaint):
    with pytest.raises(DataError, match=complaint):
        describe(config(write_lists(tmp_path, train, val)))


def test_one_list_alone(tmp_path):
    write_lists(tmp_path, "videos/0.mp4,0\n", "")
    (tmp_path / "val.csv").unlink()
    with pytest.raises(DataError, match=r"val\.csv is not a file, though there is a list of the other split"):
        describe(config(tmp_path))


# clips


@needs_real_clips
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_over_real_clips(tmp_path, num_workers):
    for number, path in enumerate(REAL_CLIPS):
        for split in ("train", "val"):
            link = tmp_path / split / ("landscape", "portrait")[number // 2] / path.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    data = config(tmp_path, decoder="pyav", num_workers=num_workers)
    assert (describe(data).num_train, describe(data).num_classes) == (4, 2)
    plan = BatchPlan(2, 2, 1, 2, 1)
    batches = list(
        train_batches(
            build_source(data, form(size=(48, 64))),
            plan=plan,
            dp_rank=0,
            first_step=0,
            last_step=4,
            loading=Loading(num_workers),
        )
    )
    assert all(batch.images.shape == (2, 3, 4, 48, 64) and not batch.faults for batch in batches)
    assert sorted(torch.cat([batch.targets for batch in batches[:2]]).tolist()) == [0, 0, 1, 1]
    _, evaluated = eval_batches(
        build_source(data, form("val", (48, 64))),
        micro_batch_size=4,
        dp_rank=0,
        dp_size=1,
        loading=Loading(num_workers),
    )
    [batch] = evaluated
    assert batch.targets.tolist() == [0, 0, 1, 1] and all(image.float().std() > 10 for image in batch.images)


def test_a_source_holds_no_open_file_and_its_clip_is_its_videos(tmp_path):
    for split in ("train", "val"):
        for number, name in enumerate(("a", "b")):
            (tmp_path / split / name).mkdir(parents=True)
            write_video(tmp_path / split / name / "0.mp4", range(0, 1600, 40 + 40 * number))
    before = psutil.Process().open_files()
    source = build_source(config(tmp_path, **PLAIN), form("val"))
    for index in (0, 1):
        sample = source.load(SampleKey(0, index))
        times, _ = frames_of(source.name(index))
        length = header_length(source.name(index))
        wanted = [(part + 0.5) / 4 * length for part in range(4)]
        assert numbers_of(np.moveaxis(sample.pixels.numpy(), 0, -1)) == on_display(times, wanted)
        assert sample.label == index
    assert psutil.Process().open_files() == before
