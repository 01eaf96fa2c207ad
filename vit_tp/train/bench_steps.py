"""How many steps of data does a measurement take? Asked in the launching process too, without DeepSpeed.

Does not know: how it is measured (bench.py).
"""

from __future__ import annotations

from vit_tp.config import Config

WARM_UP = 2
"""Steps of training before the clock starts: the first make buffers and optimizer states."""


def total_steps(config: Config, num_steps: int) -> int:
    """Return how many steps of data a measurement of so many steps takes at most: it empties the queue twice."""
    return WARM_UP + 2 * (num_steps + queued_batches(config))


def queued_batches(config: Config) -> int:
    """Return how many micro-batches worker processes may have ready beforehand."""
    return config.data.num_workers * (config.data.prefetch + 1)
