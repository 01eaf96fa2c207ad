"""Is the data or the model the bottleneck? Measured in the ranks of the run itself, with its own files and model.

Three times the same number of steps: the readers alone, reading and training together as in a run, and training alone
on batches that are there already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain

import torch
import torch.distributed as dist

from vit_tp.config import Config
from vit_tp.data.loader import Batch
from vit_tp.train.assemble import Assembly
from vit_tp.train.communication import stop_communication
from vit_tp.train.rank import RankEnv, join

WARM_UP = 2
"""Steps before the clock starts: the first make worker processes, buffers and optimizer states."""


def total_steps(num_steps: int) -> int:
    """Return how many steps of data a measurement of so many steps takes."""
    return 2 * (WARM_UP + num_steps)


def bench_data_rank(config: Config, env: RankEnv) -> dict[str, float]:
    """Measure as one rank; return the figures, the same on every rank. Collective over the world."""
    run = join(config, env)
    num_steps = config.recipe.max_steps // 2 - WARM_UP
    assert total_steps(num_steps) <= run.total_steps, (num_steps, run.total_steps)
    batches = run.training_batches()
    started = time.perf_counter()
    kept = _draw(run, batches, WARM_UP)
    first_s = _longest(run, time.perf_counter() - started)

    data_s = _timed(run, lambda: _draw(run, batches, num_steps))
    _train(run, batches, WARM_UP)
    waited = run.feed.waited_s
    together_s = _timed(run, lambda: _train(run, batches, num_steps))
    waited_s = _longest(run, run.feed.waited_s - waited)
    again = None if kept is None else chain.from_iterable([kept] * (num_steps // WARM_UP + 1))
    model_s = _timed(run, lambda: _train(run, again, num_steps))
    samples = num_steps * run.plan.global_batch_size
    figures = {
        "first_batches_s": first_s,
        "data_samples_per_s": samples / data_s,
        "together_samples_per_s": samples / together_s,
        "model_samples_per_s": samples / model_s,
        "data_wait": waited_s / together_s,
        "readers": run.plan.dp_size,
        "num_workers": config.data.num_workers,
        "unreadable": run.count_unreadable(),
    }
    stop_communication()
    return figures


def _draw(run: Assembly, batches: Iterator[Batch] | None, num_steps: int) -> list[Batch] | None:
    """Read so many steps and return the last WARM_UP of them, on ranks that read."""
    if batches is None:
        return None
    kept: list[Batch] = []
    for _ in range(num_steps):
        kept += [next(batches) for _ in range(run.plan.grad_accum_steps)]
        del kept[: -WARM_UP * run.plan.grad_accum_steps]
    return kept


def _train(run: Assembly, batches: Iterator[Batch] | None, num_steps: int) -> None:
    run.arrange_for_(0)
    for step in range(num_steps):
        pairs = run.feed.step(batches, run.plan.grad_accum_steps, run.preparations.training(step))
        run.engine.train_batch(pairs)


def _timed(run: Assembly, work: Callable[[], object]) -> float:
    """Return how long something takes on the slowest rank, in seconds."""
    dist.barrier()
    started = time.perf_counter()
    work()
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    return _longest(run, time.perf_counter() - started)


def _longest(run: Assembly, seconds: float) -> float:
    longest = torch.tensor([seconds], dtype=torch.float64, device=run.device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()
