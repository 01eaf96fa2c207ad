"""How much memory do this machine and this process have? Asked of the kernel and of the driver.

Does not know: what ranks need (plan/).
"""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from vit_tp.plan.limits import DeviceMemory, Process, cpu_limits, gpu_limits

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # cgroup v1 says so with a number near 2^63


def device_memory(slots: Sequence[str], on_cpu: bool, max_ranks: int | None = None) -> DeviceMemory:
    """Return what ranks on this machine may take.

    Call it when the libraries that ranks import are loaded: they count in the limits of a process.

    Args:
        slots: One name for each rank here: its GPU, or any number on CPU.
        on_cpu: Whether these are no GPUs.
        max_ranks: Ranks that there are places for; None: any number.
    """
    if not on_cpu:
        limits = gpu_limits({name: size for name, size in _gpus().items() if name in slots})
        return DeviceMemory(limits, len(slots), max_ranks)
    shared = {"this machine's memory": total} if (total := _from_status(PROC / "meminfo", "MemTotal")) else {}
    shared |= {f"cgroup {name}": limit for name, limit in cgroup_limits(PROC, CGROUPS)}
    address, data = (_own_limit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    status = PROC / "self" / "status"
    own = Process(*(_from_status(status, name) for name in ("VmRSS", "VmData", "VmSize")))
    return DeviceMemory(cpu_limits(shared, address, data, own), len(slots), max_ranks)


def cgroup_limits(proc: Path, root: Path) -> Iterator[tuple[str, int]]:
    """Yield the memory limits of this process's control groups and of all above them: (name, bytes).

    Args:
        proc: /proc.
        root: /sys/fs/cgroup, of version 1, of version 2, or of both.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases, file = (root, root / "unified"), "memory.max"
        elif "memory" in controllers.split(","):
            bases, file = (root / "memory",), "memory.limit_in_bytes"
        else:
            continue
        for base in bases:
            folder = base / path.lstrip("/")
            while True:  # a container may see its own group as the root, under the name that the host gave it
                limit = _number(folder / file)
                if limit is not None and limit < UNLIMITED:
                    yield f"/{folder.relative_to(base)}".rstrip(".") or "/", limit
                if folder == base or base not in folder.parents:
                    break
                folder = folder.parent


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max"
        return None


def _own_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _from_status(file: Path, name: str) -> int:
    """Return a line of /proc in bytes, 0 where there is none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), 0)


def _gpus() -> dict[str, int]:
    """Return the bytes of each GPU by its number and by its UUID, empty where `nvidia-smi` does not say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    asked = [program, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False).stdout
    except subprocess.TimeoutExpired:
        return {}
    return gpu_sizes(listing)


def gpu_sizes(listing: str) -> dict[str, int]:
    """Return the bytes of each GPU by number and UUID from lines "0, GPU-1b2c, 81559", in MiB."""
    sizes = {}
    for line in listing.splitlines():
        number, uuid, size = (part.strip() for part in [*line.split(","), "", "", ""][:3])
        if size.isdigit():
            sizes |= {number: int(size) << 20, uuid: int(size) << 20}
    return sizes
