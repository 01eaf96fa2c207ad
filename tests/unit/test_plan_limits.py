"""What ranks may take: read from files that look like a kernel's, and divided."""

from pathlib import Path

import pytest

from vit_tp.launch.memory import cgroup_limits, gpu_sizes
from vit_tp.plan.limits import CUDA_BYTES, Process, cpu_limits, gpu_limits

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        ("0::/user/job\n", {"user/job/memory.max": "max\n", "user/memory.max": f"{4 * GIB}\n"}, [4 * GIB]),
        ("0::/user/job\n", {"user/job/memory.max": f"{GIB}\n", "user/memory.max": f"{4 * GIB}\n"}, [GIB, 4 * GIB]),
        ("0::/\n", {"memory.max": f"{GIB}\n"}, [GIB]),  # a container with its own namespace
        ("0::/not/seen/in/here\n", {"memory.max": f"{GIB}\n"}, [GIB]),
        ("4:cpu:/x\n5:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": f"{GIB}\n"}, [GIB]),
        ("5:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712\n"}, []),
        ("0::/\n", {}, []),
    ],
)
def test_limits_of_control_groups(own, files, limits, tmp_path):
    proc, root = write(tmp_path / "proc", {"self/cgroup": own}), write(tmp_path / "cgroup", files)
    assert [limit for _, limit in cgroup_limits(proc, root)] == limits


def test_no_control_groups_at_all(tmp_path):
    assert list(cgroup_limits(tmp_path, tmp_path)) == []


def test_ranks_share_a_host_and_not_what_each_process_may_take():
    own = Process(resident=GIB, data=GIB, address=4 * GIB)
    memory, address, data = cpu_limits({"memory": 64 * GIB}, 16 * GIB, 8 * GIB, own)
    assert memory.room(4) == 16 * GIB - memory.taken < memory.room(2)
    assert GIB < memory.taken < 2 * GIB and not memory.counts_untouched
    assert address.room(4) == address.room(1) == 16 * GIB - address.taken and address.taken > 4 * GIB
    assert data.room(1) == 8 * GIB - data.taken and data.counts_untouched
    assert address.room(1) > 0 and cpu_limits({}, GIB, None, own)[0].room(1) == 0
    assert cpu_limits({}, None, None, own) == ()


def test_the_smallest_gpu_counts():
    sizes = gpu_sizes("0, GPU-1b2c, 81559\n1, GPU-3d4e, 40960\n2, GPU-5f6a, [N/A]\n")
    assert sizes["0"] == sizes["GPU-1b2c"] == 81559 * 2**20 and "2" not in sizes
    (limit,) = gpu_limits({name: sizes[name] for name in ("0", "1")})
    assert limit.name == "GPU 1" and limit.room(8) == 40960 * 2**20 - CUDA_BYTES
    assert gpu_limits({}) == () and gpu_sizes("") == {}
