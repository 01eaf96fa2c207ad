"""Score the validation set: each sample once, on any grid, whatever the batch size."""

from __future__ import annotations

import torch
import torch.distributed as dist

from vit_tp.data.order import eval_micro_batches
from vit_tp.train.assemble import Assembly


def evaluate(run: Assembly) -> dict[str, float]:
    """Return the task's figures over the whole validation set, the same on every rank. Collective over the world."""
    place, plan = run.groups.place, run.plan
    samples = plan.eval_micro_batch_size // plan.views
    num_micro_batches = len(eval_micro_batches(run.spec.num_val, place.dp, plan.dp_size, samples))
    batches = run.validation_batches()
    run.engine.share_buffers_()
    run.task.reset()
    run.arrange_for_(None)
    run.engine.reset_activation_shape()  # micro-batches of evaluation may be larger or smaller than in training
    run.engine.eval_batch(
        run.feed.step(batches, num_micro_batches, run.preparations.evaluation()),
        reduce_output=None,  # the mean of means that it offers would weigh padded micro-batches wrongly
        bcast_loss=False,
        num_micro_batches=num_micro_batches,
    )
    run.engine.reset_activation_shape()
    run.engine.module.train()
    sums = run.task.sums.to(run.device)
    if not (run.feed.has_loss and place.tp == 0):
        sums = torch.zeros_like(sums)
    dist.all_reduce(sums)
    return run.task.metrics(sums)
