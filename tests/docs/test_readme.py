"""The README's programs run as they are printed, and what it says that commands answer is what they answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)(.*?)```", README, re.DOTALL))


@pytest.mark.parametrize(("name", "num_ranks"), [("own_loop.py", 2), ("own_pipeline.py", 4)])
def test_a_program_of_the_readme_runs_as_printed(name: str, num_ranks: int, tmp_path: Path):
    (tmp_path / name).write_text(f"# {name}{PROGRAMS[name]}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    done = subprocess.run(
        [*launcher, name], cwd=tmp_path, capture_output=True, text=True, timeout=180, env=cpu_environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = re.findall(r"^(\d+\.\d{4}) (\d+\.\d{4})$", done.stdout, re.MULTILINE)
    assert len(figures) == 5
    assert float(figures[-1][0]) < float(figures[0][0]), "it learns its one batch"


def test_each_verb_is_shown():
    for verb in ("shard_", "finish_gradients_", "full_state_dict", "pipeline", "initialize"):
        assert any(f"vit_tp.{verb}(" in program for program in PROGRAMS.values())


def test_refusals_are_those_that_the_readme_shows(tmp_path: Path):
    command, *answer = re.search(r"\$ (vit-tp train .*?)```", README, re.DOTALL).group(1).strip().splitlines()
    argv = [sys.executable, "-m", "vit_tp", *command.split()[1:], f"run.dir={tmp_path}"]
    times = []
    for _ in range(3):  # neighbours on a shared machine only ever add time
        started = time.perf_counter()
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=cpu_environment())
        times.append(time.perf_counter() - started)
        if times[-1] < 10:
            break
    assert min(times) < 10, "what preflight refuses, it refuses within ten seconds"
    assert done.returncode == 2
    assert sorted(done.stderr.strip().splitlines()) == sorted(answer)


def cpu_environment() -> dict[str, str]:
    hidden = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
