"""What did the run look like?

One picture of <run>/metrics.jsonl. Does not know: where the figures came from, any display.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vit_tp.config import RunFolder
from vit_tp.config.atomic import replacing
from vit_tp.errors import DataError
from vit_tp.report.metrics import read_metrics

_TRAIN, _EVAL = "#4477aa", "#cc3311"  # told apart also by the colour-blind (Paul Tol, "bright")
_FONT = {"axes": 9, "ticks": 8, "title": 10}


def plot_run(run_folder: Path) -> Path:
    """Draw loss, accuracy, learning rate and gradient norm over the steps.

    Args:
        run_folder: The run's folder, with its metrics.jsonl.

    Returns:
        <run>/plots/training.png.

    Raises:
        DataError: There are no metrics yet.
    """
    folder = RunFolder(run_folder)
    lines = read_metrics(run_folder)
    if not lines:
        raise DataError(f"{folder.metrics} holds no line; there is nothing to draw. Train the run first.")
    # The object interface instead of pyplot: no global state, and never a window.
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    (loss, top1), (lr, norm) = figure.subplots(2, 2, sharex=True)

    _draw(loss, lines, "loss", _TRAIN, "training, with the recipe's smoothing and mixing")
    _draw(loss, lines, "eval/loss", _EVAL, "validation, plain", marker="o")
    loss.set_ylabel("cross-entropy loss")
    loss.legend(frameon=False, fontsize=_FONT["ticks"])

    last = _draw(top1, lines, "eval/top1", _EVAL, "validation", marker="o")
    top1.set_ylabel("top-1 accuracy")
    if last is not None:
        top1.legend(frameon=False, fontsize=_FONT["ticks"], title=f"last: {last:.4f}", title_fontsize=_FONT["ticks"])

    _draw(lr, lines, "lr", _TRAIN, "learning rate")
    lr.set_ylabel("learning rate")
    lr.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)

    _draw(norm, lines, "grad_norm", _TRAIN, "gradient norm")
    norm.set_ylabel("gradient norm, before clipping")

    for axes in (loss, top1, lr, norm):
        _finish(axes)
    for axes in (lr, norm):
        axes.set_xlabel("optimizer step", fontsize=_FONT["axes"])
    figure.suptitle(run_folder.absolute().name, fontsize=_FONT["title"])

    with replacing(folder.plot) as unfinished:
        figure.savefig(unfinished, dpi=200)
    return folder.plot


def _draw(
    axes: Axes, lines: list[dict[str, Any]], key: str, colour: str, label: str, marker: str | None = None
) -> float | None:
    """Draw one figure over the steps and return its last value. Of a step written twice the later line counts."""
    by_step = {line["step"]: line[key] for line in lines if line.get(key) is not None}
    if not by_step:
        return None
    steps = sorted(by_step)
    values = [by_step[step] for step in steps]
    axes.plot(steps, values, color=colour, label=label, marker=marker, markersize=3, linewidth=1.2)
    return values[-1]


def _finish(axes: Axes) -> None:
    axes.yaxis.label.set_fontsize(_FONT["axes"])
    axes.tick_params(labelsize=_FONT["ticks"])
    axes.yaxis.get_offset_text().set_fontsize(_FONT["ticks"])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.set_axisbelow(True)
