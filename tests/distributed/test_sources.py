"""Real files through whole runs: folders, shards and videos give the same losses on any grid, broken files included."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.distributed.runs import DIGITS_VIT, digits_config, train_digits
from tests.worlds import RankFailed, run_world
from vit_tp.errors import VitTpError

SLOW = pytest.mark.slow
IMAGES = {
    "model__img_size": [8, 16], "model__kwargs": {**DIGITS_VIT, "patch_size": 4}, "recipe__global_batch_size": 8,
    "recipe__max_steps": 6, "recipe__epochs": 4, "compute__micro_batch_size": 2, "data__max_bad_fraction": 0.5,
    "data__random_erasing": 0.5, "data__auto_augment": "rand-m9-mstd0.5-inc1", "data__repeats": 2,
    "recipe__mixing__cutmix_alpha": 1.0, "recipe__mixing__mode": "elem",
}  # fmt: skip
CLIPS = {
    **IMAGES, "model__img_size": 16, "model__video__num_frames": 4, "model__video__attention": "divided",
    "data__repeats": 1, "data__auto_augment": None, "data__eval_clips": 2, "compute__eval_micro_batch_size": 4,
}  # fmt: skip


def pixels(number: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*shape, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """24 and 10 images in two classes; one of each split is cut short."""
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", 24), ("val", 10)):
        for number in range(count):
            path = root / split / f"class{number % 2}" / f"{number:02d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels(number, 24, 32)).save(path)
            if number == 5:
                path.write_bytes(path.read_bytes()[:300])
    return root


@pytest.fixture(scope="module")
def shards(folder, tmp_path_factory) -> Path:
    """The same in three shards and one."""
    import webdataset

    root = tmp_path_factory.mktemp("shards")
    for split in ("train", "val"):
        files = sorted((folder / split).glob("*/*"), key=lambda path: path.name)
        for first in range(0, len(files), 10):
            with webdataset.TarWriter(str(root / f"{split}-{first // 10:03d}.tar")) as tar:
                for path in files[first : first + 10]:
                    label = path.parent.name[-1]
                    tar.write({"__key__": path.stem, "jpg": path.read_bytes(), "cls": label.encode()})
    return root


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    """12 and 6 clips in three classes; one holds no video."""
    from vit_tp.data.moving_digits import write_video

    root = tmp_path_factory.mktemp("videos")
    for split, count in (("train", 12), ("val", 6)):
        for number in range(count):
            path = root / split / f"class{number % 3}" / f"{number:02d}.mp4"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_video(path, pixels(number, 12, 20, 24)[..., 0])
            if split == "train" and number == 4:
                path.write_bytes(b"no video at all")
    return root


def grids_agree(source: str, root: Path, base: dict[str, Any], tmp_path: Path, grids: list[tuple[int, int, int]]):
    """Train on one process and on grids; return what one process found."""
    found = []
    for pp, dp, tp in [(1, 1, 1), *grids]:
        place = tmp_path / f"{pp}{dp}{tp}"
        knobs = {**base, "data__source": source, "data__root": str(root), "run__dir": str(place)}
        knobs |= {"data__num_workers": 2} if tp > 1 else {}
        ranks = run_world(train_digits, pp * dp * tp, pp, dp, tp, str(place), knobs)
        found.append((ranks[0], place))
    one, _ = found[0]
    for other, _ in found[1:]:
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
        for name in ("eval/top1", "eval/count", "unreadable"):
            assert other["figures"][name] == one["figures"][name], name
        assert other["figures"]["eval/loss"] == pytest.approx(one["figures"]["eval/loss"], rel=1e-5)
    return found


def faults_below(place: Path) -> list[dict]:
    return [json.loads(line) for log in place.rglob("unreadable_*.jsonl") for line in log.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["image_folder", "image_tars"])
def test_images_give_the_same_on_any_grid(kind, folder, shards, tmp_path):
    """P52: wide images, repeated, augmented, erased and mixed; tp with worker processes, replicas and stages."""
    root = folder if kind == "image_folder" else shards
    for one, place in grids_agree(kind, root, IMAGES, tmp_path, [(2, 1, 2), (1, 2, 1)]):
        faults = faults_below(place)
        distinct = {(fault["name"], fault["epoch"], fault["index"]) for fault in faults}
        assert one["figures"]["unreadable"] == len(distinct) >= 2, "copies of a sample count once"
        assert all(fault["name"].endswith(("/05.jpg", "-000.tar:5")) for fault in faults)
        left_out = [fault for fault in faults if fault["replaced_by"] is None]
        assert left_out and one["figures"]["eval/count"] == 9, "one of ten validation images cannot be read"


@pytest.mark.parametrize(
    "grids", [[(2, 1, 2)], pytest.param([(1, 2, 1), (1, 1, 2), (2, 2, 1)], marks=SLOW)], ids=["2x2", "others"]
)
def test_clips_give_the_same_on_any_grid(grids, videos, tmp_path):
    """Two clips of each validation video are looked at and count as one."""
    for one, place in grids_agree("video_folder", videos, CLIPS, tmp_path, grids):
        assert one["figures"]["eval/count"] == 6
        assert {Path(fault["name"]).name for fault in faults_below(place)} == {"04.mp4"}


def test_too_many_broken_files_end_the_run(folder, tmp_path):
    knobs = {**IMAGES, "data__source": "image_folder", "data__root": str(folder), "run__dir": str(tmp_path)}
    with pytest.raises(RankFailed, match=r"\d of 24 samples cannot be read, more than data\.max_bad_fraction=0 allows"):
        run_world(train_digits, 2, 1, 1, 2, str(tmp_path), {**knobs, "data__max_bad_fraction": 0.0})


def classes_change(root: str, run_dir: str) -> list[str]:
    """Add a class to the folder after the run was laid out, and take one from what an evaluation reads."""
    from vit_tp.config import RunFolder
    from vit_tp.parallel.topology import Topology
    from vit_tp.train.assemble import assemble
    from vit_tp.train.communication import start_communication
    from vit_tp.train.rank import _require_classes_of_run

    knobs = {**IMAGES, "data__source": "image_folder", "data__root": root, "run__dir": run_dir}
    run = assemble(digits_config(**knobs), Topology(), start_communication())
    assert run.data.spec.class_names == ("class0", "class1")
    (Path(root) / "train" / "aaa").mkdir()
    said = []
    folder = RunFolder(Path(run_dir))
    folder.classes.write_text('["class0", "class1"]')
    _require_classes_of_run(folder, run.data.spec.class_names)
    for refused in (
        lambda: run.data.training_batches(0, 1),
        lambda: _require_classes_of_run(folder, ("class0", "class2")),
        lambda: _require_classes_of_run(folder, ("class1", "class0")),
    ):
        with pytest.raises(VitTpError) as caught:
            refused()
        said.append(str(caught.value))
    return said


def test_numbers_mean_the_same_classes_for_the_whole_life_of_a_run(folder, tmp_path):
    """A folder that appears in train/ would shift the numbers of all after it, in silence."""
    root = tmp_path / "images"
    shutil.copytree(folder, root)
    changed, other, turned = run_world(classes_change, 1, str(root), str(tmp_path))[0]
    assert "no longer those that the run began with (aaa)" in changed
    assert "other classes" in other and "class1, class2" in other and "another order" in turned
