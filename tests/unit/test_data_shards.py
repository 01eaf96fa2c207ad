"""Shards: which there are, how many samples each has, and what is said of damaged ones."""

import functools
import io
import json
import os
import sys
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import webdataset as wds

from vit_tp.config import DataConfig
from vit_tp.data import shards, tar_members
from vit_tp.data.shard_names import Root
from vit_tp.data.shards import count_samples, survey
from vit_tp.data.tars import describe_image_tars
from vit_tp.errors import ConfigError, DataError


def write_shard(path, count, first=0, payload=b"pixels", **more):
    """Write `count` samples with WebDataset; sample i has class i."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wds.TarWriter(str(path)) as writer:
        for i in range(first, first + count):
            writer.write({"__key__": f"{i:05d}", "jpg": payload, "cls": str(i).encode(), **more})
    return path


@pytest.fixture
def folder(tmp_path):
    for number, count in enumerate((3, 5, 2)):
        write_shard(tmp_path / f"train-{number:06d}.tar", count, 10 * number)
    write_shard(tmp_path / "val-000000.tar", 4)
    return tmp_path


@pytest.fixture
def server(folder):
    """A web server for the folder; its log is kept."""
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            asked.append(args[0])

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as http:
        http.asked = asked
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def config(root, **knobs):
    return DataConfig(source="image_tars", root=str(root), **knobs)


def sizes_of(root, **knobs):
    return {shard.name: shard.counted.samples for shard in survey(config(root, **knobs), "train").shards}


SIZES = {"train-000000.tar": 3, "train-000001.tar": 5, "train-000002.tar": 2}


# names


@pytest.mark.parametrize(
    "pattern", ["train-*.tar", "train-{000000..000002}.tar", "{train-000000,train-00000[12]}.tar", "*-0*[012].tar"]
)
def test_patterns_and_ranges_name_the_same_shards_in_the_same_order(folder, pattern):
    os.rename(folder / "val-000000.tar", folder / "other")
    assert list(sizes_of(folder, train_shards=pattern).items()) == list(SIZES.items())


def test_shards_in_folders_have_their_index_beside_them(folder):
    (folder / "train").mkdir()
    for name in SIZES:
        os.rename(folder / name, folder / "train" / name[6:])
    assert list(sizes_of(folder, train_shards="train/*.tar").values()) == [3, 5, 2]
    assert set(json.loads((folder / "train" / shards.INDEX_FILE).read_text())) == {name[6:] for name in SIZES}
    assert not (folder / shards.INDEX_FILE).exists()


@pytest.mark.parametrize(
    ("root", "url"),
    [
        ("http://host/x", "http://host/x/a.tar"),
        ("http://host/x/", "http://host/x/a.tar"),
        ("pipe:cat /x/", "pipe:cat /x/a.tar"),
        ("pipe:aws s3 cp s3://bucket/x/{} -", "pipe:aws s3 cp s3://bucket/x/a.tar -"),
        ("s3://bucket", "s3://bucket/a.tar"),
    ],
)
def test_a_url_is_continued_with_the_name(root, url):
    assert Root.parse(config(root)).url("a.tar") == url


def test_a_file_url_is_a_folder(folder):
    assert sizes_of(folder.as_uri()) == sizes_of(f"file:{folder}") == SIZES
    assert (folder / shards.INDEX_FILE).exists()


def test_names_that_lead_nowhere(folder):
    with pytest.raises(ConfigError, match=r"data\.root is not set.*Use data\.root="):
        survey(DataConfig(source="image_tars"), "train")
    with pytest.raises(DataError, match=r"nowhere is not a folder"):
        sizes_of(folder / "nowhere")
    with pytest.raises(DataError, match=r"data\.train_shards=x-\*\.tar names no shard.*holds train-000000\.tar"):
        sizes_of(folder, train_shards="x-*.tar")
    with pytest.raises(
        DataError, match=r"names 2 of 5 shards \(train-000003\.tar, train-000004\.tar\) that are not in"
    ):
        sizes_of(folder, train_shards="train-{000000..000004}.tar")
    with pytest.raises(ConfigError, match=r"brace without its partner"):
        sizes_of(folder, train_shards="train-{000000..000004.tar")
    with pytest.raises(ConfigError, match=r"URL, whose files cannot be listed.*train-\{000000\.\.000146\}\.tar"):
        sizes_of("http://127.0.0.1:9/")


# counting


def oracle(path):
    """WebDataset's own grouping: keys in order."""
    return [sample["__key__"] for sample in wds.WebDataset(str(path), shardshuffle=False)]


def test_keys_are_counted_as_webdataset_groups_them(tmp_path):
    path = tmp_path / "odd.tar"
    names = "a.jpg a.cls b.x.jpg b.cls c c.cls __meta__ d/a.jpg d/a.CLS __m__/a.jpg e.json a.png .hidden d/.x f.tar.gz"
    with tarfile.open(path, "w") as tar:
        for number, name in enumerate(names.split()):
            info = tarfile.TarInfo(name)
            info.size = 2
            tar.addfile(info, io.BytesIO(f"{number:02d}".encode()))
            if number == 3:
                directory = tarfile.TarInfo("folder.jpg")
                directory.type = tarfile.DIRTYPE
                tar.addfile(directory)
    counted = count_samples(str(path), (0, 0))
    assert counted.samples == len(oracle(path)) and counted.highest_label == 8 and not counted.note
    with tar_members.opened(str(path)) as stream:
        ours = [(key, [(m.suffix, m.read()) for m in members]) for key, members in tar_members.group_members(stream)]
    theirs = [
        (sample["__key__"], [(k, v) for k, v in sample.items() if not k.startswith("__")])
        for sample in wds.WebDataset(str(path), shardshuffle=False)
    ]
    assert ours == theirs


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.bz2", ".tar.xz"])
def test_compressed_shards(tmp_path, suffix):
    path = tmp_path / f"train-0{suffix}"
    with tarfile.open(path, "w:" + suffix[5:]) as tar:
        for i in range(4):
            tar.addfile(tarfile.TarInfo(f"{i}.jpg"))
    assert count_samples(str(path), (1, 1)).samples == count_samples(f"pipe:cat {path}", None).samples == 4


def test_long_names_and_links_and_no_payload_is_read(tmp_path, monkeypatch):
    path = tmp_path / "train-0.tar"
    with tarfile.open(path, "w") as tar:
        for i in range(3):
            for suffix, payload in (("jpg", b"x" * 5000), ("cls", b" 7\n")):
                info = tarfile.TarInfo(f"{'long/' * 60}{i}.{suffix}")
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))
        link = tarfile.TarInfo("9.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "0.jpg"
        tar.addfile(link)
    read = []
    payload_of = tar_members._payload
    monkeypatch.setattr(tar_members, "_payload", lambda tar, info: read.append(info.size) or payload_of(tar, info))
    assert count_samples(str(path), (2, 2)) == shards.Counted(3, 7, "") and len(oracle(path)) == 3
    assert read == [3, 3, 3]


# the files beside the shards


def test_counts_are_written_beside_the_shards_and_believed_while_they_stay_the_same(folder, capsys):
    assert sizes_of(folder) == SIZES
    assert "reading through 3 of 3 shards of data.train_shards" in capsys.readouterr().err
    entry = json.loads((folder / shards.INDEX_FILE).read_text())["train-000001.tar"]
    status = os.stat(folder / "train-000001.tar")
    assert entry == {
        "samples": 5,
        "highest_label": 14,
        "note": "",
        "bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }
    assert sizes_of(folder) == SIZES and not capsys.readouterr().err
    write_shard(folder / "train-000001.tar", 7)
    assert sizes_of(folder)["train-000001.tar"] == 7
    assert "reading through 1 of 3" in capsys.readouterr().err
    survey(config(folder), "val")
    assert len(json.loads((folder / shards.INDEX_FILE).read_text())) == 4
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".tar") == [shards.INDEX_FILE]


def test_a_foreign_sizes_json_is_believed_but_knows_no_classes(folder, capsys):
    table = {**SIZES, "train-000002.tar": 9, "val-000000.tar": 4}
    text = json.dumps(table)
    (folder / "sizes.json").write_text(text)
    assert sizes_of(folder) == {**SIZES, "train-000002.tar": 9}
    assert not capsys.readouterr().err and not (folder / shards.INDEX_FILE).exists()
    with pytest.raises(ConfigError, match=r"data\.num_classes is not set, and of 4 shards .*Use data\.num_classes="):
        describe_image_tars(config(folder))
    spec = describe_image_tars(config(folder, num_classes=50))
    assert (spec.num_train, spec.num_val, spec.num_classes, spec.notes) == (17, 4, 50, ())
    assert (folder / "sizes.json").read_text() == text


def test_shards_that_sizes_json_lacks_are_counted(folder, capsys):
    (folder / "sizes.json").write_text(json.dumps({"train-000000.tar": 2}))
    assert sizes_of(folder) == {**SIZES, "train-000000.tar": 2}
    assert "reading through 2 of 3 shards" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sizes.json", shards.INDEX_FILE])
@pytest.mark.parametrize(
    "text", ["<html>", "[1, 2]", '{"train-000000.tar": "many", "train-000001.tar": {"samples": 1}}']
)
def test_a_file_of_sizes_that_makes_no_sense_is_passed_over(folder, name, text):
    (folder / name).write_text(text)
    found = survey(config(folder), "train")
    assert {shard.name: shard.counted.samples for shard in found.shards} == SIZES
    assert [name in note and "is passed over" in note for note in found.notes] == ([] if text[0] == "{" else [True])


def test_what_cannot_be_noted_down_is_said(folder, monkeypatch):
    def refuse(path, text):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shards, "write_atomically", refuse)  # a superuser may write anywhere
    notes = survey(config(folder), "train").notes
    assert len(notes) == 1 and "3 shards were read through" in notes[0] and "Permission denied" in notes[0]


# classes


def test_classes_are_one_more_than_the_highest_label_of_both_splits(folder):
    spec = describe_image_tars(config(folder))
    assert (spec.num_train, spec.num_val, spec.num_classes, spec.in_chans, spec.is_video) == (10, 4, 22, 3, False)
    assert spec.notes == () and spec.mean == (0.485, 0.456, 0.406)
    write_shard(folder / "val-000000.tar", 1, 99)
    assert describe_image_tars(config(folder, mean=[0.1, 0.2, 0.3])).num_classes == 100
    assert describe_image_tars(config(folder, num_classes=1000)).num_classes == 1000
    with pytest.raises(ConfigError, match=r"data\.num_classes=22, but val-000000\.tar has a sample of class 99.*=100"):
        describe_image_tars(config(folder, num_classes=22))


def test_shards_without_any_class(tmp_path):
    for name in ("train-0.tar", "val-0.tar"):
        with wds.TarWriter(str(tmp_path / name)) as writer:
            writer.write({"__key__": "0", "jpg": b"", "txt": b"a cat"})
    with pytest.raises(DataError, match=r"none of the 2 shards .* has a sample with a class.*\.cls"):
        describe_image_tars(config(tmp_path))


# damage


def test_a_shard_cut_anywhere_counts_what_is_whole(tmp_path):
    """The ends of whole samples are known from where tarfile's own index says their last member ends."""
    whole = write_shard(tmp_path / "whole.tar", 6, payload=b"x" * 700)
    with tarfile.open(whole) as tar:
        members = tar.getmembers()
    ends = [image.offset_data + 1024 for image in members[1::2]]  # after its padding
    assert [image.size for image in members[1::2]] == [700] * 6
    data = whole.read_bytes()
    for length in [*range(1, ends[-1] + 512, 256), *ends, *(end - 1 for end in ends), *(end + 100 for end in ends)]:
        cut = tmp_path / "cut.tar"
        cut.write_bytes(data[:length])
        counted = count_samples(str(cut), (length, -1))
        expected = sum(end <= length for end in ends)
        assert counted.samples == expected, (length, counted)
        assert counted.note.startswith("is cut short after" if expected else "holds no sample"), (length, counted)
        assert counted.highest_label == expected - 1
    assert count_samples(str(whole), (0, -1)) == shards.Counted(6, 5, "")


def test_a_cut_shard_behind_a_pipe_counts_alike(tmp_path):
    data = write_shard(tmp_path / "whole.tar", 6, payload=b"x" * 700).read_bytes()
    for length in (100, 4096, 4200, 9000, 10240):
        path = tmp_path / f"cut{length}.tar"
        path.write_bytes(data[:length])
        local, piped = count_samples(str(path), (0, -2)), count_samples(f"pipe:cat {path}", None)
        assert local[:2] == piped[:2]


def test_damage_is_noted_and_kept_in_the_index(folder):
    data = (folder / "train-000001.tar").read_bytes()
    (folder / "train-000001.tar").write_bytes(data[:5000])
    (folder / "train-000002.tar").write_bytes(b"")
    (folder / "train-000003.tar").write_bytes(b"<html>not found</html>" * 100)
    for _ in range(2):
        spec = describe_image_tars(config(folder))
        assert spec.num_train == 3 + 1
        assert [note.split(" (")[0] for note in spec.notes] == [
            "train-000001.tar is cut short after 1 samples",
            "train-000002.tar holds no sample",
            "train-000003.tar holds no sample",
        ]
        assert spec.notes[2].endswith("(it does not begin like a tar)")


def test_a_header_that_was_overwritten_is_not_the_end(folder):
    """tarfile takes a header with a wrong checksum for the end of the archive, without a word."""
    path = folder / "train-000001.tar"
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        offset = tar.getmembers()[4].offset
    data[offset : offset + 100] = b"\xff" * 100
    path.write_bytes(data)
    found = survey(config(folder), "train")
    assert found.shards[1].counted.samples == 2 and "train-000001.tar is cut short after 2 samples" in found.notes[0]


def test_nothing_but_damage_is_refused(tmp_path):
    (tmp_path / "train-0.tar").write_bytes(b"")
    (tmp_path / "train-1.tar").write_bytes(b"no tar")
    with pytest.raises(
        DataError, match=r"the 2 shards of data\.train_shards=.* hold no sample \(train-0\.tar holds no"
    ):
        survey(config(tmp_path), "train")


# URLs


def test_shards_behind_http_and_pipes(folder, server):
    pattern = "train-{000000..000002}.tar"
    web = f"http://127.0.0.1:{server.server_port}/"
    for root in (web, web.rstrip("/"), f"pipe:cat {folder}/", f"pipe:cat {folder}/{{}} | cat"):
        found = survey(config(root, train_shards=pattern), "train")
        assert {shard.name: shard.counted.samples for shard in found.shards} == SIZES
        assert "3 shards were read through" in found.notes[0] and "behind a URL" in found.notes[0]
    assert not (folder / shards.INDEX_FILE).exists()


def test_the_files_beside_the_shards_are_read_through_a_url_too(folder, server, capsys):
    sizes_of(folder, train_shards="train-00000[01].tar")
    (folder / "sizes.json").write_text(json.dumps({"train-000002.tar": 2}))
    capsys.readouterr()
    found = survey(config(f"http://127.0.0.1:{server.server_port}", train_shards="train-{000000..000002}.tar"), "train")
    assert [shard.counted.samples for shard in found.shards] == [3, 5, 2] and not found.notes
    assert [shard.counted.highest_label for shard in found.shards] == [2, 14, None]
    assert not any(".tar" in line for line in server.asked)


def test_a_url_that_leads_nowhere_is_no_empty_shard(folder, server):
    web = f"http://127.0.0.1:{server.server_port}/"
    for root in (web, f"pipe:cat {folder}/", "http://127.0.0.1:9/"):
        with pytest.raises(DataError, match=r"train-000009\.tar cannot be read \(OSError"):
            survey(config(root, train_shards="train-000009.tar"), "train")


def test_a_program_that_fails_halfway_gives_no_count(folder):
    with pytest.raises(DataError, match=r"cannot be read .*exit 3"):
        survey(config(f"pipe:head -c 3000 {folder}/{{}}; exit 3", train_shards="train-000001.tar"), "train")


def test_a_missing_package_says_what_to_install(folder, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "webdataset"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "webdataset", None)
    with pytest.raises(ConfigError, match=r"data\.source=image_tars needs WebDataset.*pip install 'vit-tp\[tars\]'"):
        describe_image_tars(config(folder))
