"""The same command on CUDA devices: losses as on the CPU, on as many devices as there are. Run by name:

./launch/test.sh -m gpu tests/gpu
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
COMMAND = [
    sys.executable,
    "-m",
    "vit_tp",
    "train",
    "experiment=digits_smoke",
    "recipe.max_steps=20",
    "log.every_steps=1",
]


def losses(folder: Path, name: str, *words: str) -> list[float]:
    words = (*words, f"run.name={name}", "compute.micro_batch_size=32", "log.progress=false")
    done = subprocess.run([*COMMAND, *words], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)])
def test_losses_are_those_of_the_cpu(tmp_path, tp, pp, dp):
    if torch.cuda.device_count() < tp * pp * dp:
        pytest.skip(f"needs {tp * pp * dp} devices")
    cpu = losses(tmp_path, "cpu", "parallel=single", "compute.device=cpu")
    grid = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.dp={dp}"]
    cuda = losses(tmp_path, "cuda", *grid, "compute.device=cuda")
    assert cuda == pytest.approx(cpu, rel=1e-3)  # other kernels, and TF32 where it is on


@pytest.mark.parametrize(
    ("tp", "pp", "words"),
    [
        (1, 1, ["compute.recompute=norm_act"]),
        (1, 1, ["compute.recompute=block"]),
        (2, 1, ["parallel.sequence=true"]),
        (2, 1, ["parallel.sequence=true", "compute.recompute=norm_act"]),
        (2, 2, ["parallel.sequence=true", "compute.recompute=block"]),
        (1, 2, ["parallel.schedule=dualpipev"]),
        (2, 1, ["recipe.sync=partial", "recipe.sync_fraction=1"]),
    ],
)
def test_divided_and_recomputed_activations_change_nothing(tmp_path, tp, pp, words):
    if torch.cuda.device_count() < tp * pp:
        pytest.skip(f"needs {tp * pp} devices")
    grid = [f"parallel.tp={tp}", f"parallel.pp={pp}", "compute.device=cuda"]
    plain, other = losses(tmp_path, "plain", *grid), losses(tmp_path, "other", *grid, *words)
    assert other == pytest.approx(plain, rel=1e-3)


def test_batches_come_to_the_device_one_ahead_and_whole():
    """The copy of the next batch runs beside the work on this one; nothing is overwritten under way."""
    from vit_tp.data.loader import Batch
    from vit_tp.train.prefetch import on_device

    device = torch.device("cuda", 0)
    given = [torch.randint(0, 255, (4, 3, 256, 256), dtype=torch.uint8).pin_memory() for _ in range(20)]
    drawn = []

    def batches():
        for images in given:
            drawn.append(len(drawn))
            yield Batch(images, torch.zeros(4), torch.zeros(4))

    weights = torch.randn(4096, 4096, device=device)
    for index, batch in enumerate(on_device(batches(), device)):
        weights @ weights  # keeps the stream busy, so that a copy without an order would show
        assert batch.images.device == device and torch.equal(batch.images.cpu(), given[index])
        assert len(drawn) == min(index + 2, len(given))
