"""A run that its processes have no room for is refused as typed, under a limit that is really there."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

VIT_TP = str(Path(sys.executable).with_name("vit-tp"))
GIB = 2**30
VIT_B = ["train", "model=vit_base", "data=digits", "recipe.global_batch_size=64", "compute.device=cpu"]
SMALL = ["train", "experiment=digits_smoke", "recipe.max_steps=2", "log.progress=false", "compute.device=cpu"]


def run(words: list[str], cwd: Path, address_space: int | None = None) -> tuple[subprocess.CompletedProcess, float]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        [VIT_TP, *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        preexec_fn=limit if address_space else None,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("words", "address_space", "source"),
    [
        (VIT_B, 9 * GIB, "(RLIMIT_AS: 9.664 GB, less "),
        pytest.param([*VIT_B, "compute.memory_gb=3"], None, "(compute.memory_gb: 3 GB)", marks=pytest.mark.slow),
    ],
)
def test_refused_before_any_rank_starts(words, address_space, source, tmp_path):
    """In ten seconds, imports included. Counted on the processor: neighbours only ever add time on the clock."""
    ended, seconds = run(words, tmp_path, address_space)
    assert ended.returncode == 2 and ended.stdout == "" and "Traceback" not in ended.stderr
    assert "would take 9.25 GB in each rank at the peak" in ended.stderr and source in ended.stderr
    assert "Use compute.recompute=block (2.85 GB)" in ended.stderr
    assert not list(tmp_path.iterdir())
    assert seconds < 10


@pytest.mark.slow
def test_what_fits_under_a_limit_trains_under_it(tmp_path):
    """The limit leaves room for libraries in the estimate, and they need no more of it in truth."""
    ended, _ = run(SMALL, tmp_path, 7 * GIB)
    assert ended.returncode == 0, ended.stderr
    assert "RLIMIT_AS: 7.516 GB, less" in ended.stdout
