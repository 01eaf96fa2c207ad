"""Which rank is this process, from the variables that launchers really set."""

import pytest

from vit_tp.errors import TopologyError
from vit_tp.launch.env import RankEnv, export, rank_env, strip_local_rank

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
DEEPSPEED = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "2",
    "LOCAL_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def test_torchrun():
    assert rank_env(TORCHRUN) == RankEnv(3, 4, 1, 2, "10.0.0.1", 29400, "torchrun")


def test_deepspeed():
    assert rank_env(DEEPSPEED) == RankEnv(2, 4, 2, 4, "127.0.0.1", 29500, "deepspeed")


def test_plain_processes_on_one_host():
    plain = without(DEEPSPEED, "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert rank_env(plain) == RankEnv(2, 4, 2, 4, "127.0.0.1", 29500, "environment")


@pytest.mark.parametrize("environ", [{}, {"LOCAL_RANK": "0"}, {"MASTER_ADDR": "x", "LOCAL_SIZE": "2"}])
def test_outside_a_job(environ):
    assert rank_env(environ) is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_partial_environment_names_what_is_missing(name):
    with pytest.raises(TopologyError, match=f"{name} is not set"):
        rank_env(without(TORCHRUN, name))


def test_a_lone_world_size():
    with pytest.raises(TopologyError, match="WORLD_SIZE=2 .* RANK and LOCAL_RANK and MASTER_ADDR and MASTER_PORT are"):
        rank_env({"WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "4"}, "RANK=4 does not fit WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 does not fit"),
        ({"LOCAL_SIZE": "4"}, "LOCAL_WORLD_SIZE=2 contradicts LOCAL_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "8"}, "a host holds no more ranks than the job"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE=four is not a whole number"),
    ],
)
def test_a_contradiction_is_an_error(change, words):
    with pytest.raises(TopologyError, match=words):
        rank_env(TORCHRUN | change)


def test_local_ranks_may_come_in_another_order_than_ranks():
    """As Open MPI 5 maps them, for example by node."""
    assert rank_env(TORCHRUN | {"RANK": "0"}).local_rank == 1


def test_export_is_read_back_alike():
    environ = {}
    export(rank_env(TORCHRUN), environ)
    assert environ["LOCAL_SIZE"] == environ["LOCAL_WORLD_SIZE"] == "2"
    assert rank_env(environ | {"TORCHELASTIC_RUN_ID": "none"}) == rank_env(TORCHRUN)


@pytest.mark.parametrize("flag", [["--local_rank=1"], ["--local_rank", "1"], ["--local-rank=1"], ["--local-rank", "1"]])
def test_the_flag_of_older_launchers_is_taken_out_and_used(flag):
    argv, environ = strip_local_rank([*flag, "train", "parallel.tp=2"], without(TORCHRUN, "LOCAL_RANK"))
    assert argv == ["train", "parallel.tp=2"]
    assert rank_env(environ).local_rank == 1


def test_the_flag_agrees_or_is_an_error():
    argv, environ = strip_local_rank(["train", "--local_rank=1"], TORCHRUN)
    assert argv == ["train"] and environ == TORCHRUN
    with pytest.raises(TopologyError, match="--local_rank=0 contradicts LOCAL_RANK=1"):
        strip_local_rank(["train", "--local_rank=0"], TORCHRUN)
    with pytest.raises(TopologyError, match="a launcher gives a number"):
        strip_local_rank(["train", "--local_rank"], TORCHRUN)


def test_the_flag_outside_a_job_means_nothing():
    argv, environ = strip_local_rank(["--local_rank=0", "train"], {})
    assert argv == ["train"] and environ == {}
    assert rank_env(environ) is None


def test_minus_one_means_no_job():
    assert strip_local_rank(["--local_rank=-1"], TORCHRUN) == ([], TORCHRUN)
