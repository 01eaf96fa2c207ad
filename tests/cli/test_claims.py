"""A run's folder goes to one of two jobs that ask for it at the same moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# `vit-tp train` as typed, with the two steps around the claim replaced: preflight waits until both jobs have seen a
# free folder, and nothing is started.
JOB = """
import sys, types
from pathlib import Path

def wait_for_the_other(config, training=True, memory=None):
    print("saw a free folder", flush=True)
    sys.stdin.readline()
    return types.SimpleNamespace(lines=[])

sys.modules["vit_tp.train.preflight"] = types.SimpleNamespace(preflight=wait_for_the_other)
sys.modules["vit_tp.train.rank"] = types.SimpleNamespace(train_rank=lambda *arguments: print("trains"))
from vit_tp.verbs import train
train.start = lambda *arguments: print("starts", flush=True) or 0
train._summary = lambda folder: "ends"
from vit_tp.cli import main
sys.exit(main(sys.argv[1:]))
"""
PLACE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def start(folder: Path, *words: str, **environ: str) -> subprocess.Popen:
    command = [sys.executable, "-c", JOB, "train", "parallel.dp=1", "compute.device=cpu", *words]
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | environ, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("by_hand", "prepared"),
    [(False, False), (True, False), (True, True)],
    ids=["launched", "started by hand", "started by hand with the folder's own config"],
)
def test_of_two_jobs_at_once_one_is_refused(by_hand, prepared, tmp_path):
    words = []
    if prepared:
        (tmp_path / "runs" / "run").mkdir(parents=True)
        (tmp_path / "runs" / "run" / "config.yaml").write_text("{}")
        words = ["--config-file", "runs/run/config.yaml"]
    jobs = [start(tmp_path, f"run.seed={seed}", *words, **(PLACE if by_hand else {})) for seed in (1, 2)]
    if not by_hand:  # a rank's output goes to its log
        for job in jobs:
            assert job.stdout.readline() == "saw a free folder\n"
    said = {}
    for job in jobs:
        said[job.pid] = job.communicate("go\n", timeout=60)[1]
    assert sorted(job.returncode for job in jobs) == [0, 2], said
    [winner] = [seed for seed, job in zip((1, 2), jobs, strict=True) if job.returncode == 0]
    assert sum("a run is never overwritten. Use run.name=run-2." in text for text in said.values()) == 1
    assert f"seed: {winner}\n" in (tmp_path / "runs" / "run" / "config.yaml").read_text()


def test_the_printed_command_does_not_join_a_job_that_is_starting(tmp_path):
    assert start(tmp_path).communicate("go\n", timeout=60)[0].startswith("saw a free folder\n\nstarts")
    second = start(tmp_path, "--config-file", "runs/run/config.yaml", **PLACE)
    assert "is running or broke off" in second.communicate("go\n", timeout=60)[1] and second.returncode == 2
