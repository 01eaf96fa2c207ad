"""Every sample is seen once, by one replica, in an order that no grid changes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_tp.data.order import (
    PADDING,
    SampleKey,
    epoch_order,
    eval_micro_batches,
    micro_batch_samples,
    step_samples,
    steps_per_epoch,
)
from vit_tp.errors import DataError

sizes = st.integers(1, 12)


@settings(deadline=None)
@given(num_samples=st.integers(1, 300), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 1000))
def test_an_epoch_visits_each_sample_once(num_samples, seed, epoch):
    assert np.array_equal(np.sort(epoch_order(num_samples, seed, epoch)), np.arange(num_samples))


def test_the_order_differs_between_epochs_and_between_seeds():
    orders = {epoch_order(1000, seed, epoch).tobytes() for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_order_is_the_same_in_every_version():
    assert epoch_order(10, seed=0, epoch=0).tolist() == [8, 3, 1, 5, 6, 2, 9, 7, 4, 0]


def test_the_order_cannot_be_changed_by_who_reads_it():
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(10, 0, 0)[0] = 1


@settings(deadline=None)
@given(num_samples=st.integers(1, 200), global_batch_size=st.integers(1, 50), seed=st.integers(0, 9))
def test_the_steps_of_an_epoch_are_full_batches_of_different_samples(num_samples, global_batch_size, seed):
    if num_samples < global_batch_size:
        with pytest.raises(DataError):
            steps_per_epoch(num_samples, global_batch_size)
        return
    steps = steps_per_epoch(num_samples, global_batch_size)
    assert steps == num_samples // global_batch_size
    for epoch in (0, 1):
        batches = [step_samples(epoch * steps + i, num_samples, global_batch_size, seed) for i in range(steps)]
        assert all(len(batch) == global_batch_size for batch in batches)
        keys = [key for batch in batches for key in batch]
        assert len(set(keys)) == len(keys)
        assert {key.epoch for key in keys} == {epoch}
        assert {key.index for key in keys} <= set(range(num_samples))


def test_ten_samples_in_batches_of_four_leave_another_tail_each_epoch():
    """P07: the short last batch never reaches the pipeline, and no sample is left out for good."""
    dropped = set()
    for epoch in range(8):
        seen = {key.index for step in (0, 1) for key in step_samples(2 * epoch + step, 10, 4, seed=0)}
        assert len(seen) == 8
        dropped |= set(range(10)) - seen
    assert len(dropped) > 2


def test_too_small_a_set_is_refused_with_its_numbers():
    with pytest.raises(DataError, match=r"3 samples.*recipe\.global_batch_size=4.*Use recipe\.global_batch_size=3"):
        steps_per_epoch(3, 4)


@settings(deadline=None)
@given(micro_batch_size=sizes, grad_accum_steps=sizes, dp_size=sizes, step=st.integers(0, 5))
def test_any_cut_of_a_step_gives_the_same_stream(micro_batch_size, grad_accum_steps, dp_size, step):
    global_batch_size = micro_batch_size * grad_accum_steps * dp_size
    whole = step_samples(step, 2 * global_batch_size, global_batch_size, seed=3)
    cut = [
        micro_batch_samples(whole, rank * grad_accum_steps + i, micro_batch_size)
        for rank in range(dp_size)
        for i in range(grad_accum_steps)
    ]
    assert [key for micro_batch in cut for key in micro_batch] == whole


def test_a_micro_batch_outside_its_step_is_our_mistake():
    with pytest.raises(AssertionError):
        micro_batch_samples([SampleKey(0, 0)] * 4, 2, 2)


@settings(deadline=None)
@given(num_samples=st.integers(0, 200), dp_size=st.integers(1, 6), micro_batch_size=sizes)
def test_evaluation_scores_each_sample_once_in_equal_shares(num_samples, dp_size, micro_batch_size):
    shares = [eval_micro_batches(num_samples, rank, dp_size, micro_batch_size) for rank in range(dp_size)]
    assert len({len(share) for share in shares}) == 1
    assert all(len(micro_batch) == micro_batch_size for share in shares for micro_batch in share)
    seen = [index for share in shares for micro_batch in share for index in micro_batch if index != PADDING]
    assert sorted(seen) == list(range(num_samples))


def test_twenty_one_samples_over_two_replicas():
    """P55's example: 21 samples, micro-batches of 4."""
    first, second = (eval_micro_batches(21, rank, 2, 4) for rank in (0, 1))
    assert first == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]]
    assert second == [[4, 5, 6, 7], [12, 13, 14, 15], [20, -1, -1, -1]]
