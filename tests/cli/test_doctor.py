"""`vit-tp doctor` as typed: what is installed, and which models can be cut; without a GPU and without a job."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import vit_tp
from vit_tp.errors import ConfigError
from vit_tp.verbs import doctor

VIT_TP = str(Path(sys.executable).with_name("vit-tp"))


def run(*words: str, **environ: str) -> subprocess.CompletedProcess:
    env = os.environ | environ
    return subprocess.run([VIT_TP, "doctor", *words], capture_output=True, text=True, timeout=120, env=env)


def test_it_says_what_is_installed_and_where_ranks_would_compute():
    ended = run(CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    lines = {line.split()[0]: line for line in ended.stdout.splitlines()}
    for name in ("torch", "torchvision", "timm", "deepspeed", "mpi4py"):
        assert version(name) in lines[name] and lines[name].endswith("tested")
    assert vit_tp.__version__ in lines["vit-tp"] and "within >=3.11,<3.14" in lines["python"]
    assert "CPU" in lines["devices"] and lines["backend"].split()[1] == "gloo"
    assert len(ended.stdout.splitlines()) <= 20 and max(map(len, ended.stdout.splitlines())) <= 120


@pytest.fixture
def probed(monkeypatch) -> dict:
    """What a probe found, for a test to change."""
    found = {"failures": {}, "gpus": [], "cuda": None, "nccl": False, "gloo": True, "mpi": None}
    monkeypatch.setattr(doctor, "_probe", lambda: found)
    monkeypatch.setattr(doctor.local, "gpu_listing", lambda: "")
    return found


def test_a_package_that_does_not_import_is_code_1(probed, capsys):
    probed["failures"] = {"deepspeed": "ImportError: libaio.so.1: cannot open shared object file"}
    assert doctor.run([]) == 1
    said = capsys.readouterr()
    assert "does not import: ImportError: libaio.so.1" in said.out and "pip install -r" in said.err


@pytest.mark.parametrize(
    ("number", "state"),
    [("1.0.99", "tested with ==1.0.31"), ("1.2.0", "not supported; needs >=1.0.31,<1.1"), (None, "missing")],
)
def test_a_version_that_is_not_the_tested_one_says_so(probed, capsys, monkeypatch, number, state):
    def other(name: str) -> str:
        if name != "timm":
            return version(name)
        if number is None:
            raise doctor.PackageNotFoundError(name)
        return number

    monkeypatch.setattr(doctor, "version", other)
    assert doctor.run([]) == (0 if number == "1.0.99" else 1)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("timm ")]
    assert state in line


@pytest.mark.parametrize(
    ("changes", "listing", "words"),
    [
        ({"gpus": ["H200", "H200"], "nccl": True, "cuda": "12.8"}, "GPU 0: a", ["2 x H200", "nccl"]),
        ({}, "GPU 0: a", ["this torch is built without CUDA", "gloo"]),
        ({"cuda": "12.8", "nccl": True}, "GPU 0: a", ["torch sees none; CUDA_VISIBLE_DEVICES=7"]),
        ({"gpus": ["H200"], "cuda": "12.8"}, "GPU 0: a", ["nccl is not in this torch"]),
        ({"mpi": "Open MPI v4.1.4"}, "", ["Open MPI v4.1.4"]),
    ],
    ids=["two GPUs", "torch for CPU", "hidden GPUs", "no NCCL", "MPI"],
)
def test_devices_and_backend(probed, capsys, monkeypatch, changes, listing, words):
    probed.update(changes)
    monkeypatch.setattr(doctor.local, "gpu_listing", lambda: listing)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    doctor.run([])
    said = capsys.readouterr().out
    for word in words:
        assert word in said


def test_it_lists_models_in_a_table():
    ended = run("--models", "deit_*distilled_patch16_224", "eva02_large_patch14_224", "tnt_s_patch16_224")
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    head, *rows = ended.stdout.splitlines()
    assert head.split() == ["name", "cut", "params", "tokens", "pp", "tp"]
    by_name = {row.split()[0]: row for row in rows}
    assert list(by_name) == [
        *("deit_base_distilled_patch16_224", "deit_small_distilled_patch16_224", "deit_tiny_distilled_patch16_224"),
        *("eva02_large_patch14_224", "tnt_s_patch16_224"),
    ]
    small = by_name["deit_small_distilled_patch16_224"].split()
    assert " ".join(small[1:]) == "Attention + Mlp 22.4 M 198 yes 1,2,3,6"
    assert "two streams" in by_name["tnt_s_patch16_224"]
    column = head.index("tp")
    assert {row[column - 2 : column] for row in rows} == {"  "} and {row[column] for row in rows} == {"1"}
    assert max(map(len, rows)) <= 120


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        pytest.param(
            ["--models", "resnet50"], ["resnet50 cannot be cut: it is a convolutional network"], marks=pytest.mark.slow
        ),
        (["--models", "swin_tiny_patch4_window7_224"], ["cannot be cut: it is hierarchical"]),
        pytest.param(
            ["--models", "vit_bse_patch16_224"], ["Did you mean vit_base_patch16_224"], marks=pytest.mark.slow
        ),
        pytest.param(
            ["--models", "plugins=[no_such_blocks]"],
            ["plugins: no_such_blocks cannot be imported"],
            marks=pytest.mark.slow,
        ),
        (["vit_base*", "--modles"], ["--modles is not an option", "Use vit-tp doctor --models vit_base*."]),
        (["--models", "parallel.tp=2"], ["parallel.tp=2 sets nothing here", "Use plugins=[...]."]),
    ],
    ids=lambda words: " ".join(words),
)
def test_what_it_refuses(words, sentences):
    ended = run(*words)
    assert ended.returncode == 2 and ended.stdout == "" and "Traceback" not in ended.stderr
    for sentence in sentences:
        assert sentence in ended.stderr


def test_a_family_that_is_not_cut_is_refused_before_any_rank(tmp_path):
    words = ["model.timm=swin_tiny_patch4_window7_224", "parallel.tp=2"]
    ended = subprocess.run([VIT_TP, "train", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stdout == ""
    [sentence] = ended.stderr.splitlines()
    assert sentence.startswith("model.timm=swin_tiny_patch4_window7_224 cannot be cut: it is hierarchical")
    assert not list(tmp_path.iterdir())


def test_a_probe_that_dies_is_said(monkeypatch):
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="ended with code 1"):
        doctor._probe()
