"""Help and refusals: as typed, in a process of their own, quickly and without torch."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT_S = 1.5
VIT_TP = [str(Path(sys.executable).with_name("vit-tp"))]
HEAVY = ("torch", "timm", "deepspeed", "torchvision")
# Runs the command in this interpreter and says which heavy modules it brought in.
SPY = """
import sys
from vit_tp.cli import main
code = main(sys.argv[1:])
print("HEAVY", *(name for name in {heavy} if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""


def run(*words: str, cwd=None, env=None) -> subprocess.CompletedProcess:
    return subprocess.run([*VIT_TP, *words], capture_output=True, text=True, timeout=60, cwd=cwd, env=env)


def fastest_of_three(*words: str) -> float:
    """Neighbours on a shared machine only ever add time."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run(*words)
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize(
    "words",
    [
        *(["--help"], ["train", "--help"], ["eval", "--help"], ["doctor", "--help"], ["--version"]),
        ["train", "recipe.epochs=0"],
        ["train", "plugins=[a.py]"],
    ],
    ids=" ".join,
)
def test_answers_at_once_and_without_torch(words):
    assert fastest_of_three(*words) < LIMIT_S
    spied = subprocess.run([sys.executable, "-c", SPY.format(heavy=HEAVY), *words], capture_output=True, text=True)
    assert spied.stderr.splitlines()[-1].strip() == "HEAVY"


def test_help_names_every_knob():
    from vit_tp.config import list_knobs

    text = run("train", "--help").stdout
    for knob in list_knobs():
        assert f"  {knob.path}=" in text
    assert "digits_smoke" in text
    assert run().stdout == run("--help").stdout == run("help").stdout


def test_help_into_a_pipe_that_closes():
    shell = f"set -o pipefail; {VIT_TP[0]} train --help | head -n 1"
    ended = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert "Traceback" not in ended.stderr and ended.stdout.startswith("usage: vit-tp train")


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (["trian"], ["trian is not a verb; vit-tp knows train, eval, bench, doctor. Did you mean vit-tp train?"]),
        (["train", "--lr", "3"], ["--lr is not an option", "3 sets nothing"]),
        (["train", "--config-file"], ["--config-file has no file after it"]),
        (["train", "--config-file", "/no/such.yaml"], ["/no/such.yaml cannot be read (No such file or directory)"]),
        (["train", "recipe.lr=1", "model=vit_smal"], ["mean recipe.optimizer.lr?", "Did you mean model=vit_small?"]),
        (["train", "recipe.epochs=0", "parallel.tp=0"], ["recipe.epochs=0 is out of range", "parallel.tp=0 is out of"]),
        (["train", "data=image_folder"], ["data.root is not set"]),
        (["train", "recipe.optimizer.name=lamb"], ["takes its step from whole layers"]),
        (
            ["train", "parallel.dp=3", "recipe.global_batch_size=64"],
            ["recipe.global_batch_size=64 is not a multiple of parallel.dp=3", "Use recipe.global_batch_size=63 or"],
        ),
        (["train", "compute.device=cpu", "compute.dtype=fp16"], ["compute.dtype=fp16 does not run"]),
        (["eval"], ["vit-tp eval was given 0 runs", "Use run=<run folder>"]),
        (["eval", "run=/no/such"], ["/no/such holds no config.yaml"]),
    ],
    ids=lambda words: " ".join(words[:3]) if isinstance(words, list) else "",
)
def test_refuses_with_code_2_and_every_sentence(words, sentences, tmp_path):
    ended = run(*words, cwd=tmp_path)
    assert ended.returncode == 2 and ended.stdout == ""
    assert "Traceback" not in ended.stderr
    for sentence in sentences:
        assert any(sentence in line for line in ended.stderr.splitlines())
    assert not list(tmp_path.iterdir())  # nothing was begun


@pytest.mark.parametrize(("is_finished", "words"), [(True, "has finished"), (False, "does not continue runs")])
def test_a_run_is_never_overwritten(is_finished, words, tmp_path):
    for name in ("run", "run-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    if is_finished:
        (tmp_path / "runs" / "run" / "result.json").touch()
    ended = run("train", cwd=tmp_path)
    assert ended.returncode == 2
    assert words in ended.stderr and "Use run.name=run-3." in ended.stderr
    assert run("train", "run.name=run-2", cwd=tmp_path).stderr.endswith("Use run.name=run-3.\n")


def test_a_run_without_weights_is_not_evaluated(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    ended = run("eval", f"run={tmp_path}")
    assert ended.returncode == 2 and "export holds no weights" in ended.stderr


def test_an_evaluation_changes_only_how_it_is_run(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.safetensors").touch()
    ended = run("eval", f"run={tmp_path}", "recipe.epochs=3", "model=vit_base", "parallel.tp=1")
    assert ended.returncode == 2
    assert [line.split()[0] for line in ended.stderr.splitlines()] == ["recipe.epochs=3", "model=vit_base"]


@pytest.mark.parametrize(("trained", "asked"), [(2, 1), (1, 2), (2, 4)])
def test_partial_sums_are_evaluated_on_their_own_tp(trained, asked, tmp_path):
    (tmp_path / "config.yaml").write_text(f"recipe: {{sync: partial}}\nparallel: {{tp: {trained}}}\n")
    weights = tmp_path / ("partial" if trained > 1 else "export")
    weights.mkdir()
    (weights / "model.safetensors").touch()
    ended = run("eval", f"run={tmp_path}", f"parallel.tp={asked}")
    assert ended.returncode == 2
    assert f"would be another model. Use parallel.tp={trained}." in ended.stderr


def test_half_a_rank_is_refused(tmp_path):
    ended = run("train", cwd=tmp_path, env={"WORLD_SIZE": "2", "PATH": "/usr/bin:/bin"})
    assert ended.returncode == 2 and "WORLD_SIZE=2 says that this process is a rank, but RANK" in ended.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [("compute.device=cuda", "compute.device=cuda, but no GPU is visible"), ("compute.dtype=fp16", "needs a GPU")],
)
def test_a_rank_that_was_started_by_hand_needs_its_gpu_too(override, words, tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = run("train", override, cwd=tmp_path, env=place | {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"})
    assert ended.returncode == 2 and words in ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", [["--local_rank=0"], ["--local-rank", "0"]])
def test_the_flag_of_older_launchers_never_reaches_hydra(flag, tmp_path):
    ended = run("train", *flag, "recipe.epochs=0", cwd=tmp_path)
    assert ended.stderr.startswith("recipe.epochs=0 is out of range") and len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("where", ["/proc/nowhere", "a_file"])
def test_a_run_folder_that_cannot_be_made_is_refused(where, tmp_path):
    (tmp_path / "a_file").write_text("")
    ended = run("train", "experiment=digits_smoke", f"run.dir={where}", cwd=tmp_path)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "run.dir" in ended.stderr
