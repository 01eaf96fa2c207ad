"""From a configuration to ranks, argv and environment."""

import base64
import json
from pathlib import Path

import pytest

from vit_tp.config import ComputeConfig, Config, ParallelConfig
from vit_tp.errors import ConfigError
from vit_tp.launch import commands

TWO_GPUS = "GPU 0: NVIDIA X (UUID: GPU-aa)\nGPU 1: NVIDIA X (UUID: GPU-bb)\n"


def grid(tp=1, pp=1, dp=None, **compute) -> Config:
    return Config(parallel=ParallelConfig(tp=tp, pp=pp, dp=dp), compute=ComputeConfig(**compute))


@pytest.mark.parametrize(
    ("config", "gpus", "world"),
    [
        (grid(), 0, 1),
        (grid(2, 2), 0, 4),
        (grid(2, 2, 3), 0, 12),
        (grid(), 8, 8),
        (grid(2, 2), 8, 8),
        (grid(2, 2, 1), 8, 4),
        (grid(2, 1, 3), 8, 6),
    ],
)
def test_ranks_on_this_machine(config, gpus, world):
    assert commands.local_world(config, gpus) == world
    assert commands.with_replicas(config, world).parallel.dp * config.parallel.tp * config.parallel.pp == world


@pytest.mark.parametrize(
    ("config", "gpus", "words"),
    [
        (grid(4, 4), 8, "= 16 ranks, but 8 GPUs are visible"),
        (grid(2, 1, 5), 8, r"parallel.dp=5 = 10 ranks, but 8 GPUs"),
        (grid(3), 8, "2 would idle. Use parallel.dp=2"),
        (grid(device="cuda"), 0, "no GPU is visible.*compute.device=cpu"),
        (grid(dtype="fp16"), 0, "fp16 needs a GPU"),
    ],
)
def test_devices_that_do_not_fit(config, gpus, words):
    with pytest.raises(ConfigError, match=words):
        commands.local_world(config, gpus)


def test_ranks_that_somebody_else_started_have_to_fit_the_grid():
    assert commands.with_replicas(grid(2, 1), 4).parallel.dp == 2
    with pytest.raises(ConfigError, match=r"3 ranks are not parallel.tp=2 \* parallel.pp=1 = 2.*Start 2 ranks"):
        commands.with_replicas(grid(2, 1), 3)
    with pytest.raises(ConfigError, match="or use parallel.dp=2"):
        commands.with_replicas(grid(2, 1, 1), 4)


@pytest.mark.parametrize(
    ("device", "visible", "listing", "names"),
    [
        ("auto", None, TWO_GPUS, ["0", "1"]),
        ("auto", "1", TWO_GPUS, ["1"]),
        ("auto", "GPU-bb,GPU-aa", TWO_GPUS, ["GPU-bb", "GPU-aa"]),
        ("auto", "", TWO_GPUS, []),
        ("auto", "0,-1,1", TWO_GPUS, ["0"]),
        ("cpu", None, TWO_GPUS, []),
        ("auto", "0,1", "", []),  # DeepSpeed's launcher sets it for ranks on CPU too
    ],
)
def test_visible_gpus(device, visible, listing, names):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert commands.visible_gpus(device, environ, listing) == names


def test_auto_heeds_an_accelerator_that_the_user_named():
    environ = {"DS_ACCELERATOR": "cpu"}
    assert commands.visible_gpus("auto", environ, TWO_GPUS) == []
    assert commands.visible_gpus("cuda", environ, TWO_GPUS) == ["0", "1"]


def test_the_printed_command():
    arguments = commands.rank_arguments("train", Path("runs/my run/config.yaml"))
    environ = commands.child_environment({}, launcher_pid=7, threads=1, on_cpu=True)
    line = commands.deepspeed_command(arguments, ["0", "1", "2", "3"], 23456, environ)
    assert line == (
        "DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 4 --no_local_rank --master_port 23456 "
        "--module vit_tp train --config-file 'runs/my run/config.yaml'"
    )
    environ = commands.child_environment({"OMP_NUM_THREADS": "5"}, launcher_pid=7, threads=8, on_cpu=False)
    line = commands.deepspeed_command(["train"], ["2", "3"], 23456, environ)
    assert line.startswith("DS_ACCELERATOR=cuda OMP_NUM_THREADS=5 deepspeed --include localhost:2,3 --no_local_rank")


def test_the_started_argv_names_the_visible_devices():
    argv = commands.launch_argv(["train", "--config-file", "x y"], ["2", "3"], 23456)
    info = next(word for word in argv if word.startswith("--world_info=")).removeprefix("--world_info=")
    assert json.loads(base64.urlsafe_b64decode(info)) == {"localhost": ["2", "3"]}
    assert "--no_local_rank" in argv
    assert argv[-5:] == ["--module", "vit_tp", "train", "--config-file", "x y"]


def test_a_job_inside_a_job_inherits_no_rank():
    outer = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    outer |= {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    outer |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "CUDA_VISIBLE_DEVICES": "0,1", "HOME": "/h"}
    inner = commands.child_environment(outer, launcher_pid=7, threads=3, on_cpu=True)
    assert inner == {"HOME": "/h", "OMP_NUM_THREADS": "3", "DS_ACCELERATOR": "cpu", commands.LAUNCHER_PID: "7"}


def test_the_users_threads_and_devices_stay():
    environ = commands.child_environment({"OMP_NUM_THREADS": "5", "CUDA_VISIBLE_DEVICES": "1"}, 7, 3, on_cpu=False)
    assert environ["OMP_NUM_THREADS"] == "5" and environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_fair_share_is_at_least_one_core():
    assert [commands.fair_threads(8, ranks) for ranks in (1, 3, 8, 20)] == [8, 2, 1, 1]
