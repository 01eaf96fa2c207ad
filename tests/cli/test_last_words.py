"""What a failing rank says where the log folder already holds a failure's record, this job's or an earlier one's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A rank that was started by hand, as be_rank does it, without any training.
RANK = """
import os, sys
from pathlib import Path
from vit_tp.config import Config
from vit_tp.errors import DataError
from vit_tp.launch.env import rank_env
from vit_tp.launch.process import guard
from vit_tp.verbs.job import become_rank

kind, message = sys.argv[1:]
def work():
    raise {"ValueError": ValueError, "DataError": DataError}[kind](message)
env = rank_env(os.environ)
_, console_err = become_rank(Config(), env, Path("log"))
guard(work, env.rank, Path("log"), console_err)
"""


def fail(folder: Path, rank: int, kind: str, message: str) -> subprocess.CompletedProcess:
    place = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    command = [sys.executable, "-c", RANK, kind, message]
    return subprocess.run(command, cwd=folder, env=os.environ | place, capture_output=True, text=True, timeout=60)


def record(folder: Path) -> dict:
    return json.loads((folder / "log" / "error.json").read_text())


@pytest.mark.parametrize(("kind", "code"), [("ValueError", 17), ("DataError", 2)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_fails_again_says_so_again(rank, kind, code, tmp_path):
    """Within the same second and with the same words. Rank 0 clears the record away; others know their own."""
    for _ in range(2):
        ended = fail(tmp_path, rank, kind, "no more wood")
        assert ended.returncode == code
        assert "no more wood" in ended.stderr
        assert ended.stderr.count("Traceback") == (kind == "ValueError")
        assert (record(tmp_path)["rank"], record(tmp_path)["message"]) == (rank, "no more wood")


def test_rank_0_forgets_an_earlier_job_of_another_rank(tmp_path):
    fail(tmp_path, 1, "DataError", "no more wood")
    assert "no more wood" in fail(tmp_path, 0, "DataError", "no more wood").stderr
    assert record(tmp_path)["rank"] == 0


@pytest.mark.parametrize("kind", ["ValueError", "DataError"])
def test_a_failure_of_another_kind_is_seen_though_one_is_on_record(kind, tmp_path):
    """As where a rank fails before rank 0 has cleared the record away: better twice than never."""
    fail(tmp_path, 0, kind, "no more wood")
    ended = fail(tmp_path, 1, kind, "no more glue")
    assert "no more glue" in ended.stderr
    assert ended.stderr.count("Traceback") == (kind == "ValueError")
    assert record(tmp_path)["message"] == "no more wood"  # the first


def test_what_all_ranks_meet_is_told_at_length_by_one(tmp_path):
    fail(tmp_path, 0, "ValueError", "no more wood on 0 at 0x7f3a")
    ended = fail(tmp_path, 1, "ValueError", "no more wood on 1 at 0x7f3a")
    assert ended.stderr == "rank 1 failed as well: ValueError: no more wood on 1 at 0x7f3a\n"
    fail(tmp_path, 0, "DataError", "no more wood")
    assert fail(tmp_path, 2, "DataError", "no more wood").stderr == ""


def test_a_torn_record_hides_nothing(tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "error.json").write_text('{"rank": 0')
    assert "no more wood" in fail(tmp_path, 1, "DataError", "no more wood").stderr
