"""The model as a flat list of stages: embed, one per block, head. One (B, N, C) tensor crosses from each to the next.

Every stage runs timm's own code. The two ends are *shells*: the timm model itself without what other stages hold, so
that `forward_features` of the one gives the tokens before the first block and `norm` and `forward_head` of the other
give the logits. A block stage holds timm's block.

Does not know: ranks, groups, DeepSpeed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vit_tp.errors import ConfigError
from vit_tp.parallel.rng import Clock

EMBED_MODULES = ("patch_embed", "pos_drop", "patch_drop", "norm_pre")
EMBED_PARAMS = ("cls_token", "reg_token", "pos_embed")
HEAD_MODULES = ("norm", "attn_pool", "fc_norm", "head_drop", "head")


class Stage(nn.Module):
    """One element of the pipeline list.

    Args:
        inner: The timm module that it runs.
        name: "embed", "blocks.<i>" or "head": seeds its weights and its random numbers.
        prefix: What stands before the names of `inner` in the timm model.
        clock: Where training stands, for the random numbers; None leaves the default generator alone.
    """

    def __init__(self, inner: nn.Module, name: str, prefix: str, clock: Clock | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.name = name
        self.prefix = prefix
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.clock is None:
            return self.run(x)
        with self.clock.randomness(x.device, self.name):
            return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def named_timm_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this stage's parameters under the names that timm gives them."""
        for name, param in self.inner.named_parameters():
            yield self.prefix + name, param


class EmbedStage(Stage):
    """(B, channels, Y, X) -> (B, N, C)."""

    def run(self, x: Tensor) -> Tensor:
        dtype = next(self.inner.patch_embed.parameters()).dtype  # DeepSpeed does not cast inputs in bf16
        return self.inner.forward_features(x.to(dtype)).contiguous()


class BlockStage(Stage):
    """(B, N, C) -> (B, N, C)."""

    def run(self, x: Tensor) -> Tensor:
        return self.inner(x).contiguous()


class HeadStage(Stage):
    """(B, N, C) -> (B, K) float32: a loss of bf16 logits would be bf16 itself, with two or three digits."""

    def run(self, x: Tensor) -> Tensor:
        logits = self.inner.forward_head(self.inner.norm(x))
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def require_stageable(model: nn.Module) -> None:
    """Raise if a model cannot be laid out as embed, blocks and head.

    Raises:
        ConfigError: For any class but timm's `VisionTransformer`.
    """
    if type(model) is not VisionTransformer:
        raise ConfigError(
            f"{type(model).__module__}.{type(model).__name__} has no stage layout; only timm's VisionTransformer can "
            f"be cut into pipeline stages in this version. Use a model.timm of that class, such as "
            f"vit_base_patch16_224."
        )


def stage_names(model: nn.Module) -> list[str]:
    """Return the names of all stages, in order."""
    return ["embed", *(f"blocks.{i}" for i in range(len(model.blocks))), "head"]


def build_stage(model: nn.Module, name: str, clock: Clock | None = None) -> Stage:
    """Return one stage around parts of the model, sharing its tensors (on meta, or real).

    Args:
        model: The whole timm model.
        name: One of `stage_names`.
        clock: See `Stage`.
    """
    if name == "embed":
        return EmbedStage(_shell(model, EMBED_MODULES, EMBED_PARAMS), name, "", clock)
    if name == "head":
        return HeadStage(_shell(model, HEAD_MODULES, ()), name, "", clock)
    return BlockStage(model.get_submodule(name), name, f"{name}.", clock)


def initialiser(model: nn.Module, stage: Stage) -> nn.Module:
    """Return a timm model whose `init_weights` initialises the parameters of one stage and no other real tensor.

    For a block it is the whole stack with the other blocks on meta, for timm scales by depth and looks at names.
    """
    if not isinstance(stage, BlockStage):
        return stage.inner
    stack = _shell(model, ("blocks",), ())
    index = int(stage.name.rpartition(".")[2])
    stack.blocks = nn.Sequential(*(stage.inner if i == index else block for i, block in enumerate(model.blocks)))
    return stack


def _shell(model: nn.Module, modules: tuple[str, ...], params: tuple[str, ...]) -> nn.Module:
    """Return a shallow copy of the model that holds only the named children and parameters."""
    shell = copy.copy(model)
    shell._parameters = {name: p if name in params else None for name, p in model._parameters.items()}
    shell._modules = {
        name: child if name in modules or child is None else _empty(name) for name, child in model._modules.items()
    }
    if "attn_pool" not in modules and "attn_pool" in shell._modules:
        shell._modules["attn_pool"] = None  # timm asks `is not None`
    return shell


def _empty(name: str) -> nn.Module:
    return nn.Sequential() if name == "blocks" else nn.Identity()
