"""The model as a flat list of stages: embed, one per block, head. One float tensor crosses from each to the next.

Every stage runs timm's own code in a *shell*: the timm model itself without what other stages hold, so names stay
timm's. The embedding's shell runs forward up to its first block; a block's runs that block with what timm would hand
to it (layouts.py); the head's runs the end of forward. A class without a layout is one stage that runs whole.

Does not know: ranks, groups, DeepSpeed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit_tp.errors import ConfigError
from vit_tp.models.build import input_shape
from vit_tp.models.families import Grid
from vit_tp.models.layouts import Layout, layout_of
from vit_tp.models.shells import InPlaceOfBlocks, ReachedBlocks, build_shell, draw_apart_, owner_of
from vit_tp.parallel.rng import Clock

WHOLE = "model"
TABLES = "tables"


class Stage(nn.Module):
    """One element of the pipeline list.

    Args:
        inner: A shell of the timm model with the parts that this stage holds.
        name: "embed", "blocks.<i>", "head", or "model" where all is one stage.
        clock: Where training stands, for the random numbers; None leaves the default generator alone.
    """

    def __init__(self, inner: nn.Module, name: str, clock: Clock | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.name = name
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        with self.randomness(x, self.name):
            return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def randomness(self, x: Tensor, purpose: str) -> AbstractContextManager[None]:
        """Return a context in which what is random follows from the moment and the purpose alone."""
        if not self.training or self.clock is None:
            return nullcontext()
        return self.clock.randomness(x.device, purpose)

    def named_timm_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this stage's parameters under the names that timm gives them."""
        yield from self.inner.named_parameters()

    def named_timm_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint holds of this stage: parameters, and buffers such as a BatchNorm's statistics."""
        yield from self.inner.state_dict(keep_vars=True).items()


class Tables(Stage):
    """What every block of a model reads: rotary frequencies, shared position biases. No element of the list itself.

    Each pipeline rank holds all of it, and all its block stages the same modules.
    """


class EmbedStage(Stage):
    """(B, channels, Y, X) -> (B, N, C), or of clips (B, channels, T, Y, X).

    Args:
        img_size: Height and width in pixels that the blocks' tables are made for, of clips frames before them; None
            takes any.
    """

    def __init__(self, inner: nn.Module, name: str, clock: Clock | None, img_size: tuple[int, ...] | None) -> None:
        super().__init__(inner, name, clock)
        self.img_size = img_size

    def run(self, x: Tensor) -> Tensor:
        require_images(x, self.img_size)
        try:
            self.inner(x.to(next(self.inner.parameters()).dtype))  # DeepSpeed does not cast inputs in bf16
        except ReachedBlocks as reached:
            return reached.tokens.contiguous()
        raise RuntimeError(f"{type(self.inner).__name__}.forward did not come to its blocks.")


class BlockStage(Stage):
    """(B, N, C) -> (B, N, C).

    Args:
        tables: What every block reads.
        layout: Of the model's class.
        grid: Rows and columns of patches.

    Attributes:
        is_recomputed: Whether autograd keeps the input alone and runs the block once more in backward.
    """

    def __init__(
        self, inner: nn.Module, name: str, clock: Clock | None, tables: Tables, layout: Layout, grid: Grid | None
    ) -> None:
        super().__init__(inner, name, clock)
        self.tables = tables
        self.layout, self.grid = layout, grid
        self.index = int(name.rpartition(".")[2])
        self.is_recomputed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_recomputed or not torch.is_grad_enabled():
            return super().forward(x)
        if self.clock is None:
            return checkpoint(super().forward, x, use_reentrant=False)
        moment, forward = (self.clock.step, self.clock.micro_batch), super().forward

        def at_that_moment(x: Tensor) -> Tensor:
            with self.clock.standing_at(*moment):
                return forward(x)

        # Every draw follows from the moment, so no generator's state need be kept.
        return checkpoint(at_that_moment, x, use_reentrant=False, preserve_rng_state=False)

    @property
    def block(self) -> nn.Module:
        return self.inner.get_submodule(f"{self.layout.blocks}.{self.index}")

    def run(self, x: Tensor) -> Tensor:
        with self.randomness(x, TABLES):  # every block makes the same tables
            arguments = self.layout.arguments(self._around(), self.index, x, self.grid)
        return self.block(**{"x": x, **arguments}).contiguous()

    def _around(self) -> nn.Module:
        """Return what timm's loop over the blocks sees of the model: the tables, and what this stage holds."""
        around, own = (shell.get_submodule(self.layout.owner) for shell in (self.tables.inner, self.inner))
        around = copy.copy(around)
        around._parameters = {**around._parameters, **{n: p for n, p in own._parameters.items() if p is not None}}
        around.training = self.training
        return around


class HeadStage(Stage):
    """(B, N, C) -> (B, K) float32: a loss of bf16 logits would be bf16 itself, with two or three digits.

    Args:
        layout: Of the model's class.
        grid: Rows and columns of patches.
    """

    def __init__(self, inner: nn.Module, name: str, clock: Clock | None, layout: Layout, grid: Grid | None) -> None:
        super().__init__(inner, name, clock)
        self.layout, self.grid = layout, grid

    def run(self, x: Tensor) -> Tensor:
        return _float(self.layout.finish(self.inner, x, self.grid))


class WholeStage(Stage):
    """(B, channels, Y, X) -> (B, K) float32, for a class that has no layout."""

    def run(self, x: Tensor) -> Tensor:
        require_images(x, None)
        return _float(self.inner(x.to(next(self.inner.parameters()).dtype)))


def stage_names(model: nn.Module) -> list[str]:
    """Return the names of all stages, in order."""
    layout = layout_of(model)
    if layout is None:
        return [WHOLE]
    if getattr(model.get_submodule(layout.owner), "grad_checkpointing", False):
        raise ConfigError(
            f"grad_checkpointing is set on this {type(model).__name__}, but stages run their blocks themselves and "
            f"would keep all activations. Leave it out, and use compute.recompute=block."
        )
    return ["embed", *(f"blocks.{i}" for i in range(len(model.get_submodule(layout.blocks)))), "head"]


def count_tokens(model: nn.Module, input_size: Sequence[int] | None = None) -> dict[bool, int]:
    """Return how many tokens the embedding passes on, prefix tokens included: {is training: N}.

    Patch dropout makes them fewer in training.

    Args:
        model: The whole model.
        input_size: (Y, X) or (T, Y, X); None: the model's own.
    """
    stage = copy.deepcopy(build_stage(model, "embed")).to("meta")
    shape = input_shape(model, 1)
    x = torch.empty(shape if input_size is None else (*shape[:2], *input_size), device="meta")
    if input_size is not None and stage.img_size is not None:
        stage.img_size = tuple(input_size)
    return {mode: stage.train(mode)(x).shape[1] for mode in (True, False)}


def num_blocks(model: nn.Module) -> int:
    """Return how many block stages a model has."""
    return max(len(stage_names(model)) - 2, 0)


def build_stage(model: nn.Module, name: str, clock: Clock | None = None, tables: Tables | None = None) -> Stage:
    """Return one stage around parts of the model, sharing its tensors (on meta, or real).

    Args:
        model: The whole timm model.
        name: One of `stage_names`, or "tables".
        clock: See `Stage`.
        tables: For a block, the tables that it shares with others; None builds them.
    """
    layout = layout_of(model)
    if layout is None:
        return WholeStage(copy.copy(model), WHOLE, clock)
    _, _, *img_size = input_shape(model, 1)
    grid = layout.grid(model.get_submodule(layout.owner), tuple(img_size)) if layout.grid else None
    if name == TABLES:
        shell = build_shell(model, layout.tables, layout.owner)
        draw_apart_(owner_of(shell, layout), layout, clock)
        return Tables(shell, name, clock)
    if name == "embed":
        shell = build_shell(model, layout.embed, layout.owner)
        owner_of(shell, layout)._modules["blocks"] = nn.Sequential(InPlaceOfBlocks())
        draw_apart_(owner_of(shell, layout), layout, clock)
        return EmbedStage(shell, name, clock, tuple(img_size) if layout.grid else None)
    if name == "head":
        return HeadStage(build_shell(model, layout.head, layout.owner), name, clock, layout, grid)
    index = int(name.rpartition(".")[2])
    shell = build_shell(model, [path for path, block in layout.of_block(model).items() if block == index], layout.owner)
    only = nn.ModuleList()
    only.add_module(str(index), model.get_submodule(layout.blocks)[index])
    owner_of(shell, layout)._modules["blocks"] = only
    return BlockStage(shell, name, clock, tables or build_stage(model, TABLES, clock), layout, grid)


def require_images(x: object, img_size: tuple[int, ...] | None) -> None:
    """Raise unless x is a batch of images of the size that the stages were laid out for.

    Raises:
        ConfigError: For a dict of patches, or another size.
    """
    if not isinstance(x, Tensor):
        raise ConfigError(
            f"a pipeline was given a {type(x).__name__}; its stages pass on one tensor of one shape, which patches of "
            f"many sizes do not make. Use images of one size, or vit_tp.shard_, which takes NaFlex dicts."
        )
    if img_size is not None and tuple(x.shape[2:]) != img_size:
        raise ConfigError(
            f"images are {' x '.join(map(str, x.shape[2:]))} and the stages were laid out for "
            f"{' x '.join(map(str, img_size))}; the position tables of the blocks would not fit. "
            f"Use images of that size, or another model.img_size."
        )


def _float(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
