"""How did the run end, for a program and for a person?

result.json and the closing lines on the console. Does not know: torch (the command line reads results in a light
process), how the figures came about.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vit_tp.errors import DataError
from vit_tp.report.numbers import from_plain, to_plain

RESULT_FILE = "result.json"
_PLACES = {
    "config": "config.yaml",
    "metrics": "metrics.jsonl",
    "plot": "plots/training.png",
    "tensorboard": "tensorboard",
    "weights": "export",
    "result": RESULT_FILE,
}


def write_result(run_dir: Path, result: dict[str, Any]) -> Path:
    """Write <run>/result.json; a reader sees the whole file or none.

    Args:
        run_dir: Folder of the run; made if missing.
        result: Figures, text, and dicts of such. summary_lines shows eval/top1, eval/top5, eval/loss, eval/count, loss,
            samples_per_s, wall_s, steps and world_size, where they are there.

    Returns:
        Path of the file.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / RESULT_FILE
    unfinished = path.with_name(f".{RESULT_FILE}.{os.getpid()}")
    unfinished.write_text(json.dumps(to_plain(result), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    return path


def read_result(run_dir: Path) -> dict[str, Any]:
    """Return what write_result wrote.

    Raises:
        DataError: The run has no result, or not one of ours.
    """
    path = run_dir / RESULT_FILE
    if not path.exists():
        raise DataError(f"{path} does not exist; the run has not finished. Finish it with the command that began it.")
    try:
        return from_plain(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON ({error}); it cannot be read. Remove it and run again.") from error


def summary_lines(run_dir: Path, result: dict[str, Any]) -> list[str]:
    """Return the closing lines that a person sees: figures first, then where everything lies.

    Args:
        run_dir: Folder of the run.
        result: As given to write_result; figures and files that are not there are left out.
    """
    figures = {
        "accuracy": _accuracy(result),
        "loss": _losses(result),
        "throughput": _formatted(result, "samples_per_s", "{:,.0f} samples/s"),
        "time": _time(result),
    }
    places = {name: _shorter(run_dir / place) for name, place in _PLACES.items() if (run_dir / place).exists()}
    shown = {name: text for name, text in (figures | places).items() if text}
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
