"""The rank's side of a launch: where its output goes, how it ends, and that it does not outlive its launcher.

Does not know: what the rank does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from vit_tp.config.atomic import create_atomically, write_atomically
from vit_tp.config.folder import error_record
from vit_tp.errors import VitTpError
from vit_tp.launch.local import FAILED, LOST_PEER

REFUSED = 2
# What gloo, NCCL and torch's store say on a rank whose peer went away: a consequence, never the cause.
LOST_PEER_TEXTS = (
    *("Connection closed by peer", "Connection reset", "Broken pipe", "Socket closed"),
    *("Timed out waiting", "Socket Timeout", "Connection refused", "Connection was likely closed", "recvValue failed"),
    *("client socket has timed out", "failed to connect to", "failed to recv", "Read error", "Write error"),
    *("NCCL communicator was aborted", "remote process exited", "ncclRemoteError", "ncclSystemError"),
)


def redirect_output(log_file: Path) -> tuple[TextIO, TextIO]:
    """Send everything this process prints, C++ included, to a file.

    Args:
        log_file: Appended to; its folder is made.

    Returns:
        Streams to the console that stdout and stderr were.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    console_out = os.fdopen(os.dup(1), "w", buffering=1)
    console_err = os.fdopen(os.dup(2), "w", buffering=1)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return console_out, console_err


def forget_failure(log_folder: Path) -> None:
    """Remove what an earlier job left; for rank 0 of ranks started by hand, before it works: others may be as early."""
    error_record(log_folder).unlink(missing_ok=True)


def guard(main: Callable[[], None], rank: int, log_folder: Path, console_err: TextIO) -> None:
    """Run a rank's work; where it fails, say so once and end the process at once.

    By os._exit, because torch swaps sys.stderr in its excepthook, and leaving by the usual way waits for loader
    threads and peers. A rank that only lost its peer says one line and lingers, so that the launcher's poll sees the
    cause before the consequence.

    Args:
        main: The work.
        rank: This process's rank.
        log_folder: Where the first rank to fail leaves its record.
        console_err: Where people look.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # libraries like to catch it; a rank must end by it
    try:
        main()
    except SystemExit as error:
        if error.code:
            _leave(error.code if isinstance(error.code, int) else 1, console_err)
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT, console_err)
    except VitTpError as error:
        # All ranks come to the same complaint: the first says it.
        noted = _note(log_folder, rank, error, REFUSED)
        if noted is None or noted["message"] != str(error):
            print(error, file=console_err)
        print(error, file=sys.stderr)
        _leave(REFUSED, console_err)
    except BaseException as error:
        trace = traceback.format_exc()
        if is_lost_peer(error):
            print(f"rank {rank} lost a peer: {type(error).__name__}: {_first_line(error)}", file=console_err)
            print(trace, file=sys.stderr, flush=True)
            time.sleep(3)
            _leave(LOST_PEER, console_err)
        noted = _note(log_folder, rank, error, FAILED)
        if noted is None or not _is_alike(noted, error):
            print(f"rank {rank} failed:\n{trace}", file=console_err, end="")
        else:
            print(f"rank {rank} failed as well: {type(error).__name__}: {_first_line(error)}", file=console_err)
        print(trace, file=sys.stderr)
        _leave(FAILED, console_err)


def is_lost_peer(error: BaseException) -> bool:
    """Say whether an exception is the echo of another rank's end."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in LOST_PEER_TEXTS)


def watch_parent(every_s: float = 0.5) -> None:
    """End this process when the process that started it has ended, from a thread of its own.

    Without it ranks whose launcher was killed by SIGKILL would wait for one another until a time limit.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        os._exit(LOST_PEER)

    threading.Thread(target=watch, name="watch_parent", daemon=True).start()


def _note(log_folder: Path, rank: int, error: BaseException, code: int) -> dict[str, Any] | None:
    """Write the record of the first failure; return the one of another rank that was there before, None otherwise."""
    path = error_record(log_folder)
    record = {
        "rank": rank,
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "exit_code": code,
    }
    text = json.dumps(record, indent=1)
    try:
        try:
            create_atomically(path, text)
        except FileExistsError:
            noted = json.loads(path.read_text())
            if noted["rank"] != rank:
                return noted
            write_atomically(path, text)  # a rank fails once: an earlier job's, which rank 0 has not yet removed
    except (OSError, ValueError, KeyError, TypeError):
        pass  # a full disk or a torn record must not hide the message
    return None


def _is_alike(noted: dict[str, Any], error: BaseException) -> bool:
    """Say whether two failures differ in numbers only: ranks that run out of memory have each its own device."""
    messages = {re.sub(r"\d+", "", text) for text in (noted["message"], str(error))}
    return noted["type"] == type(error).__name__ and len(messages) == 1


def _first_line(error: BaseException) -> str:
    return textwrap.shorten(str(error).strip().split("\n")[0], 160, placeholder=" ...")


def _leave(code: int, console_err: TextIO) -> None:
    for child in multiprocessing.active_children():  # a loader process that waits to hand over would outlive this one
        child.kill()
    for stream in (sys.stdout, sys.stderr, console_err):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
