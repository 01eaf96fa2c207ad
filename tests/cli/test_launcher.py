"""How a job ends: true exit codes, one traceback, no process left; with real ranks in real processes."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from vit_tp.errors import ConfigError
from vit_tp.launch.local import free_port

LAUNCH = Path(__file__).with_name("launch_small.py")
START_S, END_S = 90, 30  # a rank's imports on a busy machine; what issue and users are promised


class Job:
    """Two ranks under vit_tp's launcher, started in a process of its own."""

    def __init__(self, how: str, folder: Path) -> None:
        self.folder = folder
        self.out = open(folder / "console.txt", "w+")
        command = [sys.executable, str(LAUNCH), how, str(folder)]
        self.process = subprocess.Popen(command, stdout=self.out, stderr=subprocess.STDOUT, start_new_session=True)

    def wait_until_up(self) -> None:
        wait_for(lambda: all((self.folder / f"up_{rank}").exists() for rank in (0, 1)), START_S)

    def members(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def launcher(self) -> psutil.Process:
        [launcher] = psutil.Process(self.process.pid).children()
        return launcher

    def wait(self, limit_s: float) -> int:
        return self.process.wait(limit_s)

    def console(self) -> str:
        self.out.seek(0)
        return self.out.read()

    def ranks_alive(self) -> list[int]:
        pids = [int(path.read_text()) for path in self.folder.glob("pid_*")]
        return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(is_so: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.1)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Job]]:
    jobs = []

    def begin(how: str, name: str = "job") -> Job:
        (tmp_path / name).mkdir()
        jobs.append(Job(how, tmp_path / name))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            left = job.members()
            job.process.kill()
            for member in left:
                if member.is_running():
                    member.kill()
        job.out.close()


def test_two_jobs_at_once_with_default_ports_end_well(start):
    jobs = [start("ok", "first"), start("ok", "second")]
    assert [job.wait(START_S) for job in jobs] == [0, 0]
    assert not any(job.ranks_alive() for job in jobs)
    assert "this goes to the log" not in jobs[0].console()
    assert "this goes to the log" in (jobs[0].folder / "log" / "rank_00001.txt").read_text()


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", 17, "the weights of rank 1 are made of wood"),
        ("refuse", 2, "no images; nothing to learn. Use more images."),
        pytest.param("exit", 7, "rank 0 lost a peer", marks=pytest.mark.slow),
        pytest.param("kill", 128 + signal.SIGKILL, "rank 0 lost a peer", marks=pytest.mark.slow),
        pytest.param("no_result", 1, "result.json was not written", marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_ends_the_job_with_its_own_code(start, how, code, words):
    job = start(how)
    job.wait_until_up()
    assert job.wait(END_S) == code
    assert job.ranks_alive() == []
    console = job.console()
    assert words in console
    assert console.count("Traceback") == (how == "raise")
    if how in ("raise", "refuse"):
        record = json.loads((job.folder / "log" / "error.json").read_text())
        assert record["rank"] == 1 and record["exit_code"] == code and words in record["message"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_ends_all_ranks(start, number):
    job = start("wait")
    job.wait_until_up()
    members = job.members()
    job.process.send_signal(number)
    assert job.wait(15) == 128 + number
    assert not any(is_alive(member.pid) for member in members)
    assert "Traceback" not in job.console()


@pytest.mark.slow
def test_ranks_end_when_deepspeeds_launcher_is_killed(start):
    job = start("wait")
    job.wait_until_up()
    job.launcher().kill()
    assert job.wait(15) == 128 + signal.SIGKILL
    assert job.ranks_alive() == []


@pytest.mark.slow
def test_ranks_end_when_the_command_itself_is_killed(start):
    job = start("wait")
    job.wait_until_up()
    members = job.members()
    job.process.kill()
    wait_for(lambda: not any(is_alive(member.pid) for member in members), END_S)


def test_ranks_end_when_both_launchers_are_killed(start):
    job = start("wait")
    job.wait_until_up()
    launcher = job.launcher()
    job.process.send_signal(signal.SIGSTOP)  # so that it cannot clean up in between
    launcher.kill()
    wait_for(lambda: job.ranks_alive() == [], END_S)
    job.process.kill()


def test_a_port_that_is_taken_is_refused_and_a_free_one_is_not_ephemeral():
    import socket

    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        with pytest.raises(ConfigError, match="is in use.*cluster.port=null"):
            free_port(holder.getsockname()[1])
    assert 20000 <= free_port() < 32000
    assert len({free_port() for _ in range(5)}) > 1
