"""How did the run end, for a program and for a person?

result.json and the closing lines on the console. Does not know: torch (the command line reads results in a light
process), how the figures came about.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_tp.config import RunFolder
from vit_tp.config.atomic import write_atomically
from vit_tp.errors import DataError
from vit_tp.report.numbers import from_plain, to_plain


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write result.json, or the figures of an evaluation; a reader sees the whole file or none.

    Args:
        path: The file; its folder is made if missing.
        result: Figures, text, and dicts of such. summary_lines shows eval/top1, eval/top5, eval/loss, eval/count, loss,
            samples_per_s, wall_s, steps and world_size, where they are there.
    """
    write_atomically(path, json.dumps(to_plain(result), indent=2, allow_nan=False) + "\n")


def read_result(path: Path) -> dict[str, Any]:
    """Return what write_result wrote.

    Raises:
        DataError: There is no such file, or not one of ours.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; the run has not finished. Finish it with the command that began it.")
    try:
        return from_plain(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON ({error}); it cannot be read. Remove it and run again.") from error


def run_summary(run_folder: RunFolder, result: dict[str, Any]) -> list[str]:
    """Return the closing lines of a training: figures first, then where everything lies.

    Args:
        run_folder: Files that are not there are left out.
        result: As given to write_result; figures that are not there are left out.
    """
    places = {
        "config": run_folder.config,
        "metrics": run_folder.metrics,
        "plot": run_folder.plot,
        "tensorboard": run_folder.tensorboard,
        "weights": run_folder.export,
        "weights, no export": run_folder.partial,
        "result": run_folder.result,
    }
    return summary_lines(result, places)


def summary_lines(result: dict[str, Any], places: Mapping[str, Path]) -> list[str]:
    """Return figures and places, each on a line with its name, aligned.

    Args:
        result: As given to write_result; figures that are not there are left out.
        places: Files and folders; what is not there is left out.
    """
    figures = {
        "accuracy": _accuracy(result),
        "loss": _losses(result),
        "throughput": _formatted(result, "samples_per_s", "{:,.0f} samples/s"),
        "time": _time(result),
        "unreadable": _unreadable(result),
    }
    found = {name: _shorter(place) for name, place in places.items() if place.exists()}
    shown = {name: text for name, text in (figures | found).items() if text}
    width = max(map(len, shown), default=0)
    return [f"{name:<{width}}  {text}" for name, text in shown.items()]


def _formatted(result: dict[str, Any], key: str, form: str) -> str:
    return form.format(result[key]) if result.get(key) is not None else ""


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _accuracy(result: dict[str, Any]) -> str:
    text = _joined(_formatted(result, "eval/top1", "top-1 {:.4f}"), _formatted(result, "eval/top5", "top-5 {:.4f}"))
    count = _formatted(result, "eval/count", " on {:,} validation samples")
    return text + count if text else ""


def _losses(result: dict[str, Any]) -> str:
    return _joined(_formatted(result, "loss", "train {:.4f}"), _formatted(result, "eval/loss", "validation {:.4f}"))


def _unreadable(result: dict[str, Any]) -> str:
    count = result.get("unreadable")
    return f"{count:,} samples were replaced or left out; log/unreadable_*.jsonl names them" if count else ""


def _time(result: dict[str, Any]) -> str:
    if result.get("wall_s") is None:
        return ""
    minutes, seconds = divmod(result["wall_s"], 60)
    text = f"{minutes:.0f} min {seconds:.0f} s" if minutes else f"{seconds:.1f} s"
    steps = _formatted(result, "steps", "{:,} steps")
    ranks = _formatted(result, "world_size", "{:,} ranks")
    return _joined(text, steps, ranks)


def _shorter(path: Path) -> str:
    return min(str(path.absolute()), os.path.relpath(path), key=len)
