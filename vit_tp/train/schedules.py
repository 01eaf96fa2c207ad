"""DeepSpeed's pipeline engines, one for each schedule, with our clock and our sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from torch import Tensor, nn

from vit_tp.models.stages import require_images
from vit_tp.parallel.collectives import broadcast_from_first_
from vit_tp.sharding.gradients import sum_, sum_partial_

Instructions = dict[type[schedule.PipeInstruction], Callable[..., None]]


class VitEngine(PipelineEngine):
    """A PipelineEngine that keeps the clock of its stages and completes partial gradients once a step."""

    def train_batch(self, data_iter: Iterator | None = None) -> Tensor:
        """Take one optimizer step; return the mean loss over the global batch, equal on every rank."""
        self.module.clock.start_step(self.global_steps, self.grid.data_parallel_id * self.micro_batches)
        loss = super().train_batch(data_iter)
        self.timers(TRAIN_BATCH_TIMER).reset()  # it keeps two device events of every step until it is read
        return loss

    @torch.no_grad()
    def share_buffers_(self) -> None:
        """Give every replica the buffers of the first, as torch's DDP does. Collective over the replicas.

        Each replica's BatchNorm has seen its own micro-batches; an evaluation must not depend on which one a sample
        meets.
        """
        group = self.grid.get_data_parallel_group()
        for stage in self.module.stages:
            for _, tensor in stage.named_timm_tensors():
                if not isinstance(tensor, nn.Parameter):
                    broadcast_from_first_(tensor, group)

    def _exec_reduce_tied_grads(self) -> None:
        super()._exec_reduce_tied_grads()
        held, groups = "_hp_grad" if self.using_bf16_optimizer else "grad", self.module.groups
        sum_partial_(self.module.parameters(), groups.tp_group, lambda p: getattr(p, held))
        sum_(self.module.table_parameters(), groups.pp_group, lambda p: getattr(p, held))

    def _next_batch(self) -> Any:
        batch = super()._next_batch()
        require_images(batch[0], None)  # DeepSpeed would stop with an assertion that names nothing
        return batch

    # The engine looks functions up by instruction, so an override alone would not be called.
    _OURS: Instructions = {schedule.ReduceTiedGrads: _exec_reduce_tied_grads}
    _INSTRUCTION_MAP: Instructions = {**PipelineEngine._INSTRUCTION_MAP, **_OURS}


class FoldedInference(schedule.PipeSchedule):
    """Forward passes alone along DualPipeV's V, of any number of micro-batches.

    DeepSpeed's own takes 2 * stages and more, and only as many as training has: the engine looks for the second chunk's
    slots behind those of a training step. Here a micro-batch moves on by one chunk a tick, and slots are used again.

    Args:
        micro_batches: Of the evaluation.
        stages: Pipeline ranks, P.
        stage_id: This one.
        second: Where the engine looks for the slots of the second chunk; at least 2P.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, second: int) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self.second = second

    def num_pipe_buffers(self) -> int:
        return self.second + 2 * self.stages

    def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
        turn, end = self.stages, 2 * self.stages
        for tick in range(self.micro_batches + end - 1):
            commands: list[schedule.PipeInstruction] = []
            for phase, depth, slot in self._met(tick):
                commands += [schedule.LoadMicroBatch(slot)] if depth == 0 else []
                commands += [schedule.ForwardPass(slot, phase=phase)]
            for phase, depth, slot in self._met(tick):
                commands += [schedule.SendActivation(slot, phase=phase)] if depth + 1 not in (turn, end) else []
            for phase, depth, slot in self._met(tick + 1):
                commands += [schedule.RecvActivation(slot, phase=phase)] if depth not in (0, turn) else []
            yield [*commands, schedule.CommitP2P()]

    def _met(self, tick: int) -> Iterator[tuple[int, int, int]]:
        """Yield (phase, number of chunks before it, slot) of the chunks that have a micro-batch at a tick."""
        for phase, depth in enumerate((self.stage_id, 2 * self.stages - 1 - self.stage_id)):
            if 0 <= tick - depth < self.micro_batches:
                yield phase, depth, phase * self.second + (tick - depth) % (2 * self.stages)


class FoldedEngine(VitEngine, DualPipeVEngine):
    """The same over DeepSpeed's DualPipeV."""

    def _inference_schedule(self, micro_batches: int) -> FoldedInference:
        return FoldedInference(micro_batches, self.num_stages, self.stage_id, self.micro_batches)

    def _exec_backward_pass(self, buffer_id: int, phase: int) -> None:
        if self.pipe_buffers["outputs"][buffer_id].requires_grad:
            super()._exec_backward_pass(buffer_id, phase)
            return
        # All of the first chunk is frozen, while the last, of the same rank, trains: there is nothing to go back to.
        for held in ("inputs", "outputs", "grads"):
            self.pipe_buffers[held][buffer_id] = None

    _OURS: Instructions = {**VitEngine._OURS, schedule.BackwardPass: _exec_backward_pass}
    _INSTRUCTION_MAP: Instructions = {**DualPipeVEngine._INSTRUCTION_MAP, **_OURS}


ENGINES: dict[str, type[VitEngine]] = {"1f1b": VitEngine, "dualpipev": FoldedEngine}
"""What carries out a schedule (config/schedules.py), whose chunks a pipeline of train/pipeline.py holds."""
