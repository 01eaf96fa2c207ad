"""What a run will be, in lines for a person."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from vit_tp.config import BatchPlan, Config, is_one_model
from vit_tp.config.schema import VideoConfig
from vit_tp.config.sizes import resolution_schedule
from vit_tp.config.types import show
from vit_tp.data.order import steps_per_epoch
from vit_tp.data.spec import DataSpec
from vit_tp.models.build import input_shape
from vit_tp.models.dtypes import DTYPES
from vit_tp.models.stages import count_tokens, num_blocks
from vit_tp.parallel.tokens import shard_length
from vit_tp.parallel.topology import Topology
from vit_tp.plan.limits import GB
from vit_tp.plan.stages import StagePlan, plan_ranks, plan_stages
from vit_tp.sharding.cutting import cutting_of
from vit_tp.sharding.indivisible import describe_kept
from vit_tp.sharding.matches import Match
from vit_tp.sharding.stages import recompute_of_block
from vit_tp.train.fit import Need


def _changed(config: Config) -> str:
    """Return in what a model differs from timm's of that name."""
    kwargs = [f"{name}={show(value)}" for name, value in config.model.kwargs.items() if value is not None]
    return f" with {', '.join(kwargs)}" if kwargs else ""


def _clips(video: VideoConfig) -> Iterator[str]:
    if video.num_frames is not None:
        over_time = f", {video.time_depth} blocks over time" if video.attention == "factorised" else ""
        yield (
            f"clips     {video.num_frames} frames in tubelets of {video.tubelet_size}, {video.attention} attention"
            f"{over_time}, {video.position} positions"
        )


def _held(stages: list[StagePlan]) -> int:
    """Return how many parameters of the whole model one tensor-parallel rank would hold."""
    return sum(stage.num_params for stage in stages) + max(stage.num_table_params for stage in stages)


def _stream(model: nn.Module, config: Config) -> Iterator[str]:
    """Yield what is not as usual between blocks and in their backward."""
    tp, recompute = config.parallel.tp, config.compute.recompute
    if tp == 1 and config.parallel.sequence:
        yield "sequence  no effect: parallel.tp=1 leaves no ranks to divide tokens over"
    if tp == 1 and config.recipe.sync == "partial":
        yield "sync      no effect: parallel.tp=1 leaves nothing to sum"
    if config.parallel.sequence and tp > 1:
        num_tokens = count_tokens(model)[True]
        yield f"sequence  {num_tokens} tokens between blocks, {shard_length(num_tokens, tp)} on each of {tp} ranks"
    if not is_one_model(config):
        yield (
            f"sync      {config.recipe.sync_fraction:g} of the channels are summed over tp={tp}: the weights will run "
            f"on this tp alone and are not exported"
        )
    whole = [i for i in range(num_blocks(model)) if recompute_of_block(recompute, i) == "block"]
    if recompute == "norm_act":
        yield "recompute outputs of norms and activations"
    elif whole:
        yield f"recompute {'all blocks' if len(whole) == num_blocks(model) else 'blocks ' + ', '.join(map(str, whole))}"


def _where(config: Config) -> str:
    return f" in {config.data.root}" if config.data.root else ""


def _sizes(config: Config, model: nn.Module) -> Iterator[str]:
    """Yield what a person should know of sizes: how they change, and what patches leave out."""
    _, _, *_, height, width = input_shape(model, 1)
    schedule = resolution_schedule(config)
    if schedule:
        begun = [] if schedule[0][0] == 0 else [(0, (height, width))]
        sizes = [f"{y} x {x} from epoch {epoch}" for epoch, (y, x) in (*begun, *schedule)]
        yield f"sizes     {', '.join(sizes)}; evaluation at {height} x {width}"
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(patch, tuple) and len(patch) == 2 and (height % patch[0] or width % patch[1]):
        yield (
            f"pixels    patches of {patch[0]} x {patch[1]} leave out the last {height % patch[0]} rows and "
            f"{width % patch[1]} columns of {height} x {width}"
        )


def _evaluation(plan: BatchPlan) -> Iterator[str]:
    rows, views = plan.eval_micro_batch_size, plan.views
    if views > 1 or rows > plan.micro_batch_size:
        each = f", {views} views of each sample" if views > 1 else ""
        unknown = "; what they take is not estimated" if rows > plan.micro_batch_size else ""
        yield f"eval      micro-batches of {rows} rows{each}{unknown}"


def _head(num_classes: int, tp: int) -> str:
    held = -(-num_classes // tp)
    return f"{num_classes} classes cut over tp={tp}: each rank holds {held}, and logits are not gathered"


def _peak(need: Need | str, index: int) -> str:
    return f"; peak {need.peaks[index].peak_bytes / GB:.3g} GB" if isinstance(need, Need) else ""


def _memory(need: Need | str) -> str:
    if isinstance(need, str):
        return need
    room = "" if need.limit is None else f" of {need.room / GB:.3g} GB ({need.limit.describe(need.num_ranks)})"
    return f"tensors of a rank take at most {need.peak_bytes / GB:.3g} GB{room}"


def describe_run(
    config: Config,
    topology: Topology,
    plan: BatchPlan,
    spec: DataSpec,
    model: nn.Module,
    bounds: list[int],
    matches: list[Match],
    need: Need | str,
) -> list[str]:
    """Return the plan of a training, one line for each thing; `need` may say why it is not known."""
    params = sum(p.numel() for p in model.parameters())
    parallel, dtype = config.parallel, DTYPES[config.compute.dtype]
    cutting = cutting_of(config).with_columns(matches, topology.tp)
    stages = plan_stages(model, plan.micro_batch_size, topology.tp, dtype, cutting)
    kept = describe_kept(matches, topology.tp, _held(stages), params)
    steps = steps_per_epoch(spec.num_train, plan.global_batch_size)
    _, *size = input_shape(model, 1)
    return [
        f"model     {config.model.timm}{_changed(config)}: {params / 1e6:.2f} M parameters, "
        f"{num_blocks(model)} blocks, input {' x '.join(map(str, size))}",
        *_clips(config.model.video),
        f"grid      tp={topology.tp} x pp={topology.pp} x dp={topology.dp} = {topology.world_size} processes, "
        f"{config.compute.dtype}" + (f", {parallel.schedule}" if topology.pp > 1 else ""),
        *([f"whole     {kept}"] if kept else []),
        *_stream(model, config),
        *([] if cutting.gather_logits else [f"head      {_head(spec.num_classes, topology.tp)}"]),
        *(
            f"stage {index:<3} {' and '.join(f'{first} .. {last}' for first, last in rank.chunks)}: each rank holds "
            f"{rank.num_params / 1e6:.2f} M parameters and at most {' and '.join(map(str, rank.micro_batches))} "
            f"micro-batches, {rank.activation_bytes / 2**20:.1f} MiB of activations{_peak(need, index)}"
            for index, rank in enumerate(plan_ranks(stages, bounds, plan.grad_accum_steps, parallel.schedule))
        ),
        f"memory    {_memory(need)}",
        f"batch     {plan.global_batch_size} = {plan.micro_batch_size} samples x {plan.grad_accum_steps} micro-batches "
        f"x {plan.dp_size} replicas",
        *_evaluation(plan),
        *_sizes(config, model),
        f"data      {config.data.source}{_where(config)}: {spec.num_train} training and {spec.num_val} validation "
        f"samples, {spec.num_classes} classes, {steps} steps an epoch "
        f"({spec.num_train - steps * plan.global_batch_size} left over)",
        *(f"data      {note}" for note in spec.notes),
    ]
