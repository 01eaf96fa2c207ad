"""Does every tensor of a checkpoint go somewhere, and every tensor of the model come from somewhere?

Names and shapes only. Does not know: files, timm's filters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vit_tp.checkpoint.clips import KERNEL, ForClips
from vit_tp.errors import CheckpointError

NAMED_AT_MOST = 10


@dataclass(frozen=True)
class Fitted:
    """A checkpoint that fits a model.

    Args:
        source: Where it came from, for messages.
        weights: Whole tensors under the model's names.
        resized: Shapes in the checkpoint of tensors that have another one in the model.
        computed: Names of the model's whose tensors timm's filter computed from others of the checkpoint.
        remade: Names of the model's that the checkpoint does not fill: of classifiers.
        idle: Names of the checkpoint's that fill nothing, or that went into `computed`.
        clips: What a video model made of an image model's weights; None for other models.
    """

    source: str
    weights: Mapping[str, Tensor]
    resized: Mapping[str, Sequence[int]]
    computed: Sequence[str]
    remade: Sequence[str]
    idle: Sequence[str]
    clips: ForClips | None = None

    def describe(self) -> str:
        """Return one line for a person."""
        resized = [
            f"{name} ({_shape(old)} -> {_shape(self.weights[name].shape)})" for name, old in self.resized.items()
        ]
        loaded = [f"{len(self.weights)} loaded"]
        loaded += [f"resized {_some(resized)}"] if resized else []
        loaded += [f"computed {_some(self.computed)}"] if self.computed else []
        loaded += self._of_clips() if self.clips else []
        parts = [", ".join(loaded)]
        parts += [f"new {_some(_alike(self.clips.new))}"] if self.clips and self.clips.new else []
        parts += [f"re-made {_some(self.remade)}"] if self.remade else []
        ignored = "computed from or ignored" if self.computed else "ignored"
        parts += [f"{ignored} {_some(self.idle)}"] if self.idle else []
        return f"{self.source}: {'; '.join(parts)}"

    def _of_clips(self) -> Iterator[str]:
        if self.clips.inflated:
            yield f"inflated {KERNEL} ({self.clips.inflated}, {_shape(self.weights[KERNEL].shape)})"
        if self.clips.copied:
            origins: dict[str, dict[str, None]] = {}
            for name, origin in self.clips.copied.items():
                origins.setdefault(_any(name), {})[origin.rpartition(".")[0]] = None
            pairs = [
                f"{next(iter(found)) if len(found) == 1 else _any(next(iter(found)) + '.')} to {name}"
                for name, found in origins.items()
            ]
            yield f"copied {_some(pairs)}"


def fit(
    source: str,
    model_name: str,
    file: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    model: nn.Module,
    classifiers: Sequence[str],
    is_strict: bool,
    clips: ForClips | None = None,
) -> Fitted:
    """Compare a checkpoint with a model.

    Args:
        source: Where the checkpoint came from.
        model_name: timm's name of the model.
        file: What lay in the checkpoint.
        weights: The same after timm's filter, under the model's names.
        model: On meta.
        classifiers: Names of the modules that give logits. One that the checkpoint has for another number of classes,
            or not at all, is to be made anew.
        is_strict: False where the model's family says that a pooling that is switched off leaves weights over.
        clips: Of a video model, where the weights came from.

    Raises:
        CheckpointError: Names the tensors that are missing, surplus, or of another shape or type.
    """
    wanted, weights, new = model.state_dict(), dict(weights), clips.new if clips else ()
    remade = [name for head in classifiers for name in _parts_to_make_anew(head, wanted, weights)]
    idle = [name for name in remade if name in weights]
    if not is_strict:
        idle += [name for name in weights if "." in name and getattr(model, name.split(".")[0], model) is None]
    for name in idle:
        del weights[name]
    found = {
        "missing": [name for name in wanted if name not in weights and name not in (*remade, *new)],
        "surplus": [name for name in weights if name not in wanted],
        "of another shape": [
            f"{name} ({_shape(weights[name].shape)} there, {_shape(tensor.shape)} in the model)"
            for name, tensor in wanted.items()
            if name in weights and weights[name].shape != tensor.shape
        ],
        "of another type": [
            f"{name} ({weights[name].dtype} there, {tensor.dtype} in the model)"
            for name, tensor in wanted.items()
            if name in weights and weights[name].is_floating_point() != tensor.is_floating_point()
        ],
    }
    if any(found.values()):
        counts = "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in found.items() if names)
        raise CheckpointError(
            f"{source} does not fit model.timm={model_name}: {counts}. Each tensor must come from somewhere and go "
            f"somewhere. Use the model.timm and model.kwargs that it was saved with, or another model.pretrained."
        )
    return _account(source, file, weights, remade, [*idle, *(clips.idle if clips else ())], clips)


def _parts_to_make_anew(head: str, wanted: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[str]:
    own = [name for name in wanted if name.startswith(f"{head}.")]
    held = [name for name in own if name in weights]
    has_other_classes = all(  # rows are classes; where columns differ too, it is another model
        weights[name].shape[:1] != wanted[name].shape[:1] and weights[name].shape[1:] == wanted[name].shape[1:]
        for name in held
    )
    return own if has_other_classes else []


def _account(
    source: str,
    file: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    remade: list[str],
    idle: list[str],
    clips: ForClips | None,
) -> Fitted:
    """Tell renamed tensors, which lie where they lay in the file, from computed ones."""
    there = dict(_tensors(file))
    addresses = {tensor.data_ptr() for tensor in there.values()}
    used = {tensor.data_ptr() for tensor in weights.values()}
    return Fitted(
        source,
        weights,
        resized={
            name: tuple(there[name].shape)
            for name, tensor in weights.items()
            if name in there and there[name].shape != tensor.shape and not (name == KERNEL and clips and clips.inflated)
        },
        computed=[name for name, t in weights.items() if name not in there and t.data_ptr() not in addresses],
        remade=remade,
        idle=sorted(
            n for n, t in there.items() if n not in remade and (n in idle or not (n in weights or t.data_ptr() in used))
        ),
        clips=clips,
    )


def _tensors(entries: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, entry in entries.items():
        if isinstance(entry, Tensor):
            yield str(name), entry
        elif isinstance(entry, Mapping):  # a wrapper that the filter, not the reader, takes off
            yield from _tensors(entry)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    others = len(names) - NAMED_AT_MOST
    return ", ".join(names[:NAMED_AT_MOST]) + (f" and {others} more" if others > 0 else "")


def _any(name: str) -> str:
    """Return a name with any number in it, and without the tensor's own."""
    return re.sub(r"\.\d+\.", ".*.", name).rpartition(".")[0] or name


def _alike(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(_any, names)))


def _shape(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"
