"""Imports go down only: the storeys are written in pyproject.toml and a tool checks them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_imports_go_down_only():
    lint = Path(sys.executable).with_name("lint-imports")
    ended = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_what_launches_imports_nothing_heavy():
    code = """
import sys
import vit_tp, vit_tp.cli, vit_tp.compose, vit_tp.verbs.train, vit_tp.verbs.evaluate, vit_tp.launch.local
print([name for name in ("torch", "timm", "deepspeed", "numpy", "sklearn") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_ruff_finds_nothing():
    ruff = Path(sys.executable).with_name("ruff")
    ended = subprocess.run([ruff, "check", "--no-cache", "."], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
