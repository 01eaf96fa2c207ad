"""What do forward and backward of one stage hold, moment by moment, on one tensor-parallel rank?

Counted by running them on meta. Stages that are alike in everything that memory depends on, as all blocks of a ViT
are, are run once. Does not know: pipelines (peak.py puts stages together), optimizers.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from vit_tp.models.build import input_shape
from vit_tp.models.stages import BlockStage, Stage, build_stage, stage_names
from vit_tp.parallel.groups import StandIn
from vit_tp.plan.live import LiveBytes, fused
from vit_tp.recipe.optimizer import is_frozen, no_decay_names
from vit_tp.sharding.cutting import DEFAULT_CUTTING, Cutting
from vit_tp.sharding.stages import cut_stage_, recompute_of_block

LOSS = "loss"


@dataclass(frozen=True)
class Layout:
    """How a model is cut and run, as far as memory depends on it.

    Args:
        micro_batch_size: Samples of one forward pass, B.
        tp: Ranks that share each weight.
        dtype: Of weights and activations.
        cutting: The choices about the cut.
    """

    micro_batch_size: int
    tp: int = 1
    dtype: torch.dtype = torch.float32
    cutting: Cutting = DEFAULT_CUTTING


@dataclass(frozen=True)
class Tensors:
    """Sizes of the parameters of a stage.

    Args:
        no_decay: Elements of each trainable parameter without weight decay.
        decay: The same of those with.
        frozen: Elements of all that do not train.
        buffer_bytes: Of what is not a parameter.
    """

    no_decay: tuple[int, ...] = ()
    decay: tuple[int, ...] = ()
    frozen: int = 0
    buffer_bytes: int = 0

    @property
    def num_trainable(self) -> int:
        return sum(self.no_decay) + sum(self.decay)

    @property
    def num_params(self) -> int:
        return self.num_trainable + self.frozen


NOTHING = Tensors()


@dataclass(frozen=True)
class StageProfile:
    """Bytes of one micro-batch in one stage. Its input and its output count in none of the figures but their own.

    Args:
        name: Of the stage.
        tensors: What it holds.
        tables: What it shares with the other blocks of its rank.
        input_bytes: Of x.
        output_bytes: Of y.
        forward: The most that is alive in forward, y included.
        saved: What autograd keeps after forward.
        keeps_input: Whether autograd keeps x too.
        keeps_output: Whether it keeps y.
        backward: The most that is alive in backward, where parameters have no gradients before.
        backward_again: The same where they have, which are not counted.
    """

    name: str
    tensors: Tensors
    tables: Tensors
    input_bytes: int
    output_bytes: int
    forward: int
    saved: int
    keeps_input: bool
    keeps_output: bool
    backward: int
    backward_again: int


@dataclass
class Profiler:
    """Profiles the stages of one model, each kind once.

    Args:
        model: A whole timm model on meta; it is left as it is.
        freeze: Shell patterns of parameters that do not train.
        loss_fn: (B, K) logits -> scalar; None takes the cross-entropy of hard targets.
    """

    model: nn.Module
    freeze: Sequence[str] = ()
    loss_fn: Callable[[Tensor], Tensor] | None = None
    _seen: dict[Hashable, tuple[StageProfile, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._no_decay = no_decay_names(self.model)

    def profile(self, layout: Layout, starts: Sequence[int] = (0,)) -> list[StageProfile]:
        """Return the profile of every stage in order, and of the loss.

        Args:
            layout: How they run.
            starts: Indices of the stages that take their input from another pipeline rank, which wants its gradient.
        """
        region = layout.cutting.build_region(StandIn(layout.tp))
        x = torch.empty(input_shape(self.model, layout.micro_batch_size), device="meta")
        profiles = []
        for index, name in enumerate(stage_names(self.model)):
            whole = build_stage(self.model, name)
            tables = whole.tables if isinstance(whole, BlockStage) else None
            kind = recompute_of_block(layout.cutting.recompute, whole.index) if tables is not None else "none"
            x = x.detach().requires_grad_(x.requires_grad or (index > 0 and index in starts))
            trains = tuple(not is_frozen(n, self.freeze) for part in (whole, tables) if part for n in _names(part))
            key = (layout, kind, _kind_of(whole), trains, tuple(x.shape), x.dtype, x.requires_grad)
            if key not in self._seen:
                stage = copy.deepcopy(whole).to(layout.dtype)
                parts = [stage, stage.tables] if isinstance(stage, BlockStage) else [stage]
                for part in parts:
                    cut_stage_(part, region, layout.cutting)
                    for timm_name, param in part.named_timm_parameters():
                        param.requires_grad_(not is_frozen(timm_name, self.freeze))
                self._seen[key] = self._run(stage, x, *map(self._tensors, parts))
            found, x = self._seen[key]
            profiles.append(found if found.name == name else replace(found, name=name))
        key = (LOSS, tuple(x.shape), x.dtype, x.requires_grad)
        if key not in self._seen:
            loss = _Loss(self.loss_fn or _cross_entropy)
            self._seen[key] = self._run(loss, x, NOTHING)
        return [*profiles, self._seen[key][0]]

    def _tensors(self, part: Stage) -> Tensors:
        sizes: dict[bool, list[int]] = {True: [], False: []}
        frozen = 0
        for name, param in part.named_timm_parameters():
            if param.requires_grad:
                sizes[name in self._no_decay].append(param.numel())
            else:
                frozen += param.numel()
        buffers = {id(b): b.numel() * b.element_size() for b in part.inner.buffers()}
        return Tensors(tuple(sizes[True]), tuple(sizes[False]), frozen, sum(buffers.values()))

    def _run(
        self, stage: nn.Module, like: Tensor, own: Tensors, shared: Tensors = NOTHING
    ) -> tuple[StageProfile, Tensor]:
        """Return the profile of a stage that is cut already, and something like its output."""
        held = [stage, stage.tables] if isinstance(stage, BlockStage) else [stage]
        params = [p for part in held for p in part.parameters()]
        known = [*params, *(b for part in held for b in part.buffers())]
        live = LiveBytes([*known, like])
        if isinstance(stage, Stage):
            stage.run = fused(stage.run)  # inside of what a checkpoint runs again
        first = _pass(stage, like, live)
        for param in params:
            if param.grad is not None:
                live.weigh(param.grad, 0)
        again = _pass(stage, like, live)
        profile = StageProfile(
            getattr(stage, "name", LOSS),
            own,
            shared,
            like.numel() * like.element_size(),
            first.output.numel() * first.output.element_size(),
            first.forward,
            first.saved,
            first.keeps_input,
            first.keeps_output,
            first.backward,
            again.backward,
        )
        return profile, first.output


@dataclass
class _Pass:
    forward: int
    saved: int
    keeps_input: bool
    keeps_output: bool
    backward: int
    output: Tensor


def _pass(stage: nn.Module, like: Tensor, live: LiveBytes) -> _Pass:
    """Run one micro-batch forward and backward; what was alive before counts nothing."""
    base = live.now
    with live:
        x = like.clone()  # not a leaf, which autograd would hold anyway
        live.weigh(x, 0)
        input_storage = weakref.ref(x.untyped_storage())
        live.restart()
        y = stage(x)
        del x
        forward = live.peak - base
        live.weigh(y, 0)
        output = torch.empty_like(y, device="meta").requires_grad_(y.requires_grad)
        live.weigh(output, 0)
        output_storage = weakref.ref(y.untyped_storage())
        end = _Gradient.apply(y) if y.requires_grad else None
        del y
        keeps = [storage() is not None for storage in (input_storage, output_storage)]
        saved = live.now - base
        live.restart()
        if end is not None:
            end.backward()
        if like.grad is not None:
            like.grad = None
        return _Pass(forward, saved, *keeps, live.peak - base, output)


class _Gradient(Function):
    """The end of a graph whose gradient nobody but autograd holds."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        ctx.like = y.shape, y.dtype
        return y.new_empty(())

    @staticmethod
    def backward(ctx, _: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device="meta")


class _Loss(nn.Module):
    def __init__(self, loss_fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, logits: Tensor) -> Tensor:
        return self.loss_fn(logits)


def _cross_entropy(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.empty(logits.shape[0], dtype=torch.long, device=logits.device))


def _names(part: Stage) -> Iterator[str]:
    return (name for name, _ in part.named_timm_parameters())


def _kind_of(stage: Stage) -> Hashable:
    """Return what two stages must have in common to hold the same bytes: modules, their settings, their tensors.

    Numbers that are not whole, such as rates of drop path, only count as zero or not.
    """
    shell = stage.block if isinstance(stage, BlockStage) else stage.inner
    modules = tuple((name, type(module), _settings(module)) for name, module in shell.named_modules())
    tensors = [*stage.inner.named_parameters(), *stage.inner.named_buffers()]
    if isinstance(stage, BlockStage):  # names hold the block's number
        tensors += stage.tables.inner.named_parameters()
    return type(stage), modules, tuple((tuple(t.shape), t.dtype) for _, t in tensors)


def _settings(module: nn.Module) -> tuple:
    plain = (bool, int, float, str, tuple, type(None))
    return tuple(
        (key, value if not isinstance(value, float) else bool(value))
        for key, value in sorted(vars(module).items())
        if not key.startswith("_") and isinstance(value, plain) and _is_hashable(value)
    )


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
