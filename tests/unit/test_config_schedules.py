"""What schedules ask and hold, against DeepSpeed's own schedules; our forward-only one, played through."""

from __future__ import annotations

from collections import defaultdict

import pytest
from deepspeed.runtime.pipe import schedule as upstream

from vit_tp.config.schedules import SCHEDULES
from vit_tp.train.schedules import ENGINES, FoldedInference

DEEPSPEEDS = {"1f1b": upstream.TrainSchedule, "dualpipev": upstream.DualPipeVSchedule}


def alive(commands) -> tuple[list[int], int]:
    """Return the most micro-batches between forward and backward: of each chunk, and of all at one moment."""
    now, most, together = defaultdict(int), defaultdict(int), 0
    for command in (command for step in commands for command in step):
        phase = getattr(command, "phase", 0)
        now[phase] += isinstance(command, upstream.ForwardPass) - isinstance(command, upstream.BackwardPass)
        most[phase], together = max(most[phase], now[phase]), max(together, sum(now.values()))
    return [most[phase] for phase in sorted(most)], together


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7])
def test_ranks_hold_what_deepspeeds_schedule_leaves_between_forward_and_backward(name, pp):
    ours = SCHEDULES[name]
    for parts in {ours.min_micro_batches(pp), 2 * pp, 2 * pp + 1, 5 * pp + 2}:
        for rank in range(pp):
            most, together = alive(DEEPSPEEDS[name](parts, pp, rank))
            assert ours.live_micro_batches(rank, pp, parts) == most
            assert together == sum(most)


@pytest.mark.parametrize("pp", [1, 2, 5])
def test_fewer_micro_batches_than_asked_for_are_what_deepspeed_refuses(pp):
    fewest = SCHEDULES["dualpipev"].min_micro_batches(pp)
    upstream.DualPipeVSchedule(fewest, pp, 0)
    with pytest.raises(ValueError):
        upstream.DualPipeVSchedule(fewest - 1, pp, 0)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 5])
def test_every_chunk_lies_on_one_rank_and_the_last_has_the_loss(name, pp):
    ours = SCHEDULES[name]
    held = [ours.chunks_of(rank, pp) for rank in range(pp)]
    assert sorted(chunk for chunks in held for chunk in chunks) == list(range(ours.num_chunks(pp)))
    assert ours.num_chunks(pp) - 1 in held[ours.loss_rank(pp)]
    assert ours.name == name and name in ENGINES


@pytest.mark.parametrize("pp", [1, 2, 3, 5])
@pytest.mark.parametrize("parts", [1, 2, 4, 11])
def test_forward_alone_takes_every_micro_batch_through_every_chunk_once(parts, pp):
    """Played tick by tick: what is sent is received in the same tick, and no slot is overwritten before it is used."""
    second = 2 * pp
    ranks = [list(FoldedInference(parts, pp, rank, second).steps()) for rank in range(pp)]
    held: list[dict[int, tuple[int, int]]] = [{} for _ in ranks]  # of each rank: slot -> (micro-batch, chunks passed)
    labels: dict[int, int] = {}
    loaded, finished = 0, []
    for tick in range(len(ranks[0])):
        sent, wanted = [], []
        for rank, steps in enumerate(ranks):
            assert isinstance(steps[tick][-1], upstream.CommitP2P)
            for command in steps[tick][:-1]:
                slot, down = command.buffer_id, 1 if getattr(command, "phase", 0) == 0 else -1
                assert slot < second + 2 * pp
                if isinstance(command, upstream.LoadMicroBatch):
                    held[rank][slot] = (loaded, 0)
                    assert slot + second not in labels, "a label is needed still"
                    labels[slot + second] = loaded
                    loaded += 1
                elif isinstance(command, upstream.ForwardPass):
                    micro_batch, passed = held[rank].pop(slot)
                    assert passed == (rank, 2 * pp - 1 - rank)[command.phase]
                    out = (micro_batch, passed + 1)
                    if passed == 2 * pp - 1:
                        assert labels.pop(slot) == micro_batch
                        finished.append(micro_batch)
                    elif passed == pp - 1:
                        held[rank][slot + second] = out  # the engine turns it around
                    else:
                        sent.append((rank, rank + down, out, slot))
                elif isinstance(command, upstream.SendActivation):
                    assert (rank, rank + down, slot) in [(a, b, s) for a, b, _, s in sent]
                else:
                    assert slot not in held[rank]
                    wanted.append((rank - down, rank, slot))
        for source, target, slot in wanted:
            [out] = [out for a, b, out, _ in sent if (a, b) == (source, target)]
            held[target][slot] = out
        assert len(wanted) == len(sent)
    assert loaded == parts and finished == list(range(parts)) and not any(held) and not labels
