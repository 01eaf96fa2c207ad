"""Files whole or not at all, and one winner among several processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vit_tp.config.atomic import create_atomically, replacing, write_atomically

# Every process tries each name, in the same order and as fast as it can.
RACE = """
import sys
from pathlib import Path
from vit_tp.config.atomic import create_atomically
folder, me, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
won = []
for number in range(rounds):
    try:
        create_atomically(folder / f"{number}.txt", me)
        won.append(number)
    except FileExistsError:
        pass
print(*won)
"""


def test_a_file_is_replaced_whole_and_nothing_is_left(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    write_atomically(path, "one")
    write_atomically(path, "two")
    with pytest.raises(ZeroDivisionError), replacing(path) as unfinished:
        unfinished.write_text("three")
        raise ZeroDivisionError
    assert path.read_text() == "two" and list(path.parent.iterdir()) == [path]


def test_a_file_that_is_there_stays(tmp_path):
    create_atomically(tmp_path / "a.txt", "one")
    with pytest.raises(FileExistsError):
        create_atomically(tmp_path / "a.txt", "two")
    assert (tmp_path / "a.txt").read_text() == "one" and len(list(tmp_path.iterdir())) == 1


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError("no hard links here")

    monkeypatch.setattr("os.link", refuse)
    test_a_file_that_is_there_stays(tmp_path)


def test_of_processes_that_create_a_file_at_once_one_succeeds(tmp_path):
    rounds = 300
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen([*command, name, str(rounds)], **pipes) for name in ("first", "second")]
    for job in jobs:
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        job.stdin.write("go\n")
        job.stdin.flush()
    won = {name: job.communicate(timeout=60)[0].split() for name, job in zip(("first", "second"), jobs, strict=True)}
    assert sorted(won["first"] + won["second"], key=int) == [str(number) for number in range(rounds)]
    for name, numbers in won.items():
        assert all((tmp_path / f"{number}.txt").read_text() == name for number in numbers)
