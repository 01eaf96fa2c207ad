"""Weights as timm names them, in safetensors, written and read one stage at a time.

    <run>/export/model.safetensors                        small models: one file, loads in stock timm strictly (a video
                                                          model's in the model of `vit_tp.video_model`)
    <run>/export/model-00001-of-00014.safetensors ...     others: one file for each stage, and
    <run>/export/model.safetensors.index.json             which tensor lies in which file

Neither end ever needs more memory than one whole stage. Does not know: DeepSpeed, optimizers.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vit_tp.checkpoint.clips import require_same_choices
from vit_tp.config.atomic import replacing, write_atomically
from vit_tp.config.schema import VideoConfig
from vit_tp.errors import CheckpointError
from vit_tp.models.stages import TABLES, Stage
from vit_tp.models.weights import Fill, FirstWeights
from vit_tp.parallel.groups import Groups
from vit_tp.sharding.state import full_tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MARK = "vit_tp.not_for_stock_timm"  # in the files' metadata: why
VIDEO = "vit_tp.video"  # in the files' metadata: what made a video model of the image model, as JSON
MAX_SINGLE_FILE_BYTES = 2 * 1024**3


def save_weights(
    folder: Path,
    stages: list[Stage],
    all_stages: list[str],
    groups: Groups,
    weights_of: Callable[[nn.Parameter], Tensor],
    mark: str | None = None,
) -> None:
    """Write the whole model's weights. Collective over the world.

    Args:
        folder: Where the files go; made if needed.
        stages: What this rank saves.
        all_stages: Names of all stages of the model, in order.
        groups: This rank's peers.
        weights_of: This rank's slice of a parameter as it should be saved; collective over dp.
        mark: Why they are no weights for stock timm, where they are not; `open_pretrained` then refuses them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names, metadata = [TABLES, *all_stages], _metadata(stages, mark)
    is_writer = groups.place.tp == 0 and groups.place.dp == 0
    for stage in stages:
        whole = {
            name: _whole(tensor, weights_of, groups).cpu().contiguous() for name, tensor in stage.named_timm_tensors()
        }
        if is_writer and whole:
            _save(whole, folder / _part(names, stage.name), metadata)
    dist.barrier()
    if groups.rank == 0:
        _finish(folder, [path for name in names if (path := folder / _part(names, name)).exists()], metadata)
    dist.barrier()


def _metadata(stages: list[Stage], mark: str | None) -> dict[str, str]:
    """Return what the files say of themselves, the same on every rank."""
    found = {"format": "pt"} | ({MARK: mark} if mark else {})
    video = next((video for stage in stages if (video := getattr(stage.inner, "video", None)) is not None), None)
    return found if video is None else {**found, VIDEO: json.dumps(dataclasses.asdict(video))}


def _whole(tensor: Tensor, weights_of: Callable[[nn.Parameter], Tensor], groups: Groups) -> Tensor:
    """Return a parameter or buffer as all ranks together hold it. Collective over tp and dp."""
    if not isinstance(tensor, nn.Parameter):
        return tensor
    return full_tensor(tensor, weights_of(tensor), groups.tp_group)


def fill_from(folder: Path, drawn: FirstWeights) -> Fill:
    """Return a fill that reads a stage's weights from what `save_weights` wrote.

    Args:
        folder: Of the export.
        drawn: Gives what no file holds, such as the indices of a position table.

    Raises:
        CheckpointError: If there are no weights, or, in the fill, they are another video model's.
    """
    if (folder / WEIGHTS).is_file():
        where = None
    elif (folder / INDEX).is_file():
        where = json.loads((folder / INDEX).read_text())["weight_map"]
    else:
        raise CheckpointError(f"{folder} holds no {WEIGHTS}, so there are no weights to load. Name a finished run.")
    made_with = video_of(folder / (WEIGHTS if where is None else INDEX))

    def fill(model: nn.Module, stage: Stage) -> None:
        if made_with is not None:
            require_same_choices(str(folder), made_with, getattr(model, "video", None) or VideoConfig())
        saved = dict(stage.named_timm_tensors())
        drawn(model, stage, skip=saved)
        for name, param in saved.items():
            file = folder / (WEIGHTS if where is None else where.get(name, WEIGHTS))
            param.copy_(_read(file, name, param))

    return fill


def mark_of(file: Path) -> str | None:
    """Return why weights are none for stock timm; None where they are, or the file is none of ours.

    Args:
        file: A .safetensors file, or the index of several.
    """
    return _metadata_of(file).get(MARK)


def video_of(file: Path) -> dict[str, Any] | None:
    """Return the choices that a video model was made with; None for an image model, or a file that is none of ours.

    Args:
        file: A .safetensors file, or the index of several.
    """
    choices = _metadata_of(file).get(VIDEO)
    return None if choices is None else json.loads(choices)


def _metadata_of(file: Path) -> dict[str, str]:
    if file.name.endswith(".index.json"):
        file = file.with_name(next(iter(json.loads(file.read_text())["weight_map"].values())))
    if file.suffix != ".safetensors":
        return {}
    with safe_open(file, framework="pt") as tensors:
        return tensors.metadata() or {}


def _read(file: Path, name: str, param: Tensor) -> Tensor:
    try:
        with safe_open(file, framework="pt") as tensors:
            saved = tensors.get_tensor(name)
    except Exception as error:
        raise CheckpointError(
            f"{name} cannot be read from {file}: {error}. Is it the export of another model?"
        ) from error
    if saved.shape != param.shape:
        raise CheckpointError(
            f"{name} is {tuple(saved.shape)} in {file} but {tuple(param.shape)} in the model; "
            f"these are weights of another model. Use the model, data and recipe of the run that wrote them."
        )
    return saved


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    save_file(tensors, path, metadata=metadata)
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)  # safetensors would keep it from everybody else


def _part(all_stages: list[str], name: str) -> str:
    return f"model-{all_stages.index(name) + 1:05d}-of-{len(all_stages):05d}.safetensors"


def _finish(folder: Path, parts: list[Path], metadata: dict[str, str]) -> None:
    if sum(part.stat().st_size for part in parts) <= MAX_SINGLE_FILE_BYTES:
        whole: dict[str, Tensor] = {}
        for part in parts:
            whole |= load_file(part)
        with replacing(folder / WEIGHTS) as unfinished:
            _save(whole, unfinished, metadata)
        for part in parts:
            part.unlink()
        return
    index = {"metadata": {"total_size": 0}, "weight_map": {}}
    for part in parts:
        for name, size in _sizes(part):
            index["weight_map"][name] = part.name
            index["metadata"]["total_size"] += size
    write_atomically(folder / INDEX, json.dumps(index, indent=1))


def _sizes(part: Path) -> Iterator[tuple[str, int]]:
    with safe_open(part, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
            view = tensors.get_slice(name)
            yield name, torch.Size(view.get_shape()).numel() * _BYTES[view.get_dtype()]


_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
