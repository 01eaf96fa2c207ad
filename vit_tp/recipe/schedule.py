"""What is the learning rate of a step?

timm's schedules, driven by the number of the optimizer step, so that it is a function of the step alone and a
continued run needs no state. Does not know: epochs other than as a number of steps, losses, DeepSpeed.
"""

from __future__ import annotations

import torch
from timm.scheduler import CosineLRScheduler, StepLRScheduler
from timm.scheduler.scheduler import Scheduler

from vit_tp.config import ScheduleConfig
from vit_tp.errors import ConfigError


def build_schedule(
    optimizer: torch.optim.Optimizer, cfg: ScheduleConfig, steps_per_epoch: int, total_steps: int
) -> Scheduler:
    """Build the schedule; call schedule.step_update(step) before each step, also before step 0.

    The warm-up rises linearly from warmup_lr at step 0 to each group's learning rate. As in timm's scripts the cosine
    runs over all total_steps and the warm-up covers its beginning; min_lr is reached at step total_steps.

    Args:
        optimizer: The optimizer or DeepSpeed's wrapper around it: only param_groups is used. Each group's learning
            rate at this moment is its peak.
        cfg: The schedule group of the recipe.
        steps_per_epoch: Optimiser steps of an epoch.
        total_steps: Optimiser steps of the whole run.

    Raises:
        ConfigError: The schedule's name is not known.
    """
    assert total_steps > 0, total_steps
    common = {
        "warmup_t": round(cfg.warmup_epochs * steps_per_epoch),
        "warmup_lr_init": cfg.warmup_lr,
        "t_in_epochs": False,
    }
    if cfg.name == "cosine":
        return CosineLRScheduler(optimizer, t_initial=total_steps, lr_min=cfg.min_lr, **common)
    if cfg.name == "constant":
        # timm has no constant schedule: a staircase whose steps have no height
        return StepLRScheduler(optimizer, decay_t=total_steps, decay_rate=1.0, **common)
    raise ConfigError(
        f"recipe.schedule.name={cfg.name} is not a schedule that vit_tp knows; it knows cosine and constant. "
        f"Use recipe.schedule.name=cosine."
    )
