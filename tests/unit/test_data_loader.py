"""Batches: the same stream for any grid and any number of workers, and no trace in the global generators."""

import pickle
import random

import numpy as np
import pytest
import torch

from vit_tp.config import BatchPlan, DataConfig
from vit_tp.data.digits import Digits
from vit_tp.data.loader import IGNORE, Loading, eval_batches, train_batches
from vit_tp.data.order import SampleKey
from vit_tp.data.sampling import sample_randomness
from vit_tp.data.spec import Form, Sample
from vit_tp.errors import DataError


class Numbers:
    """Pixels tell (epoch, index, copy) and three random numbers, one of each generator; the target is the index."""

    in_chans, views = 6, 1

    def __init__(self, num_samples, broken=(), split="train", schedule=()):
        self.num_samples, self.broken = num_samples, broken
        self.form = Form(split, 5, (1, 2), schedule=schedule)

    def __len__(self):
        return self.num_samples

    def load(self, key):
        if key.index in self.broken:
            raise OSError("truncated")
        with sample_randomness(self.form.seed, key):
            noise = [random.random(), np.random.rand(), torch.rand(1).item()]
        pixels = torch.tensor([*key, *(int(value * 256) for value in noise)], dtype=torch.uint8)
        return Sample(pixels.view(6, 1, 1).expand(6, *self.form.size_at(key.epoch)), key.index)

    def name(self, index):
        return f"number {index}"


def plan(micro_batch_size, grad_accum_steps, dp_size):
    whole = micro_batch_size * grad_accum_steps * dp_size
    return BatchPlan(micro_batch_size, micro_batch_size, grad_accum_steps, whole, dp_size)


def read(num_samples, batch_plan, dp_rank, first_step=0, last_step=4, num_workers=0, repeats=1, **source):
    return list(
        train_batches(
            Numbers(num_samples, **source),
            plan=batch_plan,
            dp_rank=dp_rank,
            first_step=first_step,
            last_step=last_step,
            repeats=repeats,
            loading=Loading(num_workers),
        )
    )


def evaluated(source, micro_batch_size, dp_rank=0, dp_size=1, num_workers=0):
    count, batches = eval_batches(
        source,
        micro_batch_size=micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        loading=Loading(num_workers),
    )
    batches = list(batches)
    assert count == len(batches)
    return batches


def stream(num_samples, batch_plan, num_workers=0, **options):
    """Put the micro-batches of all dp ranks together again, step by step."""
    dp_size = batch_plan.dp_size
    ranks = [read(num_samples, batch_plan, rank, num_workers=num_workers, **options) for rank in range(dp_size)]
    gas = batch_plan.grad_accum_steps
    steps = len(ranks[0]) // gas
    ordered = [batch for step in range(steps) for rank in ranks for batch in rank[step * gas : (step + 1) * gas]]
    parts = zip(*(batch[:3] for batch in ordered))
    return tuple(map(torch.cat, parts))  # images, targets, seeds


def keys_of(images):
    return [tuple(row) for row in images[:, :3, 0, 0].tolist()]


def test_the_global_stream_is_the_same_for_any_grid_and_any_number_of_workers():
    """P40, P52: only the data-parallel size divides the batch, and only it tells replicas apart."""
    images, targets, seeds = stream(30, plan(12, 1, 1))
    assert images.shape == (48, 6, 1, 2) and targets.dtype == torch.int64
    assert torch.equal(images[:, 1, 0, 1].long(), targets) and len(set(seeds.tolist())) == 48
    for other, workers in ((plan(3, 4, 1), 0), (plan(2, 2, 3), 0), (plan(1, 6, 2), 0), (plan(3, 2, 2), 2)):
        assert all(map(torch.equal, stream(30, other, workers), (images, targets, seeds)))


def test_replicas_are_disjoint_and_an_epoch_sees_each_sample_once():
    batches = [read(24, plan(2, 3, 2), rank, last_step=2) for rank in (0, 1)]
    seen = [{int(target) for batch in rank for target in batch.targets} for rank in batches]
    assert seen[0].isdisjoint(seen[1]) and seen[0] | seen[1] == set(range(24))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_every_epoch_sees_every_sample_once_on_any_number_of_replicas_and_workers(dp_size, num_workers):
    _, targets, _ = stream(24, plan(2, 4 // dp_size, dp_size), num_workers)
    steps = targets.view(4, 8)  # three steps of the first epoch and one of the next
    mine = steps[:3].flatten().tolist()
    assert sorted(mine) == list(range(24)) and steps[3].unique().numel() == 8


def test_a_continued_run_reads_what_the_whole_run_would_have_read():
    whole, late = read(30, plan(3, 2, 2), 1), read(30, plan(3, 2, 2), 1, first_step=3)
    assert len(whole) == 8 and len(late) == 2
    assert all(torch.equal(a.images, b.images) for a, b in zip(whole[6:], late, strict=True))


def test_augmentation_is_new_in_each_epoch():
    first, second = (read(12, plan(12, 1, 1), 0, step, step + 1)[0] for step in (0, 1))
    assert set(first.targets.tolist()) == set(second.targets.tolist())
    noise = {tuple(row) for batch in (first, second) for row in batch.images[:, 3:, 0, 0].tolist()}
    assert len(noise) == 24


def test_repeated_augmentation_is_timms():
    """An epoch of 24 places holds the first 8 samples of its order three times, in turn; copies differ."""
    from timm.data.distributed_sampler import RepeatAugSampler

    images, targets, _ = stream(24, plan(4, 1, 2), repeats=3)
    first = keys_of(images)[:24]
    assert [copy for _, _, copy in first] == [0, 1, 2] * 8 and len(set(first)) == 24
    assert len({tuple(row) for row in images[:24, 3:, 0, 0].tolist()}) == 24
    # timm deals the same sequence of indices to its replicas in turn
    sampler = RepeatAugSampler(range(24), num_replicas=1, rank=0, num_repeats=3, selected_round=0)
    theirs = [index for index, _ in zip(sampler, range(24))]
    assert all(theirs[3 * i] == theirs[3 * i + 1] == theirs[3 * i + 2] for i in range(8))
    assert [targets[3 * i] for i in range(8)] == [targets[3 * i + 2] for i in range(8)]
    again = stream(24, plan(2, 4, 1), num_workers=2, repeats=3)
    assert torch.equal(again[0], images)


def test_the_size_of_an_epoch_is_that_of_its_samples():
    batches = read(24, plan(12, 1, 1), 0, schedule=((1, (3, 4)),))
    assert [tuple(batch.images.shape[-2:]) for batch in batches] == [(1, 2), (1, 2), (3, 4), (3, 4)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_leaves_the_global_generators_alone(num_workers):
    """P46: otherwise the one rank that reads would draw other dropout masks than its tp peers."""

    def states():
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()

    before = states()
    read(30, plan(3, 2, 2), 0, num_workers=num_workers, broken=(3, 4))
    evaluated(Numbers(7, split="val"), 2, num_workers=num_workers)
    assert states() == before


@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_pads_with_zeros_and_ignored_targets(num_workers):
    seen = []
    for rank in (0, 1):
        batches = evaluated(Numbers(9, split="val"), 4, rank, 2, num_workers)
        assert len(batches) == 2
        for batch in batches:
            is_padding = batch.targets == IGNORE
            assert batch.images.shape == (4, 6, 1, 2)
            assert not batch.images[is_padding].any()
            seen += batch.targets[~is_padding].tolist()
    assert sorted(seen) == list(range(9))


def test_views_of_a_sample_are_rows_that_follow_one_another():
    class Twice(Numbers):
        views = 2

        def load(self, key):
            pixels, label = super().load(key)
            return Sample(torch.stack([pixels, pixels + 100]), label)

    batches = evaluated(Twice(5, split="val"), 4)
    assert torch.cat([batch.targets for batch in batches]).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, IGNORE, IGNORE]
    images = torch.cat([batch.images for batch in batches])
    assert torch.equal(images[1:10:2], images[:10:2] + 100)


def test_a_set_smaller_than_a_batch_is_refused_before_anything_is_read():
    with pytest.raises(DataError, match=r"11 samples.*recipe\.global_batch_size=12"):
        train_batches(Numbers(11), plan=plan(12, 1, 1), dp_rank=0, first_step=0, last_step=1)


def test_a_source_travels_to_workers_that_are_started_afresh():
    """P85: a source holds paths and numbers, no reader that a worker would inherit."""
    for source in (Digits(DataConfig(), Form("val", 0, (8, 8))), Numbers(4)):
        again = pickle.loads(pickle.dumps(source))
        assert torch.equal(again.load(SampleKey(0, 3)).pixels, source.load(SampleKey(0, 3)).pixels)
