"""`vit-tp train` and `vit-tp eval` as typed, and the same ranks started by hand through other launchers."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vit_tp.compose import load_config
from vit_tp.config import fingerprint
from vit_tp.launch.local import free_port

BIN = Path(sys.executable).parent
SHORT = ["experiment=digits_smoke", "recipe.max_steps=4", "log.progress=false", "compute.timeout_s=60"]
LIMIT_S = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("train")


def call(*command: str | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess:
    words = [str(word) for word in command]
    path = f"{BIN}:{os.environ['PATH']}"
    env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path} | environ
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S)


def result_of(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


@pytest.fixture(scope="module")
def trained(folder) -> subprocess.CompletedProcess:
    no_compiler = {"PATH": str(BIN), "CC": "/nonexistent", "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    ended = call(BIN / "vit-tp", "train", *SHORT, cwd=folder, **no_compiler)
    assert ended.returncode == 0, ended.stderr
    return ended


def test_train_says_what_it_will_do_and_where_everything_lies(trained, folder):
    said = trained.stdout
    assert "tp=2 x pp=2 x dp=1 = 4 processes" in said
    line = "equivalent to  DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 4 --no_local_rank --master_port"
    assert f"\n{line}" in said
    run = folder / "runs" / "digits_smoke"
    for word in ("accuracy", "throughput", "samples/s", "config.yaml", "metrics.jsonl", "result.json"):
        assert word in said
    for name in ("config.yaml", "metrics.jsonl", "result.json", "log/rank_00000.txt", "log/rank_00003.txt", "export"):
        assert (run / name).exists()
    # Quiet: what DeepSpeed and torch have to say is in the logs.
    assert trained.stderr == "" and "DeepSpeed" not in said and "[INFO]" not in said
    config = load_config(run / "config.yaml")
    assert (config.parallel.dp, config.compute.device) == (1, "cpu")
    assert result_of(run)["fingerprint"] == fingerprint(config)


def test_nothing_is_compiled_and_the_first_step_comes_within_seconds(trained, folder):
    """The job ran without a compiler on PATH; where one is found, DeepSpeed would build for 28 s and more."""
    assert not list((folder / "extensions").rglob("*"))
    result = result_of(folder / "runs" / "digits_smoke")
    assert result["first_step_s"] < 20  # about 3 s on idle cores, imports not counted


def test_again_it_overwrites_nothing(trained, folder):
    run = folder / "runs" / "digits_smoke"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    ended = call(BIN / "vit-tp", "train", *SHORT, cwd=folder)
    assert ended.returncode == 2 and "has finished" in ended.stderr and "run.name=digits_smoke-2" in ended.stderr
    # The printed command, typed by hand once more, is refused too.
    line = next(line for line in trained.stdout.splitlines() if line.startswith("equivalent to"))
    words = [word for word in shlex.split(line.removeprefix("equivalent to")) if not word.isupper()]
    command = words[next(i for i, word in enumerate(words) if word == "deepspeed") :]
    ended = call(*command, cwd=folder)
    assert ended.returncode != 0 and "has finished" in ended.stdout + ended.stderr
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize(
    "grid",
    [["parallel=single"], pytest.param(["parallel.tp=1", "parallel.pp=2"], marks=pytest.mark.slow)],
    ids=["single", "pp2"],
)
def test_eval_gives_the_same_figures_on_another_grid(trained, folder, grid):
    ended = call(BIN / "vit-tp", "eval", "run=runs/digits_smoke", *grid, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    tag = "pp1_dp1_tp1_fp32" if grid == ["parallel=single"] else "pp2_dp1_tp1_fp32"
    measured = json.loads((folder / "runs" / "digits_smoke" / "eval" / f"{tag}.json").read_text())
    expected = result_of(folder / "runs" / "digits_smoke")
    assert measured["eval/count"] == 360
    assert measured["eval/top1"] == pytest.approx(expected["eval/top1"], abs=1e-9)
    assert measured["eval/loss"] == pytest.approx(expected["eval/loss"], rel=1e-5)
    assert f"eval/{tag}.json" in ended.stdout and "accuracy" in ended.stdout


def test_the_same_command_under_torchrun_is_a_rank(folder):
    """And a run whose picture cannot be drawn is a run that has finished."""
    run = folder / "runs" / "torchrun"
    run.mkdir(parents=True)
    (run / "plots").touch()  # a file where a folder should be
    ended = call(
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())),
        *("-m", "vit_tp", "train", *SHORT, "parallel=tp2", "run.name=torchrun"),
        cwd=folder,
    )
    assert ended.returncode == 0, ended.stderr
    assert result_of(run)["world_size"] == 2
    assert "accuracy" in ended.stdout and "plot" not in ended.stdout
    assert "training.png was not drawn" in (run / "log" / "rank_00000.txt").read_text()


@pytest.mark.slow
def test_a_folded_pipeline_is_one_word_more(trained, folder):
    ended = call(
        *(BIN / "vit-tp", "train", *SHORT, "parallel.tp=1", "parallel.schedule=dualpipev", "run.name=folded"),
        cwd=folder,
    )
    assert ended.returncode == 0, ended.stderr
    assert "stage 0   embed .. blocks.0 and blocks.3 .. head: each rank holds" in ended.stdout
    assert "and at most 4 and 1 micro-batches" in ended.stdout
    run = folder / "runs" / "folded"
    assert "embed .. blocks.0 and blocks.3 .. head, " in (run / "log" / "rank_00000.txt").read_text()
    folded, straight = result_of(run), result_of(folder / "runs" / "digits_smoke")
    assert folded["fingerprint"] == straight["fingerprint"], "a schedule is how it is run, not what is learnt"
    assert folded["eval/loss"] == pytest.approx(straight["eval/loss"], rel=1e-4)


@pytest.mark.slow
def test_deepspeeds_own_command_with_its_flag(folder):
    """P91: without --no_local_rank each rank gets --local_rank=i as its first argument."""
    ended = call(
        *(BIN / "deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "--module", "vit_tp", "train"),
        *(*SHORT, "parallel=tp2", "run.name=deepspeed"),
        cwd=folder,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert result_of(folder / "runs" / "deepspeed")["world_size"] == 2


def start_by_hand(folder: Path, rank: int, port: int, *overrides: str, **environ: str) -> subprocess.Popen:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    env = os.environ | place | {"MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | environ
    command = [sys.executable, "-m", "vit_tp", "train", *SHORT, "parallel=tp2", *overrides]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_ranks_that_start_seconds_apart_share_one_folder(folder):
    """P92: the folder is a function of the configuration, never of the clock."""
    port, before = free_port(), set((folder).rglob("config.yaml"))
    ranks = [start_by_hand(folder, 0, port, "run.name=apart")]
    time.sleep(2)
    ranks.append(start_by_hand(folder, 1, port, "run.name=apart"))
    for rank in ranks:
        _, said = rank.communicate(timeout=LIMIT_S)
        assert rank.returncode == 0, said
    assert set(folder.rglob("config.yaml")) - before == {folder / "runs" / "apart" / "config.yaml"}


@pytest.mark.slow
def test_ranks_with_different_configurations_refuse_one_another(folder):
    port = free_port()
    ranks = [start_by_hand(folder, rank, port, "run.name=apart2", f"run.seed={rank}") for rank in (0, 1)]
    said = "".join(rank.communicate(timeout=LIMIT_S)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert said.count("were given another configuration than rank 0") == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_quickstart_learns_the_digits(tmp_path, seed):
    root = Path(__file__).parents[2]
    script = [root / "launch" / "quickstart.sh", f"run.seed={seed}", f"run.dir={tmp_path}"]
    ended = call(*script, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    result = result_of(tmp_path / "digits_smoke")
    assert result["eval/top1"] >= 0.95
    assert result["wall_s"] < 180
    again = call(*script, "recipe.max_steps=2", cwd=tmp_path)
    assert again.returncode == 0 and (tmp_path / "digits_smoke-2" / "result.json").exists()
