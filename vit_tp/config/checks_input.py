"""What is asked of the model's input: its size, its frames, how its size changes.

Does not know: patches, position tables (train/preflight.py asks timm).
"""

from __future__ import annotations

from collections.abc import Iterator

from vit_tp.config.limits import NAMES, VIDEO_SOURCES
from vit_tp.config.schema import Config
from vit_tp.config.sizes import is_size, resolution_schedule, size_of
from vit_tp.config.types import show
from vit_tp.config.video import video_complaints


def input_complaints(config: Config) -> Iterator[str]:
    """Yield every complaint about the model's input."""
    yield from _input_size(config)
    yield from video_complaints(config.model.video)
    yield from _resolutions(config)


def _input_size(config: Config) -> Iterator[str]:
    size, video = config.model.img_size, config.model.video
    if size is not None and not is_size(size):
        yield (
            f"model.img_size={show(size)} is no size; it takes a number of pixels, or height and width. "
            f"Use for example model.img_size=224 or model.img_size=[256,448]."
        )
    takes_clips = config.data.source in VIDEO_SOURCES
    if takes_clips and video.num_frames is None:
        yield (
            f"data.source={config.data.source} gives clips and model.video.num_frames=null asks for images. "
            f"Use for example model.video.num_frames=16."
        )
    if not takes_clips and video.num_frames is not None and config.data.source in NAMES["data.source"]:
        yield (
            f"data.source={config.data.source} gives images and model.video.num_frames={video.num_frames} asks for "
            f"clips. Use model.video.num_frames=null, or data.source={' or '.join(VIDEO_SOURCES)}."
        )


def _resolutions(config: Config) -> Iterator[str]:
    plan = config.recipe.resolution_schedule
    entries = plan if isinstance(plan, list) else [plan]
    is_plan = isinstance(plan, list) and all(
        isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int and is_size(entry[1]) for entry in entries
    )
    first = [entry[0] for entry in entries] if is_plan else []
    if not is_plan or any(later <= earlier for earlier, later in zip(first, first[1:], strict=False)):
        yield (
            f"recipe.resolution_schedule={show(plan)} is no schedule; it is a list of [epoch, pixels], by epoch. "
            f"Use for example recipe.resolution_schedule=[[0,128],[30,192]]."
        )
    elif first and not 0 <= first[0] <= first[-1] < config.recipe.epochs:
        yield (
            f"recipe.resolution_schedule={show(plan)} names epochs {first[0]} to {first[-1]}, and recipe.epochs="
            f"{config.recipe.epochs} ends before or begins after. Use epochs 0 to {config.recipe.epochs - 1}."
        )
    elif first and is_size(config.model.img_size):
        most = size_of(config.model.img_size)
        larger = [size for _, size in resolution_schedule(config) if size[0] > most[0] or size[1] > most[1]]
        if larger:
            yield (
                f"recipe.resolution_schedule={show(plan)} goes beyond model.img_size={show(config.model.img_size)}, "
                f"for which memory and position table are made. Use model.img_size={show(list(larger[-1]))}."
            )
    elif first:
        yield (
            "recipe.resolution_schedule needs to know where it leads: evaluation and position table have "
            f"model.img_size, which is null. Use for example model.img_size={show(entries[-1][1])}."
        )
