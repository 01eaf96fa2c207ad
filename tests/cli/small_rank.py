"""A rank that joins a gloo world and then ends the way its first argument says; started by the launcher under test.

Usage: python -m small_rank HOW FOLDER [RANK]. Rank RANK (default 1) misbehaves, the others wait for it in a collective.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from vit_tp.launch.env import export, rank_env
from vit_tp.launch.process import guard, redirect_output, watch_parent


def main() -> None:
    how, folder = sys.argv[1], Path(sys.argv[2])
    misbehaving = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    env = rank_env(os.environ)
    watch_parent()
    export(env, os.environ)
    console_out, console_err = redirect_output(folder / "log" / f"rank_{env.rank:05d}.txt")
    guard(lambda: work(how, folder, env, misbehaving, console_out), env.rank, folder / "log", console_err)


def work(how, folder, env, misbehaving, console_out) -> None:
    import torch
    import torch.distributed as dist

    (folder / f"pid_{env.rank}").write_text(str(os.getpid()))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    print("this goes to the log")
    print(f"rank {env.rank} is up", file=console_out, flush=True)
    (folder / f"up_{env.rank}").touch()
    if env.rank == misbehaving:
        end_badly(how)
    dist.all_reduce(torch.ones(1))
    if env.rank == 0 and how != "no_result":
        (folder / "result.json").write_text("{}")
    dist.barrier()
    dist.destroy_process_group()


def end_badly(how: str) -> None:
    if how == "raise":
        raise ValueError("the weights of rank 1 are made of wood")
    if how == "refuse":
        from vit_tp.errors import DataError

        raise DataError("no images; nothing to learn. Use more images.")
    if how == "exit":
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "wait":
        time.sleep(300)


if __name__ == "__main__":
    main()
