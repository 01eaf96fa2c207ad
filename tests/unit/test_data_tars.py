"""Samples out of tars: what WebDataset itself reads, at the right place, and what becomes of broken ones."""

import contextlib
import functools
import io
import json
import pickle
import random
import tarfile
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import psutil
import pytest
import torch
import webdataset as wds
from PIL import Image

from vit_tp.config import BatchPlan, DataConfig
from vit_tp.data.loader import IGNORE, Loading, eval_batches, train_batches
from vit_tp.data.order import SampleKey
from vit_tp.data.sampling import sample_randomness
from vit_tp.data.spec import Form, StreamSource, Unreadable
from vit_tp.data.tars import IMAGES, VIDEOS, Tars, describe_image_tars, describe_video_tars
from vit_tp.errors import ConfigError, DataError

SIZES = (7, 12, 1, 9, 11)  # 40 samples
SEED = 3


class SmallImages:
    """PIL decodes, a global generator augments: what any pixel pipeline does, on 4 x 4 pixels."""

    views = 1

    def __init__(self, form):
        self.form = form

    def load(self, file, key):
        with Image.open(file) as image:
            pixels = torch.from_numpy(np.asarray(image.convert("RGB").resize((4, 4), Image.Resampling.NEAREST)).copy())
        pixels = pixels.permute(2, 0, 1)
        if self.form.is_training:
            with sample_randomness(self.form.seed, key):
                pixels[2] = random.randrange(256)
        return pixels


def encoded(index, format="PNG"):
    """An image of one colour that tells its index."""
    file = io.BytesIO()
    Image.new("RGB", (9, 6), (index, 255 - index, 0)).save(file, format)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    index = 0
    for number, size in enumerate(SIZES):
        with wds.TarWriter(str(tmp_path / f"train-{number}.tar")) as writer:
            for _ in range(size):
                writer.write(
                    {"__key__": f"k{index:03d}", "png": encoded(index), "cls": str(index).encode(), "txt": b"-"}
                )
                index += 1
    (tmp_path / "val-0.tar").write_bytes((tmp_path / "train-1.tar").read_bytes())
    return tmp_path


def config(root, **knobs):
    return DataConfig(**{"source": "image_tars", "root": str(root), "shuffle_window": 5, "num_streams": 4, **knobs})


def tars(root, split="train", **knobs):
    form = Form(split, SEED, (4, 4))
    return Tars(config(root, **knobs), form, SmallImages(form), IMAGES)


def plan(micro_batch_size, grad_accum_steps, dp_size):
    whole = micro_batch_size * grad_accum_steps * dp_size
    return BatchPlan(micro_batch_size, micro_batch_size, grad_accum_steps, whole, dp_size)


def read(source, batch_plan=None, first_step=0, last_step=5, num_workers=0):
    """Return images, targets and faults of all ranks, step by step."""
    batch_plan = batch_plan or plan(8, 1, 1)
    ranks = []
    for rank in range(batch_plan.dp_size):
        options = {"dp_rank": rank, "first_step": first_step, "last_step": last_step}
        ranks.append(list(train_batches(source, plan=batch_plan, **options, loading=Loading(num_workers))))
    gas = batch_plan.grad_accum_steps
    steps = range(last_step - first_step)
    ordered = [batch for step in steps for rank in ranks for batch in rank[step * gas : (step + 1) * gas]]
    images, targets, _, faults = zip(*ordered)
    return torch.cat(images), torch.cat(targets), sorted(fault for some in faults for fault in some)


def equal(first, second):
    return torch.equal(first[0], second[0]) and torch.equal(first[1], second[1]) and first[2] == second[2]


def rewrite(path, change):
    """Write a tar anew; `change` sees each sample and returns it, another one, or None to leave it out."""
    samples = list(wds.WebDataset(str(path), shardshuffle=False))
    with wds.TarWriter(str(path)) as writer:
        for sample in samples:
            sample = change(dict(sample))
            if sample is not None:
                writer.write(
                    {name: value for name, value in sample.items() if name in ("__key__", "png", "cls", "jpg")}
                )


# what is read


def test_samples_are_those_that_webdataset_reads_at_their_fixed_number(folder):
    source = tars(folder, "val", val_shards="train-*.tar")
    urls = [str(path) for path in sorted(folder.glob("train-*.tar"))]
    theirs = list(wds.WebDataset(urls, shardshuffle=False).decode("pil").to_tuple("png", "cls", "__key__"))
    assert len(source) == len(theirs) == 40 and source.shard_sizes == SIZES
    index = 0
    for shard, size in enumerate(SIZES):
        for place, raw in enumerate(source.fetch(shard, 0, size)):
            pixels, label = source.decode(raw, SampleKey(0, index))
            image, number, key = theirs[index]
            np.testing.assert_array_equal(
                pixels.permute(1, 2, 0), np.asarray(image.resize((4, 4), Image.Resampling.NEAREST))
            )
            assert label == number == index and raw.name == f"train-{shard}.tar:{key}.png"
            assert source.name(index) == f"train-{shard}.tar:{place}"
            index += 1


@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 12), (3, 4), (5, 12), (11, 12)])
def test_a_part_of_a_shard(folder, first, last):
    labels = [raw.label for raw in tars(folder).fetch(1, first, last)]
    assert labels == [7 + place for place in range(first, last)]


def test_the_stream_of_images_is_the_same_on_any_grid_and_from_any_step(folder):
    whole = read(tars(folder), last_step=10)
    images, targets, faults = whole
    assert torch.equal(images[:, 0, 0, 0].long(), targets) and not faults
    assert [sorted(epoch.tolist()) for epoch in targets.view(2, 40)] == [list(range(40))] * 2
    assert equal(read(tars(folder), plan(1, 4, 2), last_step=10, num_workers=2), whole)
    assert equal(read(tars(folder), plan(2, 1, 4), last_step=10), whole)
    late = read(tars(folder), plan(2, 2, 2), first_step=7, last_step=10, num_workers=1)
    assert equal(late, (images[56:], targets[56:], []))


def test_augmentation_follows_the_fixed_number_not_the_order(folder):
    few, many = (read(tars(folder, num_streams=n, shuffle_window=w)) for n, w in ((1, 40), (8, 2)))
    assert not torch.equal(few[1], many[1])
    assert torch.equal(few[0][few[1].argsort()], many[0][many[1].argsort()])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_over_tars(folder, num_workers):
    seen = []
    for rank in (0, 1):
        source = tars(folder, "val", val_shards="train-*.tar")
        length, batches = eval_batches(
            source, micro_batch_size=3, dp_rank=rank, dp_size=2, loading=Loading(num_workers)
        )
        batches = list(batches)
        assert len(batches) == length == 7
        for images, targets, _, _ in batches:
            assert torch.equal(images[targets != IGNORE][:, 0, 0, 0].long(), targets[targets != IGNORE])
            seen += targets[targets != IGNORE].tolist()
    assert sorted(seen) == list(range(40))


def test_a_source_travels_and_holds_no_open_file(folder):
    source = tars(folder)
    assert isinstance(source, StreamSource)
    copy = pickle.loads(pickle.dumps(source))
    assert equal(read(copy), read(source))


def test_shards_behind_http_and_pipes_give_the_same_stream(folder):
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    whole = read(tars(folder), plan(4, 1, 2))
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for root in (f"http://127.0.0.1:{server.server_port}/", f"pipe:cat {folder}/"):
                source = tars(root, train_shards="train-{0..4}.tar")
                assert equal(read(source, plan(4, 1, 2), num_workers=1), whole), root
        finally:
            server.shutdown()
            thread.join()


def test_a_connection_that_breaks_is_opened_again_where_it_broke(folder, tmp_path):
    """Each time the program gives another 13,000 bytes more, and then fails: a sample has 6,144."""
    script = tmp_path / "flaky.sh"
    script.write_text(
        f"case $1 in *.json) exec cat {folder}/$1 2> /dev/null;; esac\n"
        f"count={tmp_path}/$1.count; echo >> $count; n=$(wc -l < $count)\n"
        f"size=$(wc -c < {folder}/$1); asked=$((n * 13000)); head -c $asked {folder}/$1; [ $asked -ge $size ]\n"
    )
    (folder / "sizes.json").write_text(json.dumps({"train-1.tar": 12}))
    source = tars(f"pipe:sh {script} ", train_shards="train-1.tar", num_classes=40)
    raws = list(source.fetch(0, 0, 12))
    assert [raw.label for raw in raws] == list(range(7, 19))
    assert len((tmp_path / "train-1.tar.count").read_text()) == 6


def test_a_server_that_stops_sending_is_asked_again(folder):
    """The first two connections bring 14,000 and 30,000 bytes and then nothing more: a sample has 6,144."""
    whole, brings, release = (folder / "train-1.tar").read_bytes(), iter((14_000, 30_000)), threading.Event()

    class Stalling(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            if not self.path.endswith("train-1.tar"):
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Length", str(len(whole)))
            self.end_headers()
            sent = next(brings, len(whole))
            self.wfile.write(whole[:sent])
            self.wfile.flush()
            if sent < len(whole):
                release.wait(60)

    (folder / "sizes.json").write_text(json.dumps({"train-1.tar": 12}))
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Stalling, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            root = f"http://127.0.0.1:{server.server_port}/"
            source = tars(root, train_shards="train-1.tar", num_classes=40, timeout_s=2.0)
            begun = time.monotonic()
            assert [raw.label for raw in source.fetch(0, 0, 12)] == list(range(7, 19))
            assert 4 <= time.monotonic() - begun < 20
        finally:
            release.set()
            server.shutdown()
            thread.join()


def sleepers() -> list[psutil.Process]:
    """Children of this process, among whom are other tests' workers, that sleep behind a pipe."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found += [process] if "sleep 600" in " ".join(process.cmdline()) else []
    return found


def test_a_program_that_stops_sending_is_ended_with_its_children(folder):
    (folder / "sizes.json").write_text(json.dumps({"train-1.tar": 12}))
    root = f"pipe:case {{}} in *.json) cat {folder}/{{}};; *) head -c 20000 {folder}/{{}}; sleep 600; echo;; esac"
    source = tars(root, train_shards="train-1.tar", num_classes=40, timeout_s=2.0)
    begun = time.monotonic()
    raws = list(source.fetch(0, 1, 12))
    assert [raw.label for raw in raws[:2]] == [8, 9] and len(raws) == 11
    assert {raw.reason for raw in raws[2:]} == {"the shard breaks off (nothing came for data.timeout_s=2)"}
    assert 4 <= time.monotonic() - begun < 20
    while sleepers() and time.monotonic() - begun < 20:
        time.sleep(0.05)
    assert not sleepers()
    reading = source.fetch(0, 0, 12)  # left early, while the program has nothing to send
    assert next(reading).label == 7
    reading.close()
    assert not sleepers()
    assert time.monotonic() - begun < 40


def test_passing_over_samples_may_take_longer_than_the_deadline(folder):
    """They come slowly but surely, and the first that is wanted only after twice as long."""
    (folder / "sizes.json").write_text(json.dumps({"train-1.tar": 12}))
    part = f"tail -c +$((part*6144+1)) {folder}/{{}} | head -c 6144"
    slowly = f"for part in 0 1 2 3 4 5 6 7 8 9 10 11; do sleep 0.4; {part}; done"
    root = f"pipe:case {{}} in *.json) cat {folder}/{{}};; *) {slowly};; esac"
    source = tars(root, train_shards="train-1.tar", num_classes=40, timeout_s=2.0)
    assert [raw.label for raw in source.fetch(0, 11, 12)] == [18]


# what cannot be read


def test_broken_samples_are_replaced_by_one_of_their_window_and_named(folder):
    sound = read(tars(folder, shuffle_window=10))

    def damage(sample):
        number = int(sample["cls"])
        if number == 8:
            del sample["cls"]
        if number == 10:
            sample["png"] = b"not an image"
        if number == 12:
            sample["cls"] = b"cat"
        if number == 14:
            sample["jpg"] = sample.pop("png")[:40]
        if number == 16:
            del sample["png"]
        if number == 17:
            sample["cls"] = b"-1"
        return sample

    rewrite(folder / "train-1.tar", damage)
    images, targets, faults = read(tars(folder, shuffle_window=10))
    broken = {8, 10, 12, 14, 16, 17}
    is_sound = torch.tensor([int(target) not in broken for target in sound[1]])
    assert torch.equal(images[is_sound], sound[0][is_sound]) and torch.equal(targets[is_sound], sound[1][is_sound])
    assert not set(targets.tolist()) & broken
    assert {(fault.index, fault.name) for fault in faults} == {(index, f"train-1.tar:{index - 7}") for index in broken}
    reasons = {fault.index: fault.reason for fault in faults}
    assert reasons == {
        8: "ValueError: train-1.tar:k008 has no .cls (it has png)",
        10: "UnidentifiedImageError: cannot identify image file train-1.tar:k010.png",
        12: "ValueError: train-1.tar:k012.cls is not a whole number",
        14: reasons[14],
        16: "ValueError: train-1.tar:k016 has no image (it has cls)",
        17: "ValueError: train-1.tar:k017.cls is -1, and classes are 0 .. data.num_classes - 1",
    }
    assert "truncated" in reasons[14].lower() or "k014.jpg" in reasons[14]
    assert equal(read(tars(folder, shuffle_window=10), plan(2, 2, 2), num_workers=1), (images, targets, faults))
    _, batches = eval_batches(tars(folder, "val", val_shards="train-1.tar"), micro_batch_size=4, dp_rank=0, dp_size=1)
    batches = list(batches)
    assert sum(int((batch.targets == IGNORE).sum()) for batch in batches) == 6
    assert {fault.replaced_by for batch in batches for fault in batch.faults} == {None}


def test_a_class_beyond_those_that_were_given_is_a_fault(folder):
    (folder / "sizes.json").write_text(json.dumps({f"train-{i}.tar": size for i, size in enumerate(SIZES)}))
    faults = read(tars(folder, num_classes=39, shuffle_window=10))[2]
    assert [(fault.index, fault.reason.split(", and")[0]) for fault in faults] == [
        (39, "ValueError: train-4.tar:k039.cls is 39")
    ]


def test_samples_that_sizes_json_promises_in_vain_are_faults(folder):
    sizes = {f"train-{i}.tar": size for i, size in enumerate(SIZES)}
    (folder / "sizes.json").write_text(json.dumps({**sizes, "train-2.tar": 3, "train-3.tar": 11}))
    source = tars(folder, shuffle_window=44)
    _, targets, faults = read(source, plan(4, 1, 1), last_step=11)
    assert len(source) == 44
    assert [(fault.index, fault.name) for fault in faults] == [
        (20, "train-2.tar:1"),
        (21, "train-2.tar:2"),
        (31, "train-3.tar:9"),
        (32, "train-3.tar:10"),
    ]
    assert {fault.reason for fault in faults} == {
        "ValueError: the shard ends before place 1",
        "ValueError: the shard ends before place 9",
        "ValueError: the shard ends before place 10",
    }
    assert len(targets) == 44 and len(set(targets.tolist())) == 40


def test_a_shard_that_shrank_after_it_was_counted(folder):
    source = tars(folder)
    path = folder / "train-1.tar"
    with tarfile.open(path) as tar:
        seventh = tar.getmembers()[21]
    path.write_bytes(path.read_bytes()[: seventh.offset_data + 1])
    raws = list(source.fetch(1, 2, 12))
    assert [raw.label for raw in raws[:5]] == list(range(9, 14))
    assert [type(raw) for raw in raws[5:]] == [Unreadable] * 5
    assert "breaks off (ReadError: unexpected end of data)" in raws[5].reason
    path.unlink()
    [raw] = source.fetch(1, 2, 3)
    assert "FileNotFoundError" in raw.reason


def test_every_sample_that_is_counted_of_a_cut_shard_is_read(folder):
    path = folder / "train-1.tar"
    data = path.read_bytes()
    for length in range(512, len(data), 512):
        path.write_bytes(data[:length])
        source = tars(folder, train_shards="train-[01].tar")
        expected = list(range(7, 7 + source.shard_sizes[1]))
        assert [raw.label for raw in source.fetch(1, 0, source.shard_sizes[1])] == expected, length
        assert source.shard_sizes[1] - min(length // 6144, 12) in (0, 1)  # the text comes last, and may be lacking


def test_two_members_of_one_name_and_two_images(folder):
    path = folder / "train-2.tar"
    with tarfile.open(path, "w") as tar:
        for name, payload in (
            ("a.cls", b"1"),
            ("a.cls", b"2"),
            ("b.PNG", encoded(5)),
            ("b.jpg", b"-"),
            ("b.cls", b"5"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    twice, other = tars(folder).fetch(2, 0, 2)
    assert twice.reason == "train-2.tar:a has two members .cls"
    assert other[1:] == (encoded(5), 5)


def test_a_set_of_unreadable_images_ends_the_reading(folder):
    for path in folder.glob("train-*.tar"):
        rewrite(path, lambda sample: {**sample, "png": b"no"})
    with pytest.raises(DataError, match=r"samples in a row cannot be read.*train-\d\.tar:\d+ \(UnidentifiedImageError"):
        read(tars(folder), num_workers=1)


def test_videos_are_members_of_another_kind(tmp_path):
    for name in ("train-0.tar", "val-0.tar"):
        with wds.TarWriter(str(tmp_path / name)) as writer:
            writer.write({"__key__": "0", "jpg": b"thumbnail", "mp4": b"film", "cls": b"4"})
            writer.write({"__key__": "1", "jpg": b"thumbnail", "cls": b"4"})
    data = config(tmp_path, source="video_tars")
    spec = describe_video_tars(data)
    assert (spec.num_train, spec.num_val, spec.num_classes, spec.is_video) == (2, 2, 5, True)
    form = Form("train", 0, (4, 4), num_frames=2)
    film, missing = Tars(data, form, SmallImages(form), VIDEOS).fetch(0, 0, 2)
    assert film.payload == b"film" and film.name == "train-0.tar:0.mp4"
    assert missing.reason == "train-0.tar:1 has no video (it has cls, jpg)"


def test_what_the_pixel_pipelines_refuse_is_refused_before_shards_are_read(tmp_path):
    for name in ("train-0.tar", "val-0.tar"):
        (tmp_path / name).write_bytes(b"not read")
    with pytest.raises(ConfigError, match=r"data\.auto_augment=rnad-m9.*Use for example"):
        describe_image_tars(config(tmp_path, auto_augment="rnad-m9"))
    with pytest.raises(ConfigError, match=r"data\.reduced_decode=sometimes"):
        describe_image_tars(config(tmp_path, reduced_decode="sometimes"))
    knobs = {"decoder": "pyav", "decoder_device": "cuda", "num_workers": 2, "auto_augment": "rnad-m9"}
    with pytest.raises(ConfigError) as caught:
        describe_video_tars(config(tmp_path, source="video_tars", **knobs))
    workers, device, policy = caught.value.complaints
    assert "data.num_workers=2 cannot work" in workers and "data.decoder=pyav does not decode" in device
    assert "data.auto_augment=rnad-m9" in policy


def test_reading_leaves_the_global_generators_alone(folder):
    def states():
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()

    before = states()
    read(tars(folder))
    assert states() == before
