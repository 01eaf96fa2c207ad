"""Which weights of an image model, or of another video model, does a video model start from?

Between timm's filter, which knows image models, and `fit`, which wants every tensor accounted for. Only the kernel of
the patch embedding and a resampled table of time are computed; all else stays in the file.

Does not know: files, timm's filters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vit_tp.config.schema import VideoConfig
from vit_tp.errors import CheckpointError
from vit_tp.models.video_embed import inflate
from vit_tp.models.video_start import origin_of

KERNEL = "patch_embed.proj.weight"


@dataclass(frozen=True)
class ForClips:
    """Weights of a checkpoint under a video model's names.

    Args:
        weights: Whole tensors.
        inflated: How the kernel was spread over time; None where it came from clips.
        copied: Names of new tensors -> names of the image model's that they start as.
        new: Names that keep their first values, which add nothing.
        idle: Names of the image model's that the video model has no place for.
    """

    weights: Mapping[str, Tensor]
    inflated: str | None = None
    copied: Mapping[str, str] = field(default_factory=dict)
    new: Sequence[str] = ()
    idle: Sequence[str] = ()


CHOICES = ("tubelet_size", "attention", "position", "time_depth")
"""Those that make other numbers of the same weights, or need others; num_frames may differ, inflation is past."""


def require_same_choices(source: str, made_with: Mapping[str, Any], video: VideoConfig) -> None:
    """Raise unless a video model is what the video model was that a file's weights are of.

    Args:
        source: Where the file came from.
        made_with: The choices that its metadata names.
        video: Those of the model; `num_frames` is None for an image model.

    Raises:
        CheckpointError: With what to type.
    """
    if video.num_frames is None:
        wanted = [f"model.video.{name}={value}" for name, value in made_with.items() if name != "inflation"]
        raise CheckpointError(
            f"{source} is of a video model of {made_with.get('num_frames')} frames, and model.video.num_frames is "
            f"null; an image has no frames for it. Use {' '.join(wanted)}."
        )
    names = [name for name in CHOICES if name != "time_depth" or made_with.get("attention") == "factorised"]
    other = [name for name in names if name in made_with and made_with[name] != getattr(video, name)]
    if other:
        had = ", ".join(f"{name}={made_with[name]}" for name in other)
        asked = ", ".join(f"model.video.{name}={getattr(video, name)}" for name in other)
        raise CheckpointError(
            f"{source} is of a video model with {had}, and {asked}; what its weights learnt there they do not mean "
            f"here. Use {' '.join(f'model.video.{name}={made_with[name]}' for name in other)}, or start from the "
            f"weights of the image model."
        )


def as_images(kernel: Tensor) -> Tensor:
    """(C, channels, t, p, p) -> (C t, channels, p, p): t kernels of images, for timm's filter. Inverse: `as_clips`."""
    return kernel.transpose(1, 2).flatten(0, 1)


def as_clips(kernel: Tensor, tubelet_size: int) -> Tensor:
    """(C t, channels, p, p) -> (C, channels, t, p, p). Inverse: `as_images`."""
    return kernel.unflatten(0, (-1, tubelet_size)).transpose(1, 2)


def for_clips(source: str, weights: Mapping[str, Tensor], image: nn.Module, model: nn.Module) -> ForClips:
    """Return what a video model takes over from a checkpoint of its image model, or of a video model like it.

    Args:
        source: Where the checkpoint came from.
        weights: After timm's filter.
        image: The image model, on meta.
        model: The video model, on meta.

    Raises:
        CheckpointError: If the checkpoint is of tubelets of another size.
    """
    kernel = weights.get(KERNEL)
    if kernel is None or kernel.ndim != 5:
        return _of_images(dict(weights), image, model)
    frames, own = kernel.shape[2], model.video.tubelet_size
    if frames != own:
        raise CheckpointError(
            f"{source} is of a video model whose tokens cover {frames} frames, and model.video.tubelet_size={own}; "
            f"another kernel would make other tokens of the same frames. Use model.video.tubelet_size={frames}, or "
            f"start from the weights of the image model."
        )
    return ForClips(_with_time_resampled(dict(weights), model))


def _of_images(weights: dict[str, Tensor], image: nn.Module, model: nn.Module) -> ForClips:
    video, wanted, had = model.video, model.state_dict(), image.state_dict()
    if KERNEL in weights:
        weights[KERNEL] = inflate(weights[KERNEL], video.tubelet_size, video.inflation)
    new = [name for name in wanted if name not in had and name not in weights]
    origins = {name: origin_of(model, name) for name in new}
    copied = {name: origin for name, origin in origins.items() if origin in weights}
    weights |= {name: weights[origin] for name, origin in copied.items()}
    idle = [name for name in had if name not in wanted and name in weights]
    for name in idle:
        del weights[name]
    return ForClips(weights, video.inflation, copied, [name for name in new if name not in copied], idle)


def _with_time_resampled(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    table = weights.get("time_embed")
    if table is not None and table.ndim == 3 and getattr(model, "time_embed", None) is not None:
        if table.shape[1] != model.num_times:
            along = F.interpolate(table.float().transpose(1, 2), size=model.num_times, mode="linear")
            weights["time_embed"] = along.transpose(1, 2).to(table.dtype)
    return weights
