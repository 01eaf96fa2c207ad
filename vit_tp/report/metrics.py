"""Where do the figures of a run go, step by step?

Into <run>/metrics.jsonl, one JSON object a line, and into TensorBoard event files beside it. Does not know: who
computed the figures, ranks (only the reporting one makes a writer).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from vit_tp.config import RunFolder
from vit_tp.report.numbers import from_plain, to_plain


class MetricsWriter:
    """Appends figures to the files of a run.

    Args:
        run_folder: The run's folder; made if missing.
        tensorboard: Whether to write TensorBoard event files too.
    """

    def __init__(self, run_folder: Path, tensorboard: bool) -> None:
        run_folder.mkdir(parents=True, exist_ok=True)
        path = RunFolder(run_folder).metrics
        self._file = path.open("a", encoding="utf-8")
        if _is_torn(path):  # a killed run may leave half a line: the next one must not continue it
            self._file.write("\n")
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            self._events = SummaryWriter(str(RunFolder(run_folder).tensorboard))

    def write(self, step: int, epoch: float, **numbers: Any) -> None:
        """Write one line, and each number as a TensorBoard scalar.

        Args:
            step: Optimizer step.
            epoch: Passes over the training set so far.
            numbers: For example loss, lr, grad_norm, samples_per_s, or **{"eval/top1": ...}. Python, numpy or torch
                scalars. NaN and infinities are written as the strings "nan", "inf" and "-inf".
        """
        line = to_plain({"step": step, "epoch": epoch, **numbers})
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in numbers.items():
                self._events.add_scalar(name if "/" in name else f"train/{name}", float(value), step)
            self._events.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        self.close()


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Return the lines of <run>/metrics.jsonl in order; none if there is no such file.

    A line that a killed run left unfinished is passed over.

    Args:
        run_folder: The run's folder.

    Returns:
        One dict a line, with step, epoch and the numbers; NaN and infinities are floats again.
    """
    path = RunFolder(run_folder).metrics
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(from_plain(json.loads(text)))
        except json.JSONDecodeError:
            continue
    return lines


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return False
        file.seek(-1, 2)
        return file.read() != b"\n"
