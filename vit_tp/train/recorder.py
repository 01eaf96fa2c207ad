"""What a run notes while it trains. Every rank watches its loss and its time; only the writer writes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from torch import Tensor

from vit_tp.config import LogConfig
from vit_tp.report.metrics import MetricsWriter
from vit_tp.report.progress import Progress


class Recorder:
    """Metrics file, TensorBoard and progress bar of one run.

    Args:
        run_dir: The run's folder.
        log: Intervals and switches.
        total_steps: Steps of the whole run.
        steps_per_epoch: Steps of one pass over the training set.
        global_batch_size: Samples of one step.
        console: Where the progress bar goes.
        is_writer: True on the one rank that writes.
        started: `time.perf_counter()` when this rank began.
        waited_s: Says how long this rank has waited for samples so far.
    """

    def __init__(
        self,
        run_dir: Path,
        log: LogConfig,
        total_steps: int,
        steps_per_epoch: int,
        global_batch_size: int,
        console: TextIO,
        is_writer: bool,
        started: float,
        waited_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.log, self.steps_per_epoch, self.global_batch_size = log, steps_per_epoch, global_batch_size
        self.total_steps, self.is_writer = total_steps, is_writer
        self._metrics = MetricsWriter(run_dir, log.tensorboard) if is_writer else None
        self._progress = Progress(total_steps, console, log.progress and is_writer)
        self._since, self._steps_since = time.perf_counter(), 0
        self._train_s, self._steps = 0.0, 0
        self._started = started
        self._waited_s, self._waited_before = waited_s, 0.0
        self.data_wait = 0.0
        self.first_step_s = math.nan
        self.last_loss = math.nan

    @property
    def samples_per_s(self) -> float:
        """Mean throughput over all steps so far, without evaluation."""
        return self.global_batch_size * self._steps / self._train_s if self._train_s else 0.0

    def trained(self, step: int, loss: Tensor, lr: float, grad_norm: Tensor | float) -> None:
        """Note one finished step. Values are read, and the device waited for, only where they are written down.

        Raises:
            FloatingPointError: If the loss is not a number: every further step would be lost time.
        """
        self._steps_since += 1
        is_last = step + 1 == self.total_steps
        if step % self.log.every_steps and not is_last:
            self._progress.update(step + 1)
            return
        self.last_loss, grad_norm = float(loss), float(grad_norm)
        samples_per_s = self._lap()
        if step == 0:
            self.first_step_s = self._since - self._started
        if not math.isfinite(self.last_loss):
            raise FloatingPointError(
                f"the loss of step {step} is {self.last_loss} at learning rate {lr:.4g}; "
                f"training has diverged. Lower recipe.optimizer.lr, lengthen recipe.schedule.warmup_epochs or set "
                f"recipe.clip_grad."
            )
        figures = {"loss": self.last_loss, "lr": lr, "samples_per_s": samples_per_s}
        self._progress.update(step + 1, **figures)
        if self._metrics:
            epoch = (step + 1) / self.steps_per_epoch
            self._metrics.write(step + 1, epoch, **figures, grad_norm=grad_norm, data_wait=self.data_wait)

    def evaluated(self, step: int, figures: dict[str, float]) -> None:
        """Note the figures of an evaluation after a step; its time does not count as training."""
        self._progress.update(step + 1, **figures)
        if self._metrics:
            self._metrics.write(step + 1, (step + 1) / self.steps_per_epoch, **figures)
        self._since, self._waited_before = time.perf_counter(), self._waited_s()

    def pause(self) -> None:
        """Take the time of training up to here, before something else begins."""
        self._lap()

    def close(self) -> None:
        self._progress.close()
        if self._metrics:
            self._metrics.close()

    def _lap(self) -> float:
        """Return samples per second since the last lap."""
        now = time.perf_counter()
        lap_s, steps = now - self._since, self._steps_since
        self._since, self._steps_since = now, 0
        waited_s = self._waited_s()
        self.data_wait, self._waited_before = (waited_s - self._waited_before) / lap_s, waited_s
        self._train_s += lap_s
        self._steps += steps
        return self.global_batch_size * steps / lap_s
