"""Where everything of a run lies.

    <run.dir>/<run.name>/
      config.yaml            every knob; making it claims the folder
      metrics.jsonl          one object a logged step; there, and empty, as soon as a job has begun
      tensorboard/           the same as event files
      plots/training.png     the same as a picture
      export/                weights under timm's names (checkpoint/export.py says which files)
      partial/               instead of export/, where they are a model on the run's own tp alone (recipe.sync=partial)
      classes.json           names of the classes in the order of their numbers, where the data have names
      result.json            how the run ended; it has finished where this is there
      log/                   a log folder, see below
      eval/<tag>.yaml        configuration of an evaluation
      eval/<tag>.json        its figures
      log/eval_<tag>/        its log folder

    a log folder
      rank_00000.txt ...     all that a rank printed
      error.json             the first rank that failed, and how
      unreadable_train_00000.jsonl ...  samples of a split that a rank could not read, and why

Does not know: what is in the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """Names of what a run leaves behind; asking for one makes nothing.

    Args:
        path: The run's folder.
    """

    path: Path

    def __str__(self) -> str:
        """Return the path, for messages and command lines."""
        return str(self.path)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def plot(self) -> Path:
        return self.path / "plots" / "training.png"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def partial(self) -> Path:
        return self.path / "partial"

    @property
    def weights(self) -> Path:
        """The folder that holds this run's weights."""
        return self.partial if self.partial.exists() else self.export

    @property
    def classes(self) -> Path:
        return self.path / "classes.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def log(self) -> Path:
        return self.path / "log"

    def eval_config(self, tag: str) -> Path:
        return self.path / "eval" / f"{tag}.yaml"

    def eval_result(self, tag: str) -> Path:
        return self.path / "eval" / f"{tag}.json"

    def eval_log(self, tag: str) -> Path:
        return self.log / f"eval_{tag}"


def rank_log(log_folder: Path, rank: int) -> Path:
    """Return the file with all that a rank printed."""
    return log_folder / f"rank_{rank:05d}.txt"


def error_record(log_folder: Path) -> Path:
    """Return the file that the first failing rank writes."""
    return log_folder / "error.json"


def unreadable_log(log_folder: Path, split: str, rank: int) -> Path:
    """Return the file that names the samples of a split that a rank could not read."""
    return log_folder / f"unreadable_{split}_{rank:05d}.jsonl"
