"""`python -m vit_tp.report.probe`: does what is installed import here, and on which devices would ranks compute?

In a process of its own: DeepSpeed and MPI print and register much when they are imported. One JSON object on stdout.
"""

from __future__ import annotations

import contextlib
import io
import json
from importlib import import_module

PACKAGES = ("torch", "torchvision", "timm", "deepspeed", "mpi4py")


def probe() -> dict[str, object]:
    """Return why each package fails to import (those that do not), the GPUs that torch sees, and the MPI library."""
    failures = {name: reason for name in PACKAGES if (reason := _failure(name))}
    return {"failures": failures, **({} if "torch" in failures else _devices()), "mpi": _mpi()}


def _failure(name: str) -> str | None:
    try:
        import_module(name)
    except Exception as error:  # a package may fail in any way
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _devices() -> dict[str, object]:
    import torch
    import torch.distributed as dist

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "nccl": dist.is_nccl_available(),
        "gloo": dist.is_gloo_available(),
    }


def _mpi() -> str | None:
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # asking for a name must not start a job
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI.Get_library_version().splitlines()[0].strip("\x00 ")


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        found = probe()
    print(json.dumps(found))
