"""Score the validation set: each sample once, on any grid, whatever the batch size."""

from __future__ import annotations

import torch
import torch.distributed as dist

from vit_tp.train.assemble import Assembly


def evaluate(run: Assembly) -> dict[str, float]:
    """Return the task's figures over the whole validation set, the same on every rank. Collective over the world."""
    num_micro_batches = run.data.num_eval_micro_batches
    batches = run.data.validation_batches()
    run.engine.share_buffers_()
    run.task.reset()
    run.arrange_for_(None)
    run.engine.reset_activation_shape()  # micro-batches of evaluation may be larger or smaller than in training
    run.engine.eval_batch(
        run.feed.step(batches, num_micro_batches, run.data.preparations.evaluation()),
        reduce_output=None,  # the mean of means that it offers would weigh padded micro-batches wrongly
        bcast_loss=False,
        num_micro_batches=num_micro_batches,
    )
    run.engine.reset_activation_shape()
    run.engine.module.train()
    sums = run.task.sums.to(run.device)
    if not (run.feed.has_loss and run.groups.place.tp == 0):
        sums = torch.zeros_like(sums)
    dist.all_reduce(sums)
    run.data.count_unreadable()  # too many of them, and the figures are of other data
    return run.task.metrics(sums)
