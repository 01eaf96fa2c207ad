"""In which order does a pipeline go forward and backward, and what does that ask of batches and stages? Integers only.

The list of stages is cut into chunks, runs of neighbours. Under 1F1B pipeline rank r holds chunk r, and the last rank
has the loss. DualPipeV (DeepSeek-V3, arXiv 2412.19437) folds twice as many chunks into a V: rank r holds chunks r and
2*pp-1-r, so micro-batches go out to the last rank and come back, and rank 0 has both the images and the loss.

Does not know: stages, DeepSpeed, who carries a schedule out (train/schedules.py).
"""

from __future__ import annotations


class Schedule:
    """One forward, one backward, then a flush (PipeDream, arXiv 2006.09503). Base of the others.

    Args:
        name: As in parallel.schedule.
    """

    chunks_per_rank = 1

    def __init__(self, name: str) -> None:
        self.name = name

    def num_chunks(self, pp: int) -> int:
        """Return into how many chunks the list of stages is cut."""
        return pp * self.chunks_per_rank

    def chunks_of(self, pp_rank: int, pp: int) -> list[int]:
        """Return which chunks a pipeline rank holds, in the order of a micro-batch's way."""
        return [pp_rank]

    def loss_rank(self, pp: int) -> int:
        """Return the pipeline rank that holds the last chunk."""
        return pp - 1

    def min_micro_batches(self, pp: int) -> int:
        """Return the fewest micro-batches that a step can have."""
        return 1

    def live_micro_batches(self, pp_rank: int, pp: int, grad_accum_steps: int) -> list[int]:
        """Return how many micro-batches each chunk of a rank holds between forward and backward, at most.

        The first rank holds the most: it goes forward pp times before its first gradient comes back.
        """
        return [min(pp - pp_rank, grad_accum_steps)]


class DualPipeV(Schedule):
    """Two chunks on each rank, whose passes fill each other's waiting times."""

    chunks_per_rank = 2

    def chunks_of(self, pp_rank: int, pp: int) -> list[int]:
        return [pp_rank, 2 * pp - 1 - pp_rank]

    def loss_rank(self, pp: int) -> int:
        return 0

    def min_micro_batches(self, pp: int) -> int:
        return 2 * pp  # as many as there are chunks: the schedule's beginning and end take that many apart

    def live_micro_batches(self, pp_rank: int, pp: int, grad_accum_steps: int) -> list[int]:
        """Return the same for both chunks: 2*pp+1 together on every rank, all of them at one moment."""
        return [2 * pp - pp_rank, pp_rank + 1]


SCHEDULES: dict[str, Schedule] = {"1f1b": Schedule("1f1b"), "dualpipev": DualPipeV("dualpipev")}
