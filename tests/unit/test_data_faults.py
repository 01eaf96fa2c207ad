"""What cannot be read: replaced in training and left out in evaluation, reported, and too much of it refused."""

import gc
import json
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.unit.test_data_loader import Numbers, evaluated, keys_of, plan, read, stream
from vit_tp.data.deadline import DecodeTimeout, within
from vit_tp.data.faults import FaultLog, load_or_replace
from vit_tp.data.loader import IGNORE, Loading, train_batches
from vit_tp.data.order import SampleKey
from vit_tp.data.spec import Sample
from vit_tp.errors import ConfigError, DataError

BROKEN = (2, 5, 11, 23)


def faults_of(batches):
    return sorted(fault for batch in batches for fault in batch.faults)


def test_a_broken_sample_is_replaced_by_the_same_one_on_any_grid():
    images, targets, seeds = stream(24, plan(12, 1, 1), broken=BROKEN)
    whole, _, _ = stream(24, plan(12, 1, 1))
    wanted, found = keys_of(whole), keys_of(images)
    changed = [place for place in range(48) if wanted[place] != found[place]]
    assert sorted(wanted[place][1] for place in changed) == sorted(2 * BROKEN), "each once an epoch"
    assert not {index for _, index, _ in found} & set(BROKEN)
    assert torch.equal(images[:, 1, 0, 0].long(), targets), "the label is the substitute's"
    for other, workers in ((plan(2, 2, 3), 0), (plan(3, 2, 2), 2)):
        assert all(map(torch.equal, stream(24, other, workers, broken=BROKEN), (images, targets, seeds)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_fault_names_the_sample_the_reason_and_its_substitute(num_workers):
    batches = read(24, plan(12, 1, 1), 0, last_step=2, num_workers=num_workers, broken=BROKEN)
    faults = faults_of(batches)
    assert {fault.index for fault in faults} >= set(BROKEN)
    for fault in faults:
        assert fault.name == f"number {fault.index}" and fault.reason == "OSError: truncated"
        assert fault.replaced_by in {f"number {i}" for i in range(24) if i not in BROKEN}
    assert torch.cat([batch.targets for batch in batches]).min() >= 0


def test_in_evaluation_a_broken_sample_is_left_out_and_reported():
    """P55: it is counted neither as right nor as wrong."""
    batches = evaluated(Numbers(9, broken=(4,), split="val"), 2)
    targets = torch.cat([batch.targets for batch in batches]).tolist()
    assert targets == [0, 1, 2, 3, IGNORE, 5, 6, 7, 8, IGNORE]
    [fault] = faults_of(batches)
    assert (fault.index, fault.replaced_by) == (4, None)


def test_a_sample_of_another_shape_is_a_fault():
    class Uneven(Numbers):
        def load(self, key):
            pixels, label = super().load(key)
            return Sample(pixels[:1] if key.index == 3 else pixels, label)

    loaded = load_or_replace(Uneven(8), SampleKey(0, 3))
    assert loaded.key.index != 3 and "its shape is (1, 1, 2), not (6, 1, 2)" in loaded.faults[0].reason


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_set_of_broken_samples_ends_the_run(num_workers):
    with pytest.raises(DataError, match=r"9 samples in a row cannot be read.*OSError: truncated.*data\.root") as caught:
        read(12, plan(4, 1, 1), 0, num_workers=num_workers, broken=range(12))
    assert "Traceback" not in str(caught.value) and "Traceback" in caught.value.__notes__[0]


@pytest.fixture
def fault():
    [batch] = read(24, plan(24, 1, 1), 0, last_step=1, broken=BROKEN)
    return batch.faults[0]


def test_the_log_has_a_line_for_each_fault_and_stops_at_the_share(tmp_path, capsys, fault):
    """100 samples of a split, 2 % allowed: the third fault is too much. What an earlier run has left is gone."""
    path = tmp_path / "log" / "unreadable.jsonl"
    path.parent.mkdir()
    path.write_text("of an earlier run\n")
    log = FaultLog(path, 0.02, 100)
    log.note(8, (fault, fault, fault._replace(index=1)))  # a copy counts once
    assert log.num_bad == 2
    with pytest.raises(DataError, match=r"3 of 100 samples.*data\.max_bad_fraction=0\.02.*number") as caught:
        log.note(9, (fault._replace(index=2),))
    assert "unreadable_*.jsonl" in str(caught.value) and "use for example data.max_bad_fraction=0.06" in str(
        caught.value
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [fault._replace(index=index)._asdict() for index in (fault.index, fault.index, 1, 2)]
    assert capsys.readouterr().out.count(f"cannot read {fault.name}") == 4


def test_later_the_share_is_of_all_that_was_read(fault):
    log = FaultLog(None, 0.01, 100)
    for epoch in range(10):
        log.note(99, (fault._replace(epoch=epoch),))
    with pytest.raises(DataError, match="11 of 1001"):
        log.note(0, (fault._replace(epoch=10),))
    strict = FaultLog(None, 0.0, 100)
    strict.note(50, ())
    with pytest.raises(DataError, match="1 of 100"):
        strict.note(0, (fault,))


def test_the_share_of_all_readers_is_judged_alike(fault):
    """Two readers with one fault each of a split of 100: too many together at 1 %."""
    log = FaultLog(None, 0.01, 100)
    log.note(20, (fault,))
    log.require(42, 1)
    with pytest.raises(DataError, match="2 of 100"):
        log.require(42, 2)


@pytest.mark.parametrize("error", [ConfigError("no tifffile"), MemoryError("full"), torch.OutOfMemoryError("no room")])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_not_about_the_file_ends_the_run(error, num_workers):
    class Lacking(Numbers):
        def load(self, key):
            raise error

    keys = dict(plan=plan(4, 1, 1), dp_rank=0, first_step=0, last_step=1, loading=Loading(num_workers))
    with pytest.raises((ConfigError, MemoryError, torch.OutOfMemoryError), match=str(error)):
        list(train_batches(Lacking(8), **keys))


def test_decoding_that_hangs_ends_by_its_deadline(tmp_path):
    """A named pipe that nobody writes to: opening it waits in the kernel for ever."""
    stuck = tmp_path / "stuck"
    os.mkfifo(stuck)
    began = time.monotonic()
    with pytest.raises(DecodeTimeout, match=r"longer than data\.timeout_s=0\.2"):
        within(0.2, lambda: stuck.read_bytes())
    assert time.monotonic() - began < 5
    with open(stuck, "wb"):  # lets the thread that was left behind go
        pass


def test_within_hands_on_what_decoding_returns_or_raises():
    assert within(5, lambda: 7) == within(None, lambda: 7) == 7
    for limit in (5, None):
        with pytest.raises(ZeroDivisionError):
            within(limit, lambda: 1 // 0)


def test_the_thread_that_decodes_is_used_again_but_not_after_it_hung(tmp_path):
    def names():
        return {thread.ident for thread in threading.enumerate() if thread.name == "decode"}

    within(5, int)
    used = {within(5, threading.get_ident) for _ in range(5)}
    assert len(used) == 1 and used <= names() and threading.get_ident() not in used
    stuck = tmp_path / "stuck"
    os.mkfifo(stuck)
    with pytest.raises(DecodeTimeout):
        within(0.2, stuck.read_bytes)
    assert within(5, threading.get_ident) not in used
    with open(stuck, "wb"):
        pass


def test_threads_end_with_those_that_they_decode_for():
    before = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: within(5, lambda: time.sleep(0.02) or threading.get_ident()), range(16)))) > 1
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_a_forked_process_decodes_in_a_thread_of_its_own():
    """P85: the parent's is not there, though its name is."""
    within(5, int)
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        assert pool.map(_decoded, range(4), chunksize=1) == [0, 1, 4, 9]


def _decoded(number):
    return within(5, lambda: number * number)
