"""From ModelConfig to a timm model on meta: names and shapes, no bytes.

Does not know: ranks, groups, DeepSpeed.
"""

from __future__ import annotations

import difflib
import warnings

import timm
import torch
from timm.models import get_model_input_config
from torch import nn

from vit_tp.config import ModelConfig
from vit_tp.errors import ConfigError
from vit_tp.models.video_build import as_video_


def build_model(model: ModelConfig, num_classes: int, in_chans: int, is_resized: bool = False) -> nn.Module:
    """Return a timm model on meta; of clips where `model.video.num_frames` says so.

    Args:
        model: Name, arguments and input size.
        num_classes: Width of the classifier, K.
        in_chans: Image channels.
        is_resized: Whether images will have other sizes too, for which its position table is resampled in forward.

    Raises:
        ConfigError: If timm does not know the model or refuses its arguments, or it cannot become a video model.
    """
    if not timm.is_model(model.timm):
        close = difflib.get_close_matches(model.timm.split(".")[0], timm.list_models(), n=4, cutoff=0.5)
        hint = f"Did you mean {', '.join(close)}?" if close else "See `vit-tp doctor --models`."
        hint += " A model of your own needs plugins=[<its module>]."
        raise ConfigError(f"model.timm={model.timm} is not a model of timm {timm.__version__}. {hint}")
    kwargs = {"num_classes": num_classes, "in_chans": in_chans, **model.kwargs}
    if model.img_size is not None:
        kwargs["img_size"] = tuple(model.img_size) if isinstance(model.img_size, list) else model.img_size
    if is_resized:
        kwargs["dynamic_img_size"] = True
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # initialisers on meta warn that they do nothing
            built = timm.create_model(model.timm, **kwargs)
    except (TypeError, ValueError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        if is_resized:
            raise ConfigError(
                f"recipe.resolution_schedule needs a model that resamples its position table in forward, and timm "
                f"cannot build model.timm={model.timm} with dynamic_img_size=true: {error}. "
                f"Use recipe.resolution_schedule=[], or a VisionTransformer or Eva model."
            ) from error
        given = ", ".join(f"{key}={value}" for key, value in kwargs.items())
        raise ConfigError(
            f"timm cannot build model.timm={model.timm} with {given}: {error}. Change model.kwargs or model.img_size."
        ) from error
    return built if model.video.num_frames is None else as_video_(built, model.video)


def input_shape(model: nn.Module, micro_batch_size: int) -> tuple[int, ...]:
    """Return the shape of what a model takes, or was made for where it takes any size.

    Returns:
        (B, channels, Y, X) of images, (B, channels, T, Y, X) of clips.
    """
    channels, *size = get_model_input_config(model)["input_size"]
    video = getattr(model, "video", None)
    return micro_batch_size, channels, *([] if video is None else [video.num_frames]), *size
