"""P110: a rank of a real training job raises, dies or stops; the job ends in time, non-zero, and says who it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

END_S = 30
START_S = 180
LONG = ["experiment=digits_smoke", "recipe.epochs=500"]
LONG += ["log.every_steps=1", "log.eval_every_epochs=0", "log.progress=false"]


class Job:
    """`vit-tp train` as typed."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.run = folder / "runs" / "digits_smoke"
        self.console = open(folder / "console.txt", "w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vit_tp", "train", *LONG, *words],
            cwd=folder, stdout=self.console, stderr=subprocess.STDOUT, env=os.environ | {"DS_ACCELERATOR": "cpu"},
        )  # fmt: skip
        self.ranks: dict[int, psutil.Process] = {}

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + START_S
        metrics = self.run / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < step:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, f"no step {step} within {START_S} s"
            time.sleep(0.2)
        for process in psutil.Process(self.process.pid).children(recursive=True):
            environ = process.environ()
            if "RANK" in environ:
                self.ranks[int(environ["RANK"])] = process

    def said(self) -> str:
        self.console.seek(0)
        return self.console.read()

    def close(self) -> None:
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.kill()
        self.process.kill()
        self.console.close()


@pytest.fixture
def jobs(tmp_path) -> Iterator:
    started = []

    def start(*words: str) -> Job:
        started.append(Job(tmp_path, *words))
        return started[-1]

    yield start
    for job in started:
        job.close()


def test_ranks_that_raise_end_the_job_with_one_traceback(jobs):
    """Every rank meets the same diverged loss, at the same step; one of them says so."""
    job = jobs("recipe.optimizer.lr=1e30", "recipe.schedule.warmup_epochs=0", "recipe.clip_grad=0")
    assert job.process.wait(START_S) == 17
    said = job.said()
    assert said.count("Traceback") == 1
    assert "FloatingPointError" in said and "training has diverged" in said
    assert json.loads((job.run / "log" / "error.json").read_text())["type"] == "FloatingPointError"
    assert not (job.run / "result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_ends_the_job(jobs, rank):
    job = jobs()
    job.wait_for_step(3)
    assert sorted(job.ranks) == [0, 1, 2, 3]
    job.ranks[rank].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    assert job.process.wait(END_S) == 128 + signal.SIGKILL
    assert time.monotonic() - killed < END_S
    gone, alive = psutil.wait_procs(list(job.ranks.values()), timeout=2)
    assert not alive
    assert "Traceback" not in job.said()


@pytest.mark.slow
def test_a_rank_that_stops_without_ending_costs_no_more_than_the_time_limit(jobs):
    job = jobs("compute.timeout_s=8")
    job.wait_for_step(3)
    job.ranks[3].send_signal(signal.SIGSTOP)
    # Its peers give up after 8 s; DeepSpeed's launcher then gives a process that does not act on SIGTERM 30 s more.
    assert job.process.wait(8 + 30 + 20) != 0
    gone, alive = psutil.wait_procs(list(job.ranks.values()), timeout=2)
    assert not alive, "the stopped rank is killed too"
    assert "lost a peer" in job.said()


@pytest.mark.slow
def test_interrupted_by_the_user(jobs):
    job = jobs()
    job.wait_for_step(2)
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(END_S) == 128 + signal.SIGTERM
    gone, alive = psutil.wait_procs(list(job.ranks.values()), timeout=2)
    assert not alive
