"""P109: two processes that call themselves by the same rank are told so; the world is not left to wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from vit_tp.launch.local import free_port

JOIN = """
from datetime import timedelta
from vit_tp.errors import TopologyError
from vit_tp.train.communication import start_communication
try:
    start_communication(timedelta(seconds=15))
except TopologyError as error:
    print(error, flush=True)
except Exception as error:
    print("waited in vain", flush=True)
"""


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0, 1, 1], r"process \d+ on \S+ and process \d+ on \S+ .* RANK=1"),
        pytest.param([0, 0], r"second process was started with RANK=0", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_exists_twice_is_named(ranks, text):
    port = str(free_port(None))
    shared = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared = os.environ | {"DS_ACCELERATOR": "cpu"} | shared
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN], env=shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in ranks
    ]
    said = "".join(job.communicate(timeout=120)[0] for job in jobs)
    assert re.search(text, said), said
