"""How a global batch is made of micro-batches, and how evaluation is cut.

Global batch = micro-batch x accumulation x data-parallel replicas; tensor- and pipeline-parallel ranks work on the same
samples and do not count. Does not know: samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from vit_tp.config.limits import VIDEO_SOURCES
from vit_tp.config.schedules import SCHEDULES
from vit_tp.config.schema import Config
from vit_tp.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of one optimizer step, in samples.

    Args:
        micro_batch_size: Samples of one forward pass on one replica.
        eval_micro_batch_size: The same in evaluation.
        grad_accum_steps: Micro-batches of one replica in one step.
        global_batch_size: Samples in one step over all replicas.
        dp_size: Data-parallel replicas.
        views: Rows of a micro-batch that one sample makes in evaluation.
    """

    micro_batch_size: int
    eval_micro_batch_size: int
    grad_accum_steps: int
    global_batch_size: int
    dp_size: int
    views: int = 1


def batch_plan(config: Config, dp_size: int) -> BatchPlan:
    """Divide recipe.global_batch_size over replicas and micro-batches.

    With compute.micro_batch_size=null a replica's share is cut in the largest number of parts up to 2*pp that divides
    it (a pipeline of pp stages is idle for (pp-1)/(parts+pp-1) of a step), and is one part where pp=1. Where the
    schedule needs more it is the smallest number that will do.

    Args:
        config: The whole configuration.
        dp_size: Data-parallel replicas that there really are.

    Raises:
        ConfigError: The batch does not divide, or makes too few micro-batches; names the nearest sizes that do.
    """
    whole, micro = config.recipe.global_batch_size, config.compute.micro_batch_size
    unit = dp_size * (micro or 1)
    if whole < 1 or unit < 1 or whole % unit:
        below, above = whole // max(unit, 1) * unit, -(-whole // max(unit, 1)) * unit
        legal = " or ".join(f"recipe.global_batch_size={size}" for size in (below, above) if size > 0)
        parts = f"parallel.dp={dp_size}" + (f" * compute.micro_batch_size={micro} = {unit}" if micro else "")
        advice = f"Use {legal}" + (_legal_micro(whole, dp_size) if micro else "") + "."
        raise ConfigError(
            f"recipe.global_batch_size={whole} is not a multiple of {parts}; "
            f"every replica takes the same number of whole micro-batches in a step. {advice}"
        )
    share, pp = whole // dp_size, config.parallel.pp
    fewest = SCHEDULES[config.parallel.schedule].min_micro_batches(pp)
    if micro is None:
        most = 2 * pp if pp > 1 else 1
        legal = [parts for parts in range(1, share + 1) if share % parts == 0]
        parts = max(parts for parts in legal if parts <= most)
        micro = share // (parts if parts >= fewest else min((more for more in legal if more >= fewest), default=parts))
    if share // micro < fewest:
        raise ConfigError(_too_few(config, dp_size, share, micro, fewest))
    return BatchPlan(micro, _eval_micro(config, micro), share // micro, whole, dp_size, eval_views(config))


def eval_batch_plan(config: Config, dp_size: int) -> BatchPlan:
    """Cut batches for an evaluation, where no optimizer step asks for a certain size.

    Unlike `batch_plan` it never fails, so that a finished run can be evaluated on a grid whose replicas do not divide
    the batch that it was trained with.

    Args:
        config: Of the run, with the grid of the evaluation.
        dp_size: Data-parallel replicas that there really are.
    """
    micro = config.compute.eval_micro_batch_size or config.compute.micro_batch_size
    micro = micro or max(1, config.recipe.global_batch_size // (2 * config.parallel.pp * dp_size))
    micro = _eval_micro(config, micro)
    return BatchPlan(micro, micro, 1, micro * dp_size, dp_size, eval_views(config))


def eval_views(config: Config) -> int:
    """Return how many clips and crops of a sample an evaluation looks at."""
    return config.data.eval_clips * config.data.eval_crops if config.data.source in VIDEO_SOURCES else 1


def _eval_micro(config: Config, micro: int) -> int:
    """Return the rows of a micro-batch in evaluation: whole samples with all their views."""
    views = eval_views(config)
    return config.compute.eval_micro_batch_size or -(-micro // views) * views


def _too_few(config: Config, dp_size: int, share: int, micro: int, fewest: int) -> str:
    name, pp = config.parallel.schedule, config.parallel.pp
    smaller = [size for size in range(1, micro) if share % size == 0 and share // size >= fewest]
    advice = f"compute.micro_batch_size={smaller[-1]}, or " if smaller else ""
    return (
        f"recipe.global_batch_size={config.recipe.global_batch_size} gives each replica of parallel.dp={dp_size} "
        f"{share // micro} micro-batches of {micro} samples; parallel.schedule={name} has at least {fewest} under way "
        f"on parallel.pp={pp} stages. "
        f"Use {advice}recipe.global_batch_size={micro * fewest * dp_size} or parallel.schedule=1f1b."
    )


def _legal_micro(whole: int, dp_size: int) -> str:
    if whole % dp_size:
        return ""
    sizes = [size for size in range(1, whole // dp_size + 1) if whole // dp_size % size == 0]
    return f", or compute.micro_batch_size={', '.join(map(str, sizes))}"
