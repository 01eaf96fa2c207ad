"""What are the moving digits?

scikit-learn's handwritten digits, each of which drifts right, left, down or up. The label is the direction. A digit
that leaves at one edge comes back at the other and begins anywhere, so that in every frame all places are as likely
whatever the direction: one frame cannot tell, only several in their order.

They are real video files, written on first use:

    <data.root>/moving_digits.json         <data.root>/{train,val}/{down,left,right,up}/<digit>_<index>.mp4

From then on they are a folder of videos like any other.

Does not know: how videos are read (video_folder.py).
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import shutil
import tempfile
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
from torch.nn import functional as F

from vit_tp.config import DataConfig
from vit_tp.data.clips import require_clips
from vit_tp.data.digits import load_digits
from vit_tp.data.folders import SPLITS
from vit_tp.data.spec import DataSpec, Form
from vit_tp.data.video_folder import VideoFolder, describe_video_folder
from vit_tp.data.wording import listed
from vit_tp.errors import ConfigError, DataError

DIRECTIONS = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}
"""Pixels down and to the right in a frame."""

NUM_FRAMES, SIZE, DIGIT_SIZE, RATE = 16, 32, 16, 8
_CONTENT = {"frames": NUM_FRAMES, "size": SIZE, "digit_size": DIGIT_SIZE, "rate": RATE, "version": 1}
_MARK = "moving_digits.json"
_FORGOTTEN_S = 3600.0  # a draft that has not grown for so long has lost its writer


def describe_moving_digits(data: DataConfig) -> DataSpec:
    """Write the videos unless they are there, and count them.

    Args:
        data: The data group of the config.

    Raises:
        ConfigError: data.root is not set, or PyAV, which writes them, is not installed.
        DataError: data.root holds something else, or cannot be written.
    """
    require_clips(data)
    write_moving_digits(data)
    return describe_video_folder(data)


class MovingDigits(VideoFolder):
    """One split of the moving digits.

    Args:
        data: The data group of the config.
        form: What the clips are to look like.
    """

    def __init__(self, data: DataConfig, form: Form) -> None:
        write_moving_digits(data)  # a machine of its own may have no file system in common with the one that described
        super().__init__(data, form)


def write_moving_digits(data: DataConfig) -> Path:
    """Write all videos unless they are there, and return their folder.

    They are written beside data.root and moved there when complete, so a folder of that name is never half of them.

    Args:
        data: The data group of the config; root is read.

    Raises:
        ConfigError: data.root is not set, or PyAV, which writes them, is not installed.
        DataError: data.root holds something else, or cannot be written.
    """
    if not data.root:
        raise ConfigError(
            "data.root is not set; data.source=moving_digits writes its videos there. "
            "Use data.root=data/moving_digits, or another folder that does not exist yet."
        )
    root = Path(data.root).expanduser()
    if _is_complete(root):
        return root
    if importlib.util.find_spec("av") is None:
        raise ConfigError(
            "data.source=moving_digits writes its videos with PyAV, which is not installed. "
            "Run pip install 'vit-tp[video]'."
        )
    draft = None
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        _remove_forgotten_drafts(root)
        draft = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
        _write_all(draft)
        draft.chmod(0o755)
        draft.rename(root)  # refused where another process has been faster
    except OSError as error:
        if _is_complete(root):
            return root
        raise DataError(
            f"data.root={data.root} cannot be written ({error}); data.source=moving_digits makes its videos there. "
            f"Use data.root=<a folder that does not exist yet, where you may write>."
        ) from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
    return root


def _remove_forgotten_drafts(root: Path) -> None:
    """Remove what processes that were killed while they wrote have left."""
    for draft in root.parent.glob(f".{glob.escape(root.name)}-*"):
        with contextlib.suppress(OSError):  # another one may remove it too
            newest = max(path.stat().st_mtime for path in (draft, *draft.glob("*/*")))
            if draft.is_dir() and time.time() - newest > _FORGOTTEN_S:
                shutil.rmtree(draft, ignore_errors=True)


def _is_complete(root: Path) -> bool:
    """Say whether the videos are there.

    Raises:
        DataError: Something else is there.
    """
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return False
    mark = root / _MARK
    if mark.is_file() and mark.read_text() == json.dumps(_CONTENT):
        return True
    if mark.is_file():
        found = "moving digits of another version of vit_tp"
    else:
        names = sorted(os.listdir(root)) if root.is_dir() else [f"the file {root.name}"]
        found = f"something else ({listed(names)})"
    raise DataError(
        f"data.root={root} holds {found}; data.source=moving_digits writes its own videos and would mix them with "
        f"that. Use data.root=<a folder that does not exist yet>, or data.source=video_folder to read what is there."
    )


def _write_all(folder: Path) -> None:
    for split_number, split in enumerate(SPLITS):
        for direction in DIRECTIONS:
            (folder / split / direction).mkdir(parents=True)
        images, classes = load_digits(split)
        large = F.interpolate(images / 16 * 255, (DIGIT_SIZE, DIGIT_SIZE), mode="bilinear")
        digits = large.round().clamp(0, 255).byte().squeeze(1).numpy()  # (N, Y, X)
        for index, (digit, digit_class) in enumerate(zip(digits, classes)):
            direction = list(DIRECTIONS)[index % len(DIRECTIONS)]
            begin = np.random.RandomState([split_number, index]).randint(0, SIZE, 2)
            frames = moving(digit, begin, DIRECTIONS[direction])
            write_video(folder / split / direction / f"{digit_class}_{index:04d}.mp4", frames)
    (folder / _MARK).write_text(json.dumps(_CONTENT))


def moving(digit: np.ndarray, begin: np.ndarray, step: tuple[int, int]) -> np.ndarray:
    """Return a digit's way over a black ground whose opposite edges meet.

    Args:
        digit: (Y, X) uint8.
        begin: Row and column of its corner in the first frame.
        step: Pixels down and to the right in a frame.

    Returns:
        Frames (NUM_FRAMES, SIZE, SIZE) uint8.
    """
    ground = np.zeros((SIZE, SIZE), np.uint8)
    ground[: digit.shape[0], : digit.shape[1]] = digit
    return np.stack([np.roll(ground, begin + np.array(step) * frame, (0, 1)) for frame in range(NUM_FRAMES)])


def write_video(file: Path, frames: np.ndarray) -> None:
    """Write grey frames (T, Y, X) uint8 as a video: H.264 where PyAV has its encoder, otherwise MPEG-4."""
    import av

    has_h264 = "libx264" in av.codecs_available
    with av.open(str(file), "w", format="mp4") as container:
        stream = container.add_stream("libx264" if has_h264 else "mpeg4", rate=RATE)
        stream.height, stream.width = frames.shape[1:]
        stream.pix_fmt = "yuv420p"
        stream.time_base = Fraction(1, RATE)
        # One thread: what several write depends on their number.
        stream.thread_count = 1
        stream.thread_type = "NONE"
        stream.options = {"preset": "ultrafast", "crf": "12"} if has_h264 else {"qscale": "3"}
        luma_only = np.full((frames.shape[1] * 3 // 2, frames.shape[2]), 128, np.uint8)
        for number, pixels in enumerate(frames):
            luma_only[: frames.shape[1]] = 16 + pixels.astype(np.uint16) * 219 // 255  # the range of video
            frame = av.VideoFrame.from_ndarray(luma_only, format="yuv420p")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
