"""What moves on the console while a run trains?

One bar of tqdm. Does not know: ranks (the caller enables it on one), files.
"""

from __future__ import annotations

from typing import TextIO

from tqdm import tqdm

_TERMINAL_INTERVAL_S = 0.2
_FILE_INTERVAL_S = 30.0  # in a log file every refresh is a new line


class _Bar(tqdm):
    monitor_interval = 0  # no watcher thread in a process that forks loader workers


class Progress:
    """Progress bar over the optimizer steps of a run.

    Args:
        total_steps: Optimizer steps of the whole run.
        stream: Where to draw, for example sys.stderr.
        enabled: Draw nothing at all if False.
        first_step: Steps already done when a run continues.
    """

    def __init__(self, total_steps: int, stream: TextIO, enabled: bool, first_step: int = 0) -> None:
        is_terminal = bool(getattr(stream, "isatty", lambda: False)())
        self._shown: dict[str, str] = {}
        self._bar = _Bar(
            total=total_steps,
            initial=first_step,
            file=stream,
            disable=not enabled,
            desc="train",
            unit="step",
            mininterval=_TERMINAL_INTERVAL_S if is_terminal else _FILE_INTERVAL_S,
            miniters=1,
            dynamic_ncols=is_terminal,
        )

    def update(
        self,
        step: int,
        loss: float | None = None,
        lr: float | None = None,
        samples_per_s: float | None = None,
        **evaluated: float,
    ) -> None:
        """Move the bar.

        Args:
            step: Optimizer steps done so far.
            loss: Training loss.
            lr: Learning rate.
            samples_per_s: Training samples per second over all ranks.
            evaluated: Figures of the last evaluation, for example **{"eval/top1": 0.97}; shown until newer ones come.
        """
        news = {
            "loss": None if loss is None else f"{loss:.3f}",
            "lr": None if lr is None else f"{lr:.1e}",
            "samples/s": None if samples_per_s is None else f"{samples_per_s:.0f}",
        }
        self._shown.update({name: text for name, text in news.items() if text is not None})
        self._shown.update({name: f"{value:.3f}" for name, value in evaluated.items()})
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Draw the bar a last time and leave it."""
        self._bar.close()
