"""A DeepSpeed engine for a pipeline: its settings and our norm of gradients.

ZeRO-1 always, both partition flags off, gradients accumulated in fp32, a client optimizer: each of these avoids a fault
that gives wrong numbers or a hang (docs/decisions/deepspeed.md).
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from vit_tp.config import OptimizerConfig
from vit_tp.errors import ConfigError
from vit_tp.models.dtypes import cast_buffers_, require_castable
from vit_tp.parallel.groups import limit_waiting
from vit_tp.plan.held import BUCKET_ELEMENTS
from vit_tp.recipe.optimizer import build_optimizer, param_groups
from vit_tp.sharding.gradients import squared_norm
from vit_tp.train.pipeline import VitPipeline
from vit_tp.train.schedules import ENGINES, VitEngine

NEVER = 1_000_000_000
_UNPARTITIONED = {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}


def initialize(
    pipe: VitPipeline,
    config: dict[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    timeout: timedelta | None = None,
) -> VitEngine:
    """Return a DeepSpeed engine for a pipeline, with a gradient norm that is right for every grid.

    Args:
        pipe: From `vit_tp.pipeline`.
        config: A DeepSpeed configuration: batch sizes, `optimizer` ({"type": "AdamW", "params": {...}}),
            `gradient_clipping`, `bf16` or `fp16`. What pipelines and tensor parallelism need is filled in.
        optimizer: A torch optimizer over `pipe.parameters()` in place of the one that `config` names; elementwise, for
            ZeRO shows it flat shards.
        timeout: How long an exchange of any group of this process may wait; None leaves torch's and DeepSpeed's limits.

    Returns:
        The engine; train with `engine.train_batch(iterator of (images, targets))`.

    Raises:
        ConfigError: If the configuration asks for what would give wrong numbers.
    """
    config = complete(config, sum(p.numel() for p in pipe.parameters()))
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(key, {}).get("enabled"):
            require_castable(pipe, dtype)
            cast_buffers_(pipe, dtype)
    named = config.pop("optimizer", None)
    if optimizer is None:
        if named is None:
            raise ConfigError('there is no optimizer. Add "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}.')
        optimizer = _named_optimizer(pipe, named)
    engine = _build(pipe, config, optimizer)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        _require_upstream_norm(engine.optimizer)
        engine.optimizer.scaled_global_norm = types.MethodType(one_exchange_norm, engine.optimizer)
    if timeout is not None:
        limit_waiting(timeout)
    return engine


def evaluator(pipe: VitPipeline, micro_batch_size: int, dtype: torch.dtype) -> VitEngine:
    """Return an engine that only evaluates: no optimizer, no master weights.

    Args:
        pipe: From `vit_tp.pipeline`; its weights are cast in place.
        micro_batch_size: Samples of one forward pass.
        dtype: Of weights and activations.
    """
    config = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": pipe.schedule.min_micro_batches(pipe.groups.topology.pp),  # nothing is stepped
        **_UNPARTITIONED,
    }
    require_castable(pipe, dtype)
    for param in pipe.parameters():
        param.data = param.data.to(dtype)
    cast_buffers_(pipe, dtype)
    return _build(pipe, {**config, "steps_per_print": NEVER}, None)


def _build(pipe: VitPipeline, config: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> VitEngine:
    settings = DeepSpeedConfig(config, pipe.mpu())
    _require_micro_batches(pipe, settings.gradient_accumulation_steps)
    return ENGINES[pipe.schedule.name](
        args=None,
        model=pipe,
        optimizer=optimizer,
        model_parameters=None if optimizer is None else [p for p in pipe.parameters() if p.requires_grad],
        mpu=pipe.mpu(),
        config=config,
        config_class=settings,
        dist_init_required=False,
    )


def _require_micro_batches(pipe: VitPipeline, num_micro_batches: int) -> None:
    pp = pipe.groups.topology.pp
    fewest = pipe.schedule.min_micro_batches(pp)
    if num_micro_batches < fewest:
        raise ConfigError(
            f"gradient_accumulation_steps={num_micro_batches} is too few for schedule={pipe.schedule.name!r}, which "
            f"has {fewest} micro-batches under way on pp={pp} stages. Use gradient_accumulation_steps={fewest} or "
            f"more, or vit_tp.pipeline(..., schedule='1f1b')."
        )


def full_precision(engine: VitEngine) -> Callable[[nn.Parameter], Tensor]:
    """Return what gives this rank's slice of a parameter in fp32: its master copy where there is one.

    The master is assembled over dp, so the returned function is collective over the replicas.
    """
    has_masters = engine.bfloat16_enabled() or engine.fp16_enabled()

    def weights_of(param: nn.Parameter) -> Tensor:
        master = safe_get_full_fp32_param(param) if has_masters and param.requires_grad else None
        return (param.detach() if master is None else master.view(param.shape)).float()

    return weights_of


def complete(config: dict[str, Any], num_params: int) -> dict[str, Any]:
    """Return a DeepSpeed configuration with the settings that this package relies on.

    Raises:
        ConfigError: For every setting in it that contradicts them.
    """
    config = copy.deepcopy(config)
    wanted = {
        ("zero_optimization", "stage"): (1, "other stages clip by a wrong norm or refuse pipelines"),
        ("pipeline", "pipe_partitioned"): (False, "DeepSpeed would treat each rank's activations as a replica"),
        ("pipeline", "grad_partitioned"): (False, "DeepSpeed would treat each rank's gradients as a replica"),
        ("pipeline", "activation_checkpoint_interval"): (
            0,
            "dropout and drop path would draw other masks in recompute",
        ),
        ("zero_optimization", "offload_optimizer"): (None, "the norm would be taken by another path"),
    }
    if config.get("bf16", {}).get("enabled"):
        wanted["data_types", "grad_accum_dtype"] = ("fp32", "bf16 accumulation loses small gradients")
    if config.get("fp16", {}).get("enabled"):
        wanted["data_types", "grad_accum_dtype"] = (
            None,
            "DeepSpeed then holds gradients where partial ones are not found",
        )
    complaints = []
    for (section, key), (value, why) in wanted.items():
        settings = config.setdefault(section, {})
        if settings.get(key, value) != value:
            complaints.append(f"{section}.{key}={settings[key]} cannot be used: {why}. Leave it out.")
        elif value is not None:
            settings[key] = value
    if config.get("wall_clock_breakdown"):
        complaints.append("wall_clock_breakdown=true stops DeepSpeed's pipeline with an assertion. Leave it out.")
    if complaints:
        raise ConfigError(complaints)
    zero = config["zero_optimization"]
    zero.setdefault("reduce_bucket_size", min(max(num_params, 1), BUCKET_ELEMENTS))  # allocated whole, every step
    zero.setdefault("allgather_bucket_size", BUCKET_ELEMENTS)
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("steps_per_print", NEVER)
    return config


def one_exchange_norm(self: DeepSpeedZeroOptimizer, norm_type: float = 2) -> Tensor:
    """Return the norm of all gradients of the model, equal on every rank; inf or NaN gives -1 as DeepSpeed expects.

    DeepSpeed's own makes one exchange per parameter group and hangs where pipeline stages hold different groups.
    """
    grads = [
        (param, grad)
        for i in range(len(self.bit16_groups))
        for grad, param in zip(
            (g for g in self.averaged_gradients[i] if not getattr(g, "_zero_padding", False)),
            self.params_in_partition[i],
        )
    ]
    total = squared_norm(grads, self.model_parallel_rank).to(self.device)
    dist.all_reduce(total, group=self.dp_process_group)
    if self.model_parallel_group is not None:  # the pipe x tp ranks of one replica
        dist.all_reduce(total, group=self.model_parallel_group)
    norm = total.sqrt()
    return torch.where(norm.isfinite(), norm, torch.full_like(norm, -1.0))


def _require_upstream_norm(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Fail loudly if DeepSpeed renames what `one_exchange_norm` replaces and reads."""
    needed = (
        "scaled_global_norm", "bit16_groups", "averaged_gradients", "params_in_partition", "model_parallel_rank",
        "model_parallel_group", "dp_process_group",
    )  # fmt: skip
    missing = [name for name in needed if not hasattr(optimizer, name)]
    if missing:
        raise RuntimeError(f"this DeepSpeed's ZeRO optimizer has no {', '.join(missing)}; use a version from setup.py.")


def _named_optimizer(pipe: VitPipeline, named: dict[str, Any]) -> torch.optim.Optimizer:
    try:
        chosen = OptimizerConfig(name=named["type"].lower(), **named.get("params", {}))
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f'"optimizer": {named} cannot be read ({error}). '
            f'Use {{"type": "AdamW", "params": {{lr, weight_decay, betas, eps or momentum}}}}.'
        ) from error
    groups = param_groups(pipe.named_timm_parameters(), pipe.no_decay, chosen.weight_decay)
    return build_optimizer(chosen, groups)
