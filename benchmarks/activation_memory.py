"""Peak memory of a rank at high resolution, cut and uncut: real processes, real steps, one table.

    python benchmarks/activation_memory.py --img-size 1024

Each case is a gloo world of its own on this machine: fp32, ViT-S/16, one image a micro-batch, through
`vit_tp.pipeline` and the engine. The peak is the kernel's (VmHWM) over the steps behind the first, less what the rank
held before them: activations, gradients and their workspace, not weights and imports.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp

CASES = [
    ("tp=1", 1, "exact", "none"),
    ("tp=1, block", 1, "exact", "block"),
    ("tp=2", 2, "exact", "none"),
    ("tp=2, sequence", 2, "sequence", "none"),
    ("tp=2, sequence, norm_act", 2, "sequence", "norm_act"),
    ("tp=2, sequence, block", 2, "sequence", "block"),
]
M_MMAP_THRESHOLD = -3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224", help="a timm model name")
    parser.add_argument("--img-size", type=int, default=1024, help="height and width in pixels")
    parser.add_argument("--steps", type=int, default=2, help="steps, at least 2: the first is not measured")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps} leaves no step to measure behind the first; use 2 or more")
    tokens = (options.img_size // 16) ** 2 + 1
    print(f"{options.model}, {options.img_size} x {options.img_size} ({tokens:,} tokens), one image, fp32\n")
    print("| cut | peak of a rank beyond its weights | against tp=1 | seconds a step |")
    print("|---|---|---|---|")
    first = None
    for name, tp, region, recompute in CASES:
        peak, seconds = run(tp, region, recompute, options)
        first = first or peak
        print(f"| {name} | {peak / 2**20:,.0f} MiB | {peak / first:.2f} | {seconds:.1f} |", flush=True)


def run(tp: int, region: str, recompute: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return the largest peak over the ranks of one world in bytes, and the last step's seconds."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank, (tp, region, recompute, options, folder), nprocs=tp, start_method="spawn")
        found = [torch.load(Path(folder) / f"{index}.pt") for index in range(tp)]
    return max(peak for peak, _ in found), max(seconds for _, seconds in found)


def rank(index: int, tp: int, region: str, recompute: str, options: argparse.Namespace, folder: str) -> None:
    os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(tp), LOCAL_SIZE=str(tp))
    os.environ["DS_ACCELERATOR"] = "cpu"
    import timm
    import torch.distributed as dist

    import vit_tp

    # Memory that is free is to count as free: beyond this size every tensor has pages of its own.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=index, world_size=tp)
    with torch.device("meta"):
        model = timm.create_model(options.model, img_size=options.img_size, num_classes=10)
    topology = vit_tp.Topology(pp=1, dp=1, tp=tp)
    loss_fn = torch.nn.functional.cross_entropy
    pipe = vit_tp.pipeline(model, topology, loss_fn, region=region, recompute=recompute)
    engine = vit_tp.initialize(
        pipe,
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
    )
    batch = torch.randn(1, 3, options.img_size, options.img_size), torch.zeros(1, dtype=torch.int64)
    engine.train_batch(iter([batch]))  # moments and buckets are there from now on
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    seconds = 0.0
    for _ in range(options.steps - 1):
        started = time.perf_counter()
        engine.train_batch(iter([batch]))
        seconds = time.perf_counter() - started
    torch.save((peak() - before, seconds), Path(folder) / f"{index}.pt")
    dist.barrier()
    dist.destroy_process_group()


def resident() -> int:
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
