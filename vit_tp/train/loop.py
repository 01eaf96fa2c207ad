"""The training loop, read from top to bottom."""

from __future__ import annotations

import time

from vit_tp.train.assemble import Assembly
from vit_tp.train.evaluate import evaluate
from vit_tp.train.recorder import Recorder
from vit_tp.train.replicas import require_equal_replicas


def train(run: Assembly, recorder: Recorder) -> dict[str, float]:
    """Train to the last step; return the figures of the run, the same on every rank. Collective over the world."""
    engine, log = run.engine, run.config.log
    schedule, batches = run.schedule(), run.data.training_batches(0, run.total_steps)
    steps_per_eval = run.data.steps_per_epoch * log.eval_every_epochs
    started, figures = time.perf_counter(), {}

    for step in range(run.total_steps):
        schedule.step_update(step)
        run.arrange_for_(step)
        preparation = run.data.preparations.training(step)
        loss = engine.train_batch(run.feed.step(batches, run.plan.grad_accum_steps, preparation))
        recorder.trained(step, loss, engine.get_lr()[0], engine.get_global_grad_norm())

        done, is_last = step + 1, step + 1 == run.total_steps
        if step % log.every_steps == 0:
            run.data.count_unreadable()
        if is_last or (log.check_replicas_every_steps and done % log.check_replicas_every_steps == 0):
            require_equal_replicas(engine.module, done)
        if is_last or (steps_per_eval and done % steps_per_eval == 0):
            recorder.pause()
            figures = evaluate(run)
            recorder.evaluated(step, figures)

    return {
        "loss": recorder.last_loss,
        **figures,
        "steps": run.total_steps,
        "samples": run.total_steps * run.plan.global_batch_size,
        "unreadable": run.data.count_unreadable(),
        "samples_per_s": recorder.samples_per_s,
        "first_step_s": recorder.first_step_s,
        "train_and_eval_s": time.perf_counter() - started,
    }
