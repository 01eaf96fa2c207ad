"""Starting ranks on this machine and ending them: true exit codes, nothing left behind.

The ranks' launcher gets a session of its own, so that one signal reaches all of a job and nothing else. Does not know:
what ranks do; it looks for one file that they write when they succeed.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from vit_tp.config.folder import error_record, rank_log
from vit_tp.errors import ConfigError

LOST_PEER, FAILED = 18, 17  # exit codes of ranks, see process.py
PORTS = range(20000, 32000)  # below the kernel's ephemeral range: no outgoing connection takes one meanwhile
PR_SET_PDEATHSIG = 1


def run(
    argv: Sequence[str], environ: Mapping[str, str], result_file: Path, log_folder: Path, grace_s: float = 10
) -> int:
    """Start the ranks' launcher, pass signals on, wait, and leave no process behind.

    Args:
        argv: Command that starts all ranks and waits for them.
        environ: Its environment.
        result_file: File that a successful job writes anew.
        log_folder: Where a failing rank leaves its record.
        grace_s: Seconds between a signal, or a rank's failure, and SIGKILL to whatever is left, in seconds.

    Returns:
        0 where the job succeeded and its result is there; the first failing rank's code; 128 + n after signal n.
    """
    error_file = error_record(log_folder)
    error_file.unlink(missing_ok=True)  # an earlier job's
    before = _stamp(result_file)
    received: list[int] = []
    with _passed_on(received):
        process = subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent(os.getpid()),
        )
        is_over = False
        try:
            is_over = _wait(process, received, error_file, grace_s)
        finally:
            _end_session(process)
    if received:
        return 128 + received[0]
    code = _true_code(process.returncode, is_over, error_file)
    if code == 0 and _stamp(result_file) in (None, before):
        print(
            f"All ranks ended with code 0 but {result_file} was not written; the job did not reach its end. "
            f"Read {rank_log(log_folder, 0)}.",
            file=sys.stderr,
        )
        return 1
    return code


def first_failure(log_folder: Path) -> str:
    """Return one line on the rank that failed first, empty where no rank could say."""
    try:
        record = json.loads(error_record(log_folder).read_text())
    except (OSError, ValueError):
        return ""
    return f"rank {record['rank']}: {record['type']}: {record['message']}"


def free_port(wanted: int | None = None) -> int:
    """Return a port for the rendezvous that nobody listens on.

    Args:
        wanted: cluster.port; null draws one, so that two jobs on one machine do not meet.

    Raises:
        ConfigError: The wanted port is taken.
    """
    # Not from the run's seed: two runs of one seed at a time must differ.
    draws = random.SystemRandom().sample(PORTS, 100) if wanted is None else [wanted]
    for port in draws:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"cluster.port={wanted} is in use; ranks could not meet there. Use cluster.port=null for a free one."
    )


def gpu_listing() -> str:
    """Return what `nvidia-smi -L` says, empty where there is no such program or no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        # Slim containers have the device files without the program.
        names = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
        return "\n".join(f"GPU {name.removeprefix('nvidia')}: /dev/{name}" for name in names)
    try:
        return subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    except subprocess.TimeoutExpired:
        return ""


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _passed_on(received: list[int]) -> Iterator[None]:
    """Note signals that ask us to end instead of dying of them."""
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # A job started with nohup ignores SIGHUP: leave it so.
    earlier = {number: signal.getsignal(number) for number in asked if signal.getsignal(number) != signal.SIG_IGN}
    for number in earlier:
        signal.signal(number, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes], received: list[int], error_file: Path, grace_s: float) -> bool:
    """Return whether the launcher ended by itself; False: whoever is left has had its time."""
    deadline = None
    while not _has_ended(process.pid):
        if deadline is None and received:
            # SIGTERM whatever came: ranks end by it at once, where SIGINT would print a traceback for each.
            _signal_session(process.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
        elif deadline is None and error_file.exists():
            deadline = time.monotonic() + grace_s
        if len(received) > 1 or (deadline is not None and time.monotonic() > deadline):
            return False  # a second signal is impatience
        time.sleep(0.05)
    return True


def _has_ended(pid: int) -> bool:
    # WNOWAIT leaves the zombie: its pid, which names the session, cannot be given to another process meanwhile.
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_session(process: subprocess.Popen[bytes]) -> None:
    _signal_session(process.pid, signal.SIGKILL)
    process.wait()
    limit = time.monotonic() + 5
    while _signal_session(process.pid, 0) and time.monotonic() < limit:
        time.sleep(0.02)


def _signal_session(pid: int, number: int) -> bool:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _true_code(code: int, is_over: bool, error_file: Path) -> int:
    """Return the first failing rank's code from the launcher's.

    The launcher reports whichever rank it polls first, which may be one that only lost its peer, and where we had to
    kill it reports nothing.
    """
    if code in (0, LOST_PEER) or not is_over:
        try:
            return json.loads(error_file.read_text())["exit_code"]
        except (OSError, ValueError, KeyError):
            pass
    if code < 0:
        return 128 - code
    # DeepSpeed's launcher exits with minus the signal, of which 8 bits survive.
    return 128 + 256 - code if code > 256 - 64 else code


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _end_with_parent(parent: int) -> Callable[[], None] | None:
    """Return what the child runs before exec so that it gets SIGTERM when we end by SIGKILL (Linux only)."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)

    def ask_kernel() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)

    return ask_kernel
