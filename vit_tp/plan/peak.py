"""How many bytes will each rank hold at most in a training step, and when?

A step is followed as DeepSpeed's PipelineEngine takes it: which buffers it holds, which micro-batches are
alive, what is alive inside the stage that is at work (profiles.py), and what comes on top when gradients are averaged
and weights updated (held.py). Does not know: devices, what a process takes beside its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vit_tp.config.schedules import SCHEDULES
from vit_tp.plan.held import Held, OptimizerCost, held_bytes
from vit_tp.plan.profiles import StageProfile

FORWARD_BACKWARD, REDUCTION, UPDATE = "forward and backward", "averaging gradients", "the optimizer's step"


@dataclass(frozen=True)
class RankPeak:
    """The fullest moment of one pipeline rank, as one of its tensor-parallel ranks.

    Args:
        chunks: Names of the first and the last stage of each run of stages that it holds.
        micro_batches: How many each run holds between forward and backward at most.
        model_bytes: Weights, gradients and optimizer.
        activation_bytes: What else is alive at the fullest moment of forward and backward.
        peak_bytes: The most at any moment.
        moment: Which that is.
    """

    chunks: list[tuple[str, str]]
    micro_batches: list[int]
    model_bytes: int
    activation_bytes: int
    peak_bytes: int
    moment: str


def plan_peaks(
    profiles: Sequence[StageProfile],
    bounds: Sequence[int],
    grad_accum_steps: int,
    dp: int,
    dtype: torch.dtype,
    optimizer: OptimizerCost,
    counts_untouched: bool = True,
    schedule: str = "1f1b",
) -> list[RankPeak]:
    """Return the peak of each pipeline rank.

    Args:
        profiles: Of all stages and of the loss, from `Profiler.profile`.
        bounds: From `models.costs.stage_bounds`.
        grad_accum_steps: Micro-batches of a step.
        dp: Replicas.
        dtype: Of weights.
        optimizer: See `held_bytes`, as `counts_untouched`.
        counts_untouched: Whether memory counts that was allocated and not written to.
        schedule: As the engine's. Where a rank holds two runs of stages, both are taken to be at their fullest at once.
    """
    order = SCHEDULES[schedule]
    pp = (len(bounds) - 1) // order.chunks_per_rank
    peaks = []
    for rank in range(pp):
        runs = [_run(profiles, bounds, chunk) for chunk in order.chunks_of(rank, pp)]
        alive = order.live_micro_batches(rank, pp, grad_accum_steps)
        held = _held([stage for run in runs for stage in run.held], dp, dtype, optimizer, counts_untouched)
        working = sum(
            run.peak(n, grad_accum_steps, held.gradients if index == 0 else 0)
            for index, (run, n) in enumerate(zip(runs, alive))
        )
        buffers = sum(run.buffers(n, grad_accum_steps) + run.left_over(grad_accum_steps) for run, n in zip(runs, alive))
        moments = {
            FORWARD_BACKWARD: held.resident + held.reserved + working,
            REDUCTION: held.resident + buffers + held.reducing,
            UPDATE: held.resident + buffers + held.stepping,
        }
        moment = max(moments, key=moments.get)
        model_bytes = held.resident + held.reserved + held.gradients
        activation_bytes = max(moments[FORWARD_BACKWARD] - model_bytes, 0)
        names = [(run.held[0].name, run.held[-1].name) for run in runs]
        peaks.append(RankPeak(names, alive, model_bytes, activation_bytes, moments[moment], moment))
    return peaks


def _run(profiles: Sequence[StageProfile], bounds: Sequence[int], chunk: int) -> _Run:
    held = list(profiles[bounds[chunk] : bounds[chunk + 1]])
    is_last = chunk == len(bounds) - 2
    return _Run(held + [profiles[-1]] if is_last else held, chunk == 0, is_last)


def _held(
    own: Sequence[StageProfile], dp: int, dtype: torch.dtype, optimizer: OptimizerCost, counts_untouched: bool
) -> Held:
    tables = next((stage.tables for stage in own if stage.tables.num_params or stage.tables.buffer_bytes), None)
    parts = [stage.tensors for stage in own] + ([tables] if tables else [])
    groups = ([n for part in parts for n in part.no_decay], [n for part in parts for n in part.decay])
    frozen, buffer_bytes = (sum(getattr(part, name) for part in parts) for name in ("frozen", "buffer_bytes"))
    return held_bytes(groups, frozen, buffer_bytes, dp, dtype, optimizer, counts_untouched)


@dataclass(frozen=True)
class _Run:
    """The stages of one pipeline rank at work.

    Args:
        stages: In order; on the last rank with the loss.
        is_first: Whether images come in, and no gradient goes back.
        is_last: Whether no gradient comes in.
    """

    stages: list[StageProfile]
    is_first: bool
    is_last: bool

    @property
    def held(self) -> list[StageProfile]:
        """The stages without the loss."""
        return self.stages[:-1] if self.is_last else self.stages

    @property
    def input_bytes(self) -> int:
        return self.stages[0].input_bytes

    @property
    def output_bytes(self) -> int:
        return self.stages[-1].output_bytes

    def buffers(self, alive: int, grad_accum_steps: int) -> int:
        """What lies there all the time: buffers to receive into, and on the first rank images of earlier micro-batches.

        The engine keeps a micro-batch's images until their buffer is needed again, and it has at least two.
        """
        if self.is_first:
            images = min(grad_accum_steps, max(2, alive)) + 1  # one is in the hands of the loader
            return images * self.input_bytes + (0 if self.is_last else self.output_bytes)
        if self.is_last or self.output_bytes <= self.input_bytes:
            return self.input_bytes  # gradients come into the same
        return self.input_bytes + self.output_bytes

    def left_over(self, grad_accum_steps: int) -> int:
        """What the last rank keeps of micro-batches that are done: what it received and its gradient.

        Their logits stay in two buffers until the next ones come, and hold on to the start of their graph.
        """
        return 0 if self.is_first or not self.is_last else 2 * min(grad_accum_steps, 2) * self.input_bytes

    def peak(self, alive: int, grad_accum_steps: int, gradients: int) -> int:
        """Return the most beyond weights and optimizer while micro-batches go forward and backward.

        Args:
            alive: Micro-batches between forward and backward.
            grad_accum_steps: Of a step.
            gradients: Bytes of all gradients.
        """
        own_input = 0 if self.is_first else self.input_bytes  # what was received; forward works on a copy
        own_output = 0 if self.is_last else self.output_bytes
        kept = sum(stage.saved for stage in self.stages) + sum(map(self._stays, range(len(self.stages))))
        waiting = own_input + kept + own_output  # a micro-batch between forward and backward
        forward, first, again = self._moments(gradients)
        left_over = self.left_over(grad_accum_steps)
        forward += left_over
        done = left_over and left_over - 2 * self.input_bytes  # its own place was taken by then
        first, again = (most + own_output + done for most in (first, again))
        others = alive - 1
        moments = [others * waiting + max(forward, first)]
        if grad_accum_steps > 1:
            others_later = min(alive, grad_accum_steps - 1) - 1  # when the second backward pass begins
            moments.append(others_later * waiting + again + gradients)
            if grad_accum_steps > alive:  # the next goes forward with gradients there
                moments.append(others * waiting + forward + gradients)
        return max(moments) + own_input + self.buffers(alive, grad_accum_steps)

    def _moments(self, gradients: int) -> tuple[int, int, int]:
        """Return the most in forward, in a step's first backward, and in a later one beside gradients that are there.

        What was received and the output of the last stage count in none of them.
        """
        forward = first = again = before = 0
        later = sum(stage.tensors.num_trainable for stage in self.stages)
        trained = max(later, 1)
        for index, stage in enumerate(self.stages):
            later -= stage.tensors.num_trainable
            held_by_frames = 0 if index == 0 or self._stays(0) else self.input_bytes
            forward = max(forward, before + held_by_frames + stage.input_bytes + stage.forward)
            before += self._stays(index)
            held = before + (stage.output_bytes if stage.keeps_output else 0)
            first = max(first, held + stage.backward + gradients * later // trained)
            again = max(again, held + stage.backward_again)
            before += stage.saved
        return forward, first, again

    def _stays(self, index: int) -> int:
        """Return the bytes of a stage's input that autograd keeps, for the stage itself or for the one before it."""
        keeps = self.stages[index].keeps_input or (index > 0 and self.stages[index - 1].keeps_output)
        return self.stages[index].input_bytes if keeps else 0
