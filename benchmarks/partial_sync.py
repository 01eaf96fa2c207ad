"""Loss curves of a small ViT on handwritten digits with partially synchronised activations.

    python benchmarks/partial_sync.py docs/partial_sync.png

Real runs of `vit-tp train experiment=digits_smoke` on tp=2, one for each share of the channels that is summed and each
seed; prints a table and draws the mean training loss of each share. Runs lie in --dir and are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FRACTIONS = [1.0, 0.5, 0.25, 0.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="PNG file to write")
    parser.add_argument("--dir", type=Path, default=Path("runs/partial_sync"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs for each share")
    options = parser.parse_args()
    print("| share of channels summed | train loss | validation loss | top-1 |")
    print("|---|---|---|---|")
    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for fraction in FRACTIONS:
        folders = [run(fraction, seed, options.dir) for seed in range(options.seeds)]
        results = [json.loads((folder / "result.json").read_text()) for folder in folders]
        columns = {key: [result[key] for result in results] for key in ("loss", "eval/loss", "eval/top1")}
        shown = [", ".join(f"{value:.{digits}f}" for value in columns[key]) for key, digits in (
            ("loss", 3), ("eval/loss", 3), ("eval/top1", 4))]  # fmt: skip
        print(f"| {fraction:g} | {' | '.join(shown)} |", flush=True)
        curves = [curve(folder) for folder in folders]
        steps = [step for step, _ in curves[0]]
        axes.plot(steps, [mean(points) for points in zip(*([loss for _, loss in c] for c in curves))],
                  label=f"p = {fraction:g}")  # fmt: skip
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    axes.set_title(f"vit_digits, tp=2, mean of {options.seeds} seeds")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(options.picture, dpi=120)


def run(fraction: float, seed: int, folder: Path) -> Path:
    """Train, unless that was done; return the run's folder."""
    name = f"p{fraction:g}_seed{seed}"
    if not (folder / name / "result.json").exists():
        subprocess.run(
            [
                *(sys.executable, "-m", "vit_tp", "train", "experiment=digits_smoke", "parallel=tp2"),
                *("recipe.sync=partial", f"recipe.sync_fraction={fraction:g}", f"run.seed={seed}"),
                *(f"run.dir={folder}", f"run.name={name}", "log.progress=false", "log.every_steps=5"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return folder / name


def curve(folder: Path) -> list[tuple[int, float]]:
    """Return (step, training loss) of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]


if __name__ == "__main__":
    main()
