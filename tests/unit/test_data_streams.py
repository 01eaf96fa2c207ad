"""Streams over shards: exactly once, the same for any grid and workers, continued anywhere, in bounded memory."""

import gc
import pickle
import random
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_tp.config import BatchPlan
from vit_tp.data.loader import IGNORE, Loading, eval_batches, train_batches
from vit_tp.data.order import SampleKey
from vit_tp.data.sampling import sample_randomness, sample_seed
from vit_tp.data.spec import Form, Sample, StreamSource, Unreadable
from vit_tp.data.stream_order import (
    choose_num_streams,
    cut_pieces,
    epoch_pieces,
    fixed_pieces,
    substitute_order,
    window_edges,
    window_order,
)
from vit_tp.errors import ConfigError, DataError

SIZES = (17, 0, 5, 40, 1, 23, 11)  # 97 samples


class Numbers:
    """Shards of numbers: pixels tell epoch, index, copy and a random number, the target is the index."""

    in_chans = 1

    def __init__(
        self, shard_sizes=SIZES, split="train", seed=5, num_streams=None, shuffle_window=4, broken=(), views=1
    ):
        self.form = Form(split, seed, (2, 2))
        self.shard_sizes, self.num_streams, self.shuffle_window = tuple(shard_sizes), num_streams, shuffle_window
        self.broken, self.views = frozenset(broken), views

    def __len__(self):
        return sum(self.shard_sizes)

    def fetch(self, shard, first, last):
        before = sum(self.shard_sizes[:shard])
        for place in range(first, last):
            index = before + place
            yield Unreadable("it is not there") if index in self.broken and index % 2 else index

    def decode(self, raw, key):
        if raw in self.broken:
            raise OSError("truncated")
        assert raw == key.index
        with sample_randomness(self.form.seed, key):
            noise = random.randrange(256)
        pixels = torch.tensor([[[key.epoch, key.index % 256], [key.copy, noise]]], dtype=torch.uint8)
        return Sample(pixels if self.views == 1 else torch.stack([pixels] * self.views), key.index)

    def name(self, index):
        return f"number {index}"


def plan(micro_batch_size, grad_accum_steps, dp_size):
    whole = micro_batch_size * grad_accum_steps * dp_size
    return BatchPlan(micro_batch_size, micro_batch_size, grad_accum_steps, whole, dp_size)


def read(source, batch_plan, dp_rank, first_step=0, last_step=4, num_workers=0, repeats=1):
    return list(
        train_batches(
            source,
            plan=batch_plan,
            dp_rank=dp_rank,
            first_step=first_step,
            last_step=last_step,
            repeats=repeats,
            loading=Loading(num_workers, 2),
        )
    )


def stream(source, batch_plan, first_step=0, last_step=4, num_workers=0, repeats=1):
    """Put the micro-batches of all dp ranks together again, step by step: images, targets, seeds."""
    ranks = [
        read(source, batch_plan, rank, first_step, last_step, num_workers, repeats)
        for rank in range(batch_plan.dp_size)
    ]
    gas = batch_plan.grad_accum_steps
    assert {len(rank) for rank in ranks} == {gas * (last_step - first_step)}
    ordered = [
        batch
        for step in range(last_step - first_step)
        for rank in ranks
        for batch in rank[step * gas : (step + 1) * gas]
    ]
    assert {len(batch.targets) for batch in ordered} == {batch_plan.micro_batch_size}
    return [torch.cat(parts) for parts in list(zip(*ordered))[:3]]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# the order


sizes = st.lists(st.integers(0, 30), min_size=1, max_size=8)


def places(pieces):
    return [(piece.shard, place) for piece in pieces for place in range(piece.first, piece.last)]


@settings(deadline=None)
@given(sizes=sizes, seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 1000))
def test_an_epoch_visits_each_place_of_each_shard_once(sizes, seed, epoch):
    pieces = epoch_pieces(tuple(sizes), seed, epoch)
    everything = [(shard, place) for shard, size in enumerate(sizes) for place in range(size)]
    assert sorted(places(pieces)) == everything == places(fixed_pieces(sizes))


@settings(deadline=None)
@given(sizes=sizes, data=st.data())
def test_cut_pieces_are_a_slice_of_the_places(sizes, data):
    pieces = epoch_pieces(tuple(sizes), 3, 1)
    first = data.draw(st.integers(0, sum(sizes)))
    last = data.draw(st.integers(first, sum(sizes) + 3))
    assert places(cut_pieces(pieces, first, last)) == places(pieces)[first:last]


@settings(deadline=None)
@given(
    num_samples=st.integers(1, 500), shuffle_window=st.integers(1, 80), num_streams=st.integers(1, 64), data=st.data()
)
def test_windows_cover_a_stream_and_none_is_a_crumb(num_samples, shuffle_window, num_streams, data):
    stream = data.draw(st.integers(0, num_streams - 1))
    edges = window_edges(num_samples, shuffle_window, stream, num_streams)
    lengths = [high - low for low, high in zip(edges, edges[1:], strict=False)]
    assert edges[0] == 0 and edges[-1] == num_samples
    assert min(lengths) >= 1 and max(lengths) <= shuffle_window
    assert min(lengths) >= max(lengths) / 2 - 1.5
    assert len(lengths) <= num_samples / shuffle_window * 2 + 1


def test_streams_begin_their_windows_in_different_steps():
    first = [window_edges(1000, 64, stream, 16)[1] for stream in range(16)]
    assert first == sorted(set(first), reverse=True) and 30 <= first[-1] < first[0] <= 64


def test_orders_differ_between_seeds_epochs_streams_and_windows_and_stay_what_they_are():
    assert len({epoch_pieces(SIZES, seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
    orders = {tuple(window_order(30, *words)) for words in np.ndindex(2, 2, 2, 2)}
    orders |= {tuple(substitute_order(30, 0, SampleKey(epoch, index))) for epoch, index in np.ndindex(2, 2)}
    assert len(orders) == 20
    assert window_order(8, 0, 0, 0, 0) == WINDOW
    assert [tuple(piece) for piece in epoch_pieces((3, 4, 5), 0, 0)] == PIECES


WINDOW = [2, 1, 4, 5, 0, 3, 7, 6]
PIECES = [(0, 2, 3), (2, 0, 5), (1, 0, 4), (0, 0, 2)]


@given(global_batch_size=st.integers(1, 4096), dp_size=st.integers(1, 64), num_streams=st.integers(1, 128) | st.none())
def test_streams_divide_the_batch_and_replicas_divide_the_streams(global_batch_size, dp_size, num_streams):
    try:
        chosen = choose_num_streams(num_streams, global_batch_size, dp_size)
    except ConfigError as error:
        advised = [
            int(word.strip(".").split("=")[1]) for word in str(error).split("Use ")[1].split() if "num_s" in word
        ]
        assert bool(advised) == (global_batch_size % dp_size == 0)
        assert all(choose_num_streams(size, global_batch_size, dp_size) == size for size in advised)
    else:
        assert global_batch_size % chosen == 0 and chosen % dp_size == 0
        assert num_streams in (None, chosen)
    if num_streams is None:
        assert choose_num_streams(None, global_batch_size, 1) <= 64


def test_a_number_of_streams_that_does_not_fit_is_refused_before_anything_is_read():
    with pytest.raises(ConfigError, match=r"data\.num_streams=6 is not a multiple of parallel\.dp=4.*num_streams=4 or"):
        train_batches(Numbers(num_streams=6), plan=plan(3, 2, 4), dp_rank=0, first_step=0, last_step=1)
    with pytest.raises(ConfigError, match=r"=48 \(chosen by recipe\.global_batch_size=96\).*data\.num_streams=32 or"):
        train_batches(Numbers(), plan=plan(3, 1, 32), dp_rank=0, first_step=0, last_step=1)


def test_a_set_smaller_than_a_batch_is_refused_before_anything_is_read():
    with pytest.raises(DataError, match=r"97 samples.*recipe\.global_batch_size=98"):
        train_batches(Numbers(), plan=plan(98, 1, 1), dp_rank=0, first_step=0, last_step=1)


# the stream


def test_the_global_stream_is_the_same_for_any_grid_and_any_number_of_workers():
    """Three epochs of four steps; 24 streams, which replicas and workers share out."""
    source = Numbers()
    whole = stream(source, plan(24, 1, 1), last_step=12)
    images, targets, seeds = whole
    assert images.shape == (288, 1, 2, 2) and images.dtype == torch.uint8 and targets.dtype == torch.int64
    assert torch.equal(images[:, 0, 0, 1].long(), targets)
    assert images[:, 0, 0, 0].tolist() == [epoch for epoch in range(3) for _ in range(96)]
    keys = [SampleKey(int(epoch), int(index)) for epoch, index in images[:, 0, 0]]
    assert seeds.tolist() == [sample_seed(5, key) for key in keys]
    for other in (plan(3, 8, 1), plan(2, 6, 2), plan(12, 1, 2), plan(4, 2, 3), plan(1, 6, 4), plan(2, 1, 12)):
        assert equal(stream(source, other, last_step=12), whole), other
    for other, num_workers in ((plan(8, 3, 1), 3), (plan(4, 3, 2), 2)):
        assert equal(stream(source, other, last_step=12, num_workers=num_workers), whole), (other, num_workers)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("grid", [(24, 1, 1), (3, 8, 1), (2, 6, 2), (12, 1, 2), (4, 2, 3), (1, 6, 4)])
def test_the_global_stream_is_the_same_on_more_grids(grid, num_workers):
    source = Numbers()
    whole = stream(source, plan(24, 1, 1), last_step=12)
    assert equal(stream(source, plan(*grid), last_step=12, num_workers=num_workers), whole)


GRIDS = [
    pytest.param(dp_size, num_workers, marks=() if num_workers in (0, dp_size - 1) else pytest.mark.slow)
    for dp_size in (1, 2, 4)
    for num_workers in (0, 1, 2, 3)
]


@pytest.mark.parametrize(("dp_size", "num_workers"), GRIDS)
def test_an_epoch_sees_each_sample_once_whoever_reads(dp_size, num_workers):
    source = Numbers((30, 2, 40, 24))
    batch_plan = plan(4, 8 // dp_size, dp_size)
    ranks = [read(source, batch_plan, rank, last_step=3, num_workers=num_workers) for rank in range(dp_size)]
    seen = [[int(target) for batch in rank for target in batch.targets] for rank in ranks]
    assert sorted(index for rank in seen for index in rank) == list(range(96))


@settings(deadline=None, max_examples=40)
@given(
    sizes=sizes, global_batch_size=st.integers(1, 24), window=st.integers(1, 9), seed=st.integers(0, 99), data=st.data()
)
def test_any_shards_and_windows_give_different_samples_in_every_epoch(sizes, global_batch_size, window, seed, data):
    if sum(sizes) < global_batch_size:
        return
    divisors = [size for size in range(1, global_batch_size + 1) if global_batch_size % size == 0]
    source = Numbers(sizes, seed=seed, num_streams=data.draw(st.sampled_from(divisors)), shuffle_window=window)
    steps = sum(sizes) // global_batch_size
    _, targets, _ = stream(source, plan(global_batch_size, 1, 1), last_step=2 * steps)
    for epoch in targets.view(2, -1):
        assert len(set(epoch.tolist())) == steps * global_batch_size and set(epoch.tolist()) <= set(range(sum(sizes)))
    first = data.draw(st.integers(0, 2 * steps - 1))
    _, late, _ = stream(source, plan(global_batch_size, 1, 1), first_step=first, last_step=2 * steps)
    assert torch.equal(late, targets[first * global_batch_size :])


def test_one_shard_leaves_out_another_tail_each_epoch():
    source = Numbers((30,))
    _, targets, _ = stream(source, plan(8, 1, 1), last_step=3 * 20)
    dropped = [set(range(30)) - set(epoch.tolist()) for epoch in targets.view(20, 24)]
    assert all(len(tail) == 6 for tail in dropped) and set.union(*dropped) == set(range(30))


def test_seeds_and_epochs_differ_in_order_and_augmentation():
    first, second = (stream(Numbers((64,), seed=seed), plan(16, 1, 1), last_step=8) for seed in (0, 1))
    orders = {tuple(targets.view(2, -1)[epoch].tolist()) for _, targets, _ in (first, second) for epoch in (0, 1)}
    assert len(orders) == 4
    assert len(set(first[2].tolist()) | set(second[2].tolist())) == 256
    noise = [{int(t): int(n) for t, n in zip(targets, images[:, 0, 1, 1])} for images, targets, _ in (first, second)]
    assert noise[0] != noise[1]


def test_a_batch_comes_from_many_shards_and_a_window_is_shuffled():
    source = Numbers((100,) * 16, num_streams=16, shuffle_window=20)
    _, targets, _ = stream(source, plan(16, 1, 1), last_step=20)
    assert all(len(set((step // 100).tolist())) >= 8 for step in targets.view(20, 16))
    jumps = targets.view(20, 16).diff(dim=0)
    assert (jumps == 1).float().mean() < 0.2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_continued_run_reads_what_the_whole_run_would_have_read(num_workers):
    """Also on another grid and with other workers than it began with."""
    source = Numbers()
    images, targets, seeds = stream(source, plan(24, 1, 1), last_step=9)
    for first_step in range(9):
        late = stream(source, plan(6, 2, 2), first_step, 9, num_workers if first_step == 5 else 0)
        assert equal(late, [rows[24 * first_step :] for rows in (images, targets, seeds)])


def test_repeated_augmentation_follows_one_another_and_keeps_the_length_of_an_epoch():
    source = Numbers(num_streams=4)
    whole = stream(source, plan(24, 1, 1), last_step=8, repeats=3)
    images, targets, _ = whole
    assert images[:, 0, 0, 0].tolist() == [0] * 96 + [1] * 96
    for epoch in targets.view(2, 96):
        assert set(Counter(epoch.tolist()).values()) == {3}
    assert torch.equal(images[:, 0, 1, 0].view(-1, 3), torch.tensor([[0, 1, 2]], dtype=torch.uint8).expand(64, 3))
    assert images[:3, 0, 1, 1].unique().numel() == 3
    assert equal(stream(source, plan(4, 3, 2), last_step=8, num_workers=2, repeats=3), whole)
    assert equal(stream(source, plan(24, 1, 1), 3, 8, repeats=3), [rows[72:] for rows in whole])


@settings(deadline=None, max_examples=30)
@given(repeats=st.integers(1, 5), num_streams=st.sampled_from([1, 2, 3, 6, 12]), first=st.integers(0, 7))
def test_copies_that_do_not_fill_a_stream_evenly(repeats, num_streams, first):
    source = Numbers((31, 9), num_streams=num_streams)
    whole = stream(source, plan(12, 1, 1), last_step=8, repeats=repeats)
    for epoch in whole[1][:72].view(2, 36):
        assert max(Counter(epoch.tolist()).values()) <= repeats
    assert equal(stream(source, plan(12, 1, 1), first, 8, repeats=repeats), [rows[12 * first :] for rows in whole])


def test_the_size_of_a_sample_follows_the_epoch():
    class Growing(Numbers):
        def __init__(self):
            super().__init__((24,))
            self.form = Form("train", 5, (2, 2), schedule=((0, (1, 1)), (1, (2, 2))))

        def decode(self, raw, key):
            pixels, label = super().decode(raw, key)
            return Sample(pixels[:, : 1 + key.epoch, : 1 + key.epoch], label)

    shapes = [tuple(batch.images.shape) for batch in read(Growing(), plan(4, 3, 1), 0, last_step=4)]
    assert shapes == [(4, 1, 1, 1)] * 6 + [(4, 1, 2, 2)] * 6


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_leaves_the_global_generators_alone(num_workers):
    def states():
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()

    before = states()
    read(Numbers(broken=(3, 20)), plan(3, 4, 2), 0, num_workers=num_workers)
    validation = Numbers((7,), split="val")
    list(eval_batches(validation, micro_batch_size=2, dp_rank=0, dp_size=1, loading=Loading(num_workers))[1])
    assert states() == before


# evaluation


@pytest.mark.parametrize(("dp_size", "num_workers"), GRIDS)
@pytest.mark.parametrize("num_samples", [1, 9, 97])
def test_evaluation_sees_each_sample_once_in_equal_shares(num_samples, dp_size, num_workers):
    source = Numbers((num_samples - num_samples // 3, 0, num_samples // 3), split="val")
    seen, order = [], []
    for rank in range(dp_size):
        options = {"micro_batch_size": 2, "dp_rank": rank, "dp_size": dp_size}
        length, batches = eval_batches(source, **options, loading=Loading(num_workers))
        batches = list(batches)
        assert length == len(batches) == -(-num_samples // (2 * dp_size))
        order.append([batch.targets.tolist() for batch in batches])
        for images, targets, _, faults in batches:
            is_padding = targets == IGNORE
            assert images.shape == (2, 1, 2, 2) and not images[is_padding].any() and not faults
            assert torch.equal(images[~is_padding][:, 0, 0, 1].long(), targets[~is_padding])
            seen += targets[~is_padding].tolist()
        assert order[-1] == [batch.targets.tolist() for batch in eval_batches(source, **options)[1]]
    assert sorted(seen) == list(range(num_samples))


def test_evaluation_in_several_views_and_with_a_gap():
    source = Numbers((5,), split="val", views=3, broken=(2, 3))
    length, batches = eval_batches(source, micro_batch_size=6, dp_rank=0, dp_size=1)
    batches = list(batches)
    assert length == 3 and [batch.targets.tolist() for batch in batches] == [
        [0, 0, 0, 1, 1, 1],
        [IGNORE] * 6,
        [4, 4, 4, IGNORE, IGNORE, IGNORE],
    ]
    faults = [(fault.name, fault.reason, fault.replaced_by) for batch in batches for fault in batch.faults]
    assert faults == [
        ("number 2", "OSError: truncated", None),
        ("number 3", "ValueError: it is not there", None),
    ]


# faults


def test_what_cannot_be_read_is_replaced_by_another_of_its_window_on_any_grid():
    broken = (3, 4, 20, 33, 60)
    source = Numbers(broken=broken)
    sound, whole = (stream(one, plan(24, 1, 1), last_step=8) for one in (Numbers(), source))
    assert not set(whole[1].tolist()) & set(broken)
    replaced = [int(index) in broken for index in sound[1]]
    assert equal([rows[~torch.tensor(replaced)] for rows in sound], [rows[~torch.tensor(replaced)] for rows in whole])
    assert equal(stream(source, plan(3, 4, 2), last_step=8, num_workers=2), whole)
    faults = [fault for batch in read(source, plan(24, 1, 1), 0, last_step=8) for fault in batch.faults]
    assert {(fault.epoch, fault.index) for fault in faults} == {
        (int(epoch), int(index)) for (epoch, index), bad in zip(sound[0][:, 0, 0], replaced, strict=True) if bad
    }
    for fault in faults:
        assert fault.name == f"number {fault.index}" and int(fault.replaced_by.split()[1]) not in broken
        is_missing = fault.index % 2
        assert fault.reason == ("ValueError: it is not there" if is_missing else "OSError: truncated")
    shared = [read(source, plan(3, 4, 2), rank, last_step=8, num_workers=2) for rank in (0, 1)]
    assert sorted(fault for rank in shared for batch in rank for fault in batch.faults) == sorted(faults)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_window_without_a_good_sample_ends_the_reading_with_a_sentence(num_workers):
    source = Numbers((24,), broken=range(24), shuffle_window=3)
    with pytest.raises(
        DataError, match=r"cannot be read.*data\.root.*[23] samples of a window \(data\.shuffle_window\)"
    ) as caught:
        read(source, plan(6, 1, 1), 0, num_workers=num_workers)
    assert "Traceback" not in str(caught.value) and "Traceback" in caught.value.__notes__[0]


# processes and memory


def test_a_source_is_a_stream_source_and_travels():
    source = pickle.loads(pickle.dumps(Numbers()))
    assert isinstance(source, StreamSource)
    assert equal(stream(source, plan(24, 1, 1)), stream(Numbers(), plan(24, 1, 1)))


class Held:
    """A raw sample that can be counted."""

    alive = 0

    def __init__(self, index):
        self.index = index
        Held.alive += 1
        weakref.finalize(self, Held.forget)

    @staticmethod
    def forget():
        Held.alive -= 1


def test_only_the_windows_of_open_streams_are_held():
    most = []

    class Watched(Numbers):
        def fetch(self, shard, first, last):
            for index in super().fetch(shard, first, last):
                yield Held(index) if index % 10 else Unreadable("missing")

        def decode(self, raw, key):
            most.append(Held.alive)
            return super().decode(raw.index, key)

    gc.collect()
    gc.disable()
    try:
        for _ in train_batches(
            Watched((200, 280), num_streams=8, shuffle_window=5),
            plan=plan(4, 2, 2),
            dp_rank=1,
            first_step=0,
            last_step=40,
        ):
            pass
    finally:
        gc.enable()
    assert 4 * 3 < max(most) <= 4 * 5 + 1
