"""Which checkpoint does a run start from, and does all of it fit the model?

timm answers: its own `load_pretrained` finds the file (a path, the hub's cache, its own), unwraps it, applies the
filter of the model's family and adapts the first convolution, here to a model on meta that only takes notes of what it
is given. Files are mapped, not read: what the filter passes on stays in the file, and a rank touches the pages of its
own stages and no others. What the filter computes (a resampled position table, joined q, k and v) is memory.

Does not know: ranks, groups, DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import timm
from huggingface_hub import constants as hub
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file
from timm.models import _builder
from torch import Tensor, nn
from torch.utils.serialization import config as serialization

from vit_tp.checkpoint.clips import KERNEL, as_clips, as_images, for_clips, require_same_choices
from vit_tp.checkpoint.export import mark_of, video_of
from vit_tp.checkpoint.fitting import Fitted, fit
from vit_tp.config import ModelConfig
from vit_tp.config.schema import VideoConfig
from vit_tp.errors import CheckpointError, ConfigError, VitTpError
from vit_tp.models.build import build_model
from vit_tp.models.stages import Stage
from vit_tp.models.weights import Fill, FirstWeights


class LoadCall(NamedTuple):
    """How timm would load pretrained weights.

    Args:
        model: On meta, of the run's own name, arguments and size.
        arguments: pretrained_cfg, num_classes, in_chans, filter_fn, strict and cache_dir of timm's `load_pretrained`.
    """

    model: nn.Module
    arguments: dict[str, Any]


def start_from(model: ModelConfig, num_classes: int, in_chans: int, drawn: FirstWeights) -> Fill:
    """Return the fill that a training starts from: `drawn` alone, or a checkpoint's weights over it.

    What the checkpoint does not hold, such as a head for other classes or a table that is computed, stays as drawn.

    Args:
        model: `pretrained` says which checkpoint; null for none.
        num_classes: Width of the classifier, K.
        in_chans: Image channels.
        drawn: First weights.

    Raises:
        CheckpointError: As `open_pretrained`.
        ConfigError: As `open_pretrained`.
    """
    if model.pretrained is None:
        return drawn
    weights = open_pretrained(model, num_classes, in_chans).weights

    def fill(whole: nn.Module, stage: Stage) -> None:
        drawn(whole, stage, skip=weights)
        for name, tensor in stage.named_timm_tensors():
            if name in weights:
                tensor.copy_(weights[name])
                _require_numbers(name, tensor, model.pretrained)

    return fill


def _require_numbers(name: str, tensor: Tensor, source: Any) -> None:
    if tensor.is_floating_point() and tensor.isnan().any():
        raise CheckpointError(
            f"{name} holds NaN in model.pretrained={source}; a training that starts there cannot go anywhere. "
            f"Use weights that were saved before they diverged."
        )


def open_pretrained(model: ModelConfig, num_classes: int, in_chans: int) -> Fitted:
    """Return the weights that timm would load, under the model's names, mapped.

    Args:
        model: `pretrained` is true for timm's own weights of that name, or a file.
        num_classes: Width of the classifier, K; another width in the checkpoint makes it start afresh.
        in_chans: Image channels; timm adapts the first convolution to them.

    Raises:
        CheckpointError: The file cannot be had or read, or a tensor is missing, surplus or of another shape.
        ConfigError: timm has no weights for the model.
    """
    call = _recorded_call(model, num_classes, in_chans)
    # The file says how many classes it has, and `fit` compares: timm would trust the registered number instead.
    cfg = {**call.arguments["pretrained_cfg"], "num_classes": num_classes}
    source = _require_weights(cfg, model.timm) if model.pretrained is True else str(model.pretrained)
    file: dict[str, Any] = {}
    try:
        if model.pretrained is not True:
            cfg |= _location(Path(source).expanduser())
            _require_same_model(Path(source).expanduser(), model.video)
        weights = _let_timm_load(call, cfg, file)
    except VitTpError:
        raise
    except Exception as error:  # whatever a foreign file makes of unpickling, the hub, and timm's filters
        raise _unreadable(error, source, model) from error
    classifiers, fitted, clips = cfg.get("classifier") or (), call.model, None
    if model.video.num_frames is not None:
        fitted = build_model(model, num_classes, in_chans)
        clips = for_clips(source, weights, call.model, fitted)
        weights = clips.weights
    elif (kernel := weights.get(KERNEL)) is not None and kernel.ndim == 5:
        raise CheckpointError(
            f"{source} is of a video model whose tokens cover {kernel.shape[2]} frames, and model.video.num_frames is "
            f"null; an image has no frames for it. Use model.video.num_frames and the other choices it was made with."
        )
    return fit(
        source,
        model.timm,
        file,
        weights,
        fitted,
        classifiers=(classifiers,) if isinstance(classifiers, str) else tuple(classifiers),
        is_strict=call.arguments["strict"],
        clips=clips,
    )


def _require_same_model(file: Path, video: VideoConfig) -> None:
    mark = mark_of(file)
    if mark is not None:
        raise CheckpointError(
            f"{file} was {mark}, where each rank keeps channels of its own; on any other tp, and in stock timm, its "
            f"weights are another model. Use the export of a run with recipe.sync=exact."
        )
    if (made_with := video_of(file)) is not None:
        require_same_choices(str(file), made_with, video)


def _recorded_call(model: ModelConfig, num_classes: int, in_chans: int) -> LoadCall:
    """Return the call that `timm.create_model(..., pretrained=True)` makes to load weights, without making it.

    The filter and how strictly it is meant are chosen inside each family's own create function, some by the model's
    name, and are written nowhere else. So timm is asked to create the model, and `load_pretrained` is replaced for that
    one call.
    """
    calls: list[LoadCall] = []

    def note(model: nn.Module, **arguments: Any) -> None:
        calls.append(LoadCall(model, arguments))

    # Of a video model the image model is asked: timm's filters know images.
    asking = dataclasses.replace(model, kwargs={**model.kwargs, "pretrained": True}, video=VideoConfig())
    with _replaced(_builder, "load_pretrained", note):
        built = build_model(asking, num_classes, in_chans)
    own = [call for call in calls if call.model is built]  # hybrids ask for their backbone's too, which theirs replace
    if len(own) != 1:
        raise CheckpointError(
            f"timm {timm.__version__} asked {len(own)} times for the weights of model.timm={model.timm}; its own "
            f"filter for them cannot be found. Use the timm of requirements.txt, or model.pretrained=null."
        )
    return own[0]


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, kept)


def _location(path: Path) -> dict[str, Any]:
    """Return the entries of a pretrained_cfg that lead timm to a file, as its own overlay for a file would."""
    entries = {"source": None, "custom_load": False, "file": str(path)}
    if path.name.endswith(".index.json"):  # weights over 2 GiB lie in several files, and the index says in which
        parts = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        entries["state_dict"] = {name: t for part in parts for name, t in load_file(path.parent / part).items()}
    return entries


def _let_timm_load(call: LoadCall, cfg: Mapping[str, Any], file: dict[str, Any]) -> dict[str, Tensor]:
    """Return what timm would hand to the model's `load_state_dict`; `file` receives what it was before the filter."""
    loaded: dict[str, Tensor] = {}
    own_filter, frames = call.arguments["filter_fn"], []

    def filter_fn(state_dict: dict[str, Any], *model: nn.Module) -> dict[str, Any]:
        file.update(state_dict)
        kernel = state_dict.get(KERNEL)
        if isinstance(kernel, Tensor) and kernel.ndim == 5:  # an export of a video model
            frames.append(kernel.shape[2])
            state_dict = {**state_dict, KERNEL: as_images(kernel)}
        return state_dict if own_filter is None else own_filter(state_dict, *model)

    def note(state_dict: Mapping[str, Tensor], strict: bool = True) -> SimpleNamespace:
        loaded.update(state_dict)
        return SimpleNamespace(missing_keys=[], unexpected_keys=[])  # `fit` has its own opinion

    def refuse(path: str) -> None:
        raise CheckpointError(
            f"{path} holds the weights of {type(call.model).__name__} in a format of its own, which timm reads into a "
            f"whole model in memory. Use model.pretrained=<file> with a .safetensors or .pth that timm has saved."
        )

    call.model.load_state_dict = note
    call.model.load_pretrained = refuse
    arguments = {**call.arguments, "pretrained_cfg": dict(cfg), "filter_fn": filter_fn}
    with serialization.patch("load.mmap", True):  # safetensors are always mapped
        try:
            # The cache first: ranks take what was checked before they started, and a thousand do not ask the hub.
            with _replaced(hub, "HF_HUB_OFFLINE", True):
                _builder.load_pretrained(call.model, **arguments)
        except LocalEntryNotFoundError:
            _builder.load_pretrained(call.model, **arguments)
    if frames:
        loaded[KERNEL] = as_clips(loaded[KERNEL], *frames)
    return loaded


def _require_weights(cfg: Mapping[str, Any], name: str) -> str:
    """Return where timm has a model's own weights from."""
    source = cfg.get("file") or cfg.get("hf_hub_id") or cfg.get("url")
    if source:
        return str(source)
    close = difflib.get_close_matches(name, timm.list_pretrained(), n=3, cutoff=0.5)
    raise ConfigError(
        f"model.pretrained=true, but timm {timm.__version__} has no weights for model.timm={name}; there is nothing to "
        f"start from. Use model.pretrained=<file>, model.pretrained=null, or a model.timm that has weights"
        f"{', such as ' + ', '.join(close) if close else ''}."
    )


def _is_old_torch_file(path: str) -> bool:
    """Return whether a file begins as torch.save wrote it before version 1.6: a pickle of a magic number."""
    with open(Path(path).expanduser(), "rb") as file:
        return file.read(2) == b"\x80\x02" and b"\xfc\x9c" in file.read(16)


def _unreadable(error: Exception, source: str, model: ModelConfig) -> CheckpointError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0].rstrip(".") if lines else type(error).__name__
    if "mmap can only be used" in reason and _is_old_torch_file(source):
        return CheckpointError(
            f"{source} is not in the zip format of torch.save; it cannot be mapped, and each rank would have to read "
            f"all of it. Convert it once: python -c \"import torch; torch.save(torch.load('{source}', "
            f"map_location='cpu'), 'converted.pth')\", and use model.pretrained=converted.pth."
        )
    if model.pretrained is True:
        return CheckpointError(
            f"model.pretrained=true: the weights of model.timm={model.timm} ({source}) cannot be had: {reason}. Run "
            f"timm.create_model('{model.timm}', pretrained=True) once where there is a network, which fills the cache, "
            f"or use model.pretrained=<file>."
        )
    return CheckpointError(
        f"model.pretrained={source} cannot be read as weights of model.timm={model.timm}: {type(error).__name__}: "
        f"{reason}. Use a .safetensors or .pth of that model."
    )
