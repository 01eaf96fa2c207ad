"""The program on the classifier runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_readme import ROOT, cpu_environment

TEXT = (ROOT / "docs" / "parallelism.md").read_text()
PROGRAM = re.search(r"```python\n(# own_head\.py.*?)```", TEXT, re.DOTALL).group(1)


@pytest.mark.slow
def test_the_program_runs_as_printed(tmp_path: Path):
    (tmp_path / "own_head.py").write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, "own_head.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180, env=cpu_environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = re.findall(r"^(\d+\.\d{4}) (\d+\.\d{4})$", done.stdout, re.MULTILINE)
    assert len(figures) == 5
    assert float(figures[-1][0]) < float(figures[0][0]), "it learns its one batch"
