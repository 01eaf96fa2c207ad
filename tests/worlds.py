"""Run a function on every rank of a gloo world and return what each rank returned.

One fork server holds torch, timm and DeepSpeed imported, so a world of four starts in about a second. Ranks meet
through a file, never a port. The first rank that fails ends the world: its traceback is raised here, and its peers are
killed.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

PRELOAD = ["torch", "timm", "deepspeed", "deepspeed.pipe", "deepspeed.runtime.pipe.engine", "tests.worlds"]


class RankFailed(AssertionError):
    """A rank raised; the text is its traceback."""


def run_world(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120, **kwargs: Any) -> list[Any]:
    """Run `fn(*args, **kwargs)` on every rank and return the results in rank order.

    Args:
        fn: A function of a module, not a closure; `torch.distributed` is up when it is called.
        world_size: Number of ranks.
        timeout_s: Seconds after which the world is killed and the test fails.

    Raises:
        RankFailed: With the first traceback, or the ranks that were still at work at the time limit.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="world_") as folder:
        ranks: dict[Connection, tuple[int, multiprocessing.Process]] = {}
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(fn, args, kwargs, rank, world_size, folder, theirs), daemon=True
            )
            process.start()
            theirs.close()
            ranks[ours] = rank, process
        try:
            return _collect(ranks, timeout_s)
        finally:
            for _, process in ranks.values():
                process.kill()
                process.join()


def _collect(ranks: dict[Connection, tuple[int, multiprocessing.Process]], timeout_s: float) -> list[Any]:
    import torch

    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    waiting = dict(ranks)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(rank for rank, _ in waiting.values())} still at work after {timeout_s} s")
        failures = []
        for connection in ready:
            rank, process = waiting.pop(connection)
            try:
                kind, payload = connection.recv()
            except EOFError:
                process.join(5)
                kind, payload = "lost", f"ended without a word, exit code {process.exitcode}"
            if kind == "result":
                results[rank] = torch.load(io.BytesIO(payload), weights_only=False)
            else:
                failures.append((kind == "peer", rank, payload))
        if failures and all(is_victim for is_victim, *_ in failures) and waiting:
            time.sleep(0.5)  # a victim was heard before the rank that failed
            failures += _drain_failures(waiting)
        if failures:
            is_victim, rank, text = min(failures)
            others = [other for _, other, _ in failures if other != rank]
            raise RankFailed(f"rank {rank} {'lost a peer' if is_victim else 'failed'} (ranks {others} too):\n{text}")
    return [results[rank] for rank in sorted(results)]


def _drain_failures(waiting: dict[Connection, tuple[int, multiprocessing.Process]]) -> list[tuple[bool, int, str]]:
    found = []
    for connection in wait(list(waiting), timeout=0):
        rank, _ = waiting[connection]
        try:
            kind, payload = connection.recv()
        except EOFError:
            kind, payload = "lost", "ended without a word"
        if kind != "result":
            found.append((kind == "peer", rank, payload))
    return found


def _rank_main(
    fn: Callable[..., Any], args: tuple, kwargs: dict, rank: int, world_size: int, folder: str, results: Connection
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size))
    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False  # or a rank could not start loader processes
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{Path(folder) / 'rendezvous'}", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        buffer = io.BytesIO()
        torch.save(fn(*args, **kwargs), buffer)
        dist.barrier()
        results.send(("result", buffer.getvalue()))
    except BaseException as error:
        lost_peer = any(text in str(error) for text in ("closed by peer", "reset by peer", "Timed out waiting"))
        results.send(("peer" if lost_peer else "error", traceback.format_exc()))
    finally:
        results.close()
        for child in multiprocessing.active_children():  # loader processes
            child.kill()
        os._exit(0)


@pytest.fixture
def world():
    """The runner, as a fixture."""
    return run_world
