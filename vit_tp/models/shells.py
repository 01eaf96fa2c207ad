"""The timm model itself without what other stages hold, so that its own code runs with what is left.

Does not know: which stage holds what (layouts.py), how stages follow one another (stages.py).
"""

from __future__ import annotations

import copy
from collections.abc import Collection

from torch import Tensor, nn

from vit_tp.models.layouts import Layout
from vit_tp.parallel.rng import Clock


class ReachedBlocks(Exception):
    """Ends the embedding's forward with what its first block would have been given."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens


class InPlaceOfBlocks(nn.Module):
    """Stands in the place of the blocks of an embedding's shell."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        raise ReachedBlocks(x)


class _DrawnApart(nn.Module):
    """Patch dropout whose kept patches embedding and blocks draw alike, each for itself."""

    def __init__(self, dropout: nn.Module, clock: Clock | None) -> None:
        super().__init__()
        self.dropout, self.clock = dropout, clock

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.clock is None or not self.training:
            return self.dropout(x)
        with self.clock.randomness(x.device, "patch_drop"):
            return self.dropout(x)


def draw_apart_(owner: nn.Module, layout: Layout, clock: Clock | None) -> None:
    """Let patch dropout keep the same patches wherever it is drawn for one micro-batch."""
    if "patch_drop" in layout.tables and owner._modules.get("patch_drop") is not None:
        owner._modules["patch_drop"] = _DrawnApart(owner.patch_drop, clock)


def owner_of(shell: nn.Module, layout: Layout) -> nn.Module:
    """Return the module that holds the blocks."""
    return shell.get_submodule(layout.owner)


def build_shell(model: nn.Module, paths: Collection[str], owner: str = "") -> nn.Module:
    """Return a shallow copy of a model that holds only the parts at some paths.

    Args:
        model: The model, or a child on the way to the owner of its blocks.
        paths: Parts to keep, from `model`.
        owner: Path of the module that holds the blocks, of which a shell is kept in any case.
    """
    shell = copy.copy(model)
    shell._parameters = {name: p if name in paths else None for name, p in model._parameters.items()}
    shell._buffers = {name: b if name in paths else None for name, b in model._buffers.items()}
    shell._modules = {name: child if name in paths else None for name, child in model._modules.items()}
    if owner:
        below = [path.removeprefix(f"{owner}.") for path in paths if path.startswith(f"{owner}.")]
        shell._modules[owner] = build_shell(model._modules[owner], below)
    return shell
