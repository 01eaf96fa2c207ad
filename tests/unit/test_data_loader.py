"""Batches: the same stream for any grid and any number of workers, and no trace in the global generators."""

import random

import numpy as np
import pytest
import torch

from vit_tp.config import BatchPlan
from vit_tp.data.loader import IGNORE, eval_batches, train_batches
from vit_tp.data.sampling import sample_randomness
from vit_tp.errors import DataError


class Numbers:
    """Pixels tell (epoch, index) and a random number; the target is the index."""

    sample_shape = (2, 1, 2)

    def __init__(self, num_samples, broken=()):
        self.num_samples, self.broken = num_samples, broken

    def __len__(self):
        return self.num_samples

    def load(self, index, epoch):
        if index in self.broken:
            raise OSError("truncated")
        with sample_randomness(0, epoch, index):
            noise = [random.random(), np.random.rand() + torch.rand(1).item()]
        return torch.tensor([[[epoch, index]], [noise]], dtype=torch.float32), index

    def name(self, index):
        return f"number {index}"


def plan(micro_batch_size, grad_accum_steps, dp_size):
    whole = micro_batch_size * grad_accum_steps * dp_size
    return BatchPlan(micro_batch_size, micro_batch_size, grad_accum_steps, whole, dp_size)


def read(num_samples, batch_plan, dp_rank, first_step=0, last_step=4, num_workers=0):
    return list(
        train_batches(
            Numbers(num_samples),
            plan=batch_plan,
            dp_rank=dp_rank,
            seed=5,
            first_step=first_step,
            last_step=last_step,
            num_workers=num_workers,
        )
    )


def stream(num_samples, batch_plan, num_workers=0):
    """Put the micro-batches of all dp ranks together again, step by step."""
    ranks = [read(num_samples, batch_plan, rank, num_workers=num_workers) for rank in range(batch_plan.dp_size)]
    gas = batch_plan.grad_accum_steps
    steps = len(ranks[0]) // gas
    ordered = [batch for step in range(steps) for rank in ranks for batch in rank[step * gas : (step + 1) * gas]]
    return torch.cat([batch.images for batch in ordered]), torch.cat([batch.targets for batch in ordered])


def test_the_global_stream_is_the_same_for_any_grid_and_any_number_of_workers():
    """P40, P52: only the data-parallel size divides the batch, and only it tells replicas apart."""
    images, targets = stream(30, plan(12, 1, 1))
    assert images.shape == (48, 2, 1, 2) and targets.dtype == torch.int64
    assert torch.equal(images[:, 0, 0, 1].long(), targets)
    for other, workers in ((plan(3, 4, 1), 0), (plan(2, 2, 3), 0), (plan(1, 6, 2), 0), (plan(3, 2, 2), 2)):
        other_images, other_targets = stream(30, other, workers)
        assert torch.equal(other_images, images) and torch.equal(other_targets, targets)


def test_replicas_are_disjoint_and_an_epoch_sees_each_sample_once():
    batches = [read(24, plan(2, 3, 2), rank, last_step=2) for rank in (0, 1)]
    seen = [{int(target) for batch in rank for target in batch.targets} for rank in batches]
    assert seen[0].isdisjoint(seen[1]) and seen[0] | seen[1] == set(range(24))


def test_a_continued_run_reads_what_the_whole_run_would_have_read():
    whole, late = read(30, plan(3, 2, 2), 1), read(30, plan(3, 2, 2), 1, first_step=3)
    assert len(whole) == 8 and len(late) == 2
    assert all(torch.equal(a.images, b.images) for a, b in zip(whole[6:], late, strict=True))


def test_augmentation_is_new_in_each_epoch():
    first, second = (read(12, plan(12, 1, 1), 0, step, step + 1)[0] for step in (0, 1))
    assert set(first.targets.tolist()) == set(second.targets.tolist())
    noise = {float(value) for batch in (first, second) for value in batch.images[:, 1, 0, 0]}
    assert len(noise) == 24


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_leaves_the_global_generators_alone(num_workers):
    """P46: otherwise the one rank that reads would draw other dropout masks than its tp peers."""

    def states():
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()

    before = states()
    read(30, plan(3, 2, 2), 0, num_workers=num_workers)
    list(eval_batches(Numbers(7), micro_batch_size=2, dp_rank=0, dp_size=1, num_workers=num_workers)[1])
    assert states() == before


@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_pads_with_zeros_and_ignored_targets(num_workers):
    seen = []
    for rank in (0, 1):
        count, batches = eval_batches(Numbers(9), micro_batch_size=4, dp_rank=rank, dp_size=2, num_workers=num_workers)
        batches = list(batches)
        assert count == len(batches) == 2
        for batch in batches:
            is_padding = batch.targets == IGNORE
            assert batch.images.shape == (4, 2, 1, 2)
            assert not batch.images[is_padding].any()
            seen += batch.targets[~is_padding].tolist()
    assert sorted(seen) == list(range(9))


def test_a_set_smaller_than_a_batch_is_refused_before_anything_is_read():
    with pytest.raises(DataError, match=r"11 samples.*recipe\.global_batch_size=12"):
        train_batches(Numbers(11), plan=plan(12, 1, 1), dp_rank=0, seed=0, first_step=0, last_step=1, num_workers=0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_named(num_workers):
    _, batches = eval_batches(
        Numbers(8, broken=(5,)), micro_batch_size=2, dp_rank=0, dp_size=1, num_workers=num_workers
    )
    with pytest.raises(DataError) as caught:
        list(batches)
    assert str(caught.value).startswith("Sample 5 (number 5) cannot be read: OSError: truncated.")
    assert "Traceback" not in str(caught.value) and "Traceback" in caught.value.__notes__[0]


def test_a_sample_of_another_shape_is_named():
    class Uneven(Numbers):
        def load(self, index, epoch):
            image, target = super().load(index, epoch)
            return (image[:1] if index == 3 else image), target

    _, batches = eval_batches(Uneven(4), micro_batch_size=4, dp_rank=0, dp_size=1, num_workers=0)
    with pytest.raises(DataError, match=r"Sample 3 .*its shape is \(1, 1, 2\), not \(2, 1, 2\)"):
        list(batches)
