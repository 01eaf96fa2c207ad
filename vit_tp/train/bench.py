"""Is the data or the model the bottleneck? Measured in the ranks of the run itself, with its own files and model.

Three times the same number of steps: the readers alone, reading and training together as in a run, and training alone
on batches that are there already.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, repeat

import torch
import torch.distributed as dist

from vit_tp.config import Config
from vit_tp.data.loader import Batch
from vit_tp.train.assemble import Assembly
from vit_tp.train.bench_steps import WARM_UP, queued_batches, total_steps
from vit_tp.train.communication import stop_communication
from vit_tp.train.rank import RankEnv, join


def bench_data_rank(config: Config, env: RankEnv, num_steps: int) -> dict[str, float]:
    """Measure as one rank; return the figures, the same on every rank. Collective over the world."""
    run = join(config, env)
    assert total_steps(config, num_steps) <= run.total_steps, (num_steps, run.total_steps)
    batches = run.data.training_batches(0, run.total_steps)
    queued = queued_batches(config)
    started = time.perf_counter()
    kept = _draw(batches, WARM_UP * run.plan.grad_accum_steps)
    first_s = _longest(run, time.perf_counter() - started)

    # What workers had ready is drawn first: it would be counted as read in no time.
    _draw(batches, queued)
    data_s = _timed(run, lambda: _draw(batches, num_steps * run.plan.grad_accum_steps))
    ready = None if kept is None else chain.from_iterable(repeat(kept))
    _train(run, ready, WARM_UP)
    model_s = _timed(run, lambda: _train(run, ready, num_steps))
    _draw(batches, queued)
    waited = run.feed.waited_s
    together_s = _timed(run, lambda: _train(run, batches, num_steps))
    waited_s = _longest(run, run.feed.waited_s - waited)
    samples = num_steps * run.plan.global_batch_size
    figures = {
        "first_batches_s": first_s,
        "data_samples_per_s": samples / data_s,
        "together_samples_per_s": samples / together_s,
        "model_samples_per_s": samples / model_s,
        "data_wait": waited_s / together_s,
        "readers": run.plan.dp_size,
        "num_workers": config.data.num_workers,
        "unreadable": run.data.count_unreadable(),
    }
    stop_communication()
    return figures


def _draw(batches: Iterator[Batch] | None, count: int) -> list[Batch] | None:
    """Read so many micro-batches and return them, at most those of a few steps, on ranks that read."""
    if batches is None:
        return None
    kept: deque[Batch] = deque(maxlen=WARM_UP)
    for _ in range(count):
        kept.append(next(batches))
    return list(kept)


def _train(run: Assembly, batches: Iterator[Batch] | None, num_steps: int) -> None:
    for step in range(num_steps):
        preparation = run.data.preparations.training(step)
        run.engine.train_batch(run.feed.step(batches, run.plan.grad_accum_steps, preparation))


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
