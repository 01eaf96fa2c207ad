"""What loss trains a classifier, and what figures judge it?

Cross-entropy in training; in evaluation also sums over samples, since means of micro-batches would weigh padded ones
wrongly and the pipeline hands back nothing but a loss. Sums of several replicas are added, then turned into figures.

Logits may be whole, or this rank's columns where the classifier is cut; then they are never gathered, and every rank
of the columns finds the same numbers.

Does not know: replicas (the caller adds sums), the model, where targets come from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vit_tp.config import Config, eval_views
from vit_tp.errors import ConfigError, DataError
from vit_tp.parallel.columns import Columns
from vit_tp.parallel.cross_entropy import cross_entropy
from vit_tp.tasks.views import average_views

_HALF_TYPES = (torch.bfloat16, torch.float16)


class Classification(nn.Module):
    """Loss of the last pipeline stage. A module, so that it follows train() and eval(); it holds no parameters.

    Args:
        num_classes: Classes, K.
        smoothing: Label smoothing of hard targets in training. Soft targets come smoothed from the mixer.
        tp_group: The ranks that the classes are cut over; None where logits are whole.
        views: Rows that one sample makes in evaluation; they follow one another.
    """

    def __init__(
        self, num_classes: int, smoothing: float = 0.0, tp_group: ProcessGroup | None = None, views: int = 1
    ) -> None:
        super().__init__()
        self.views = views
        self.num_classes = num_classes
        self.smoothing = smoothing
        self.columns = Columns.over(tp_group, num_classes)
        # A plain attribute, not a buffer: the pipeline would count a buffer among the stage's weights.
        self.sums: Tensor
        self.reset()

    def reset(self) -> None:
        """Start a new evaluation: sums = (samples, loss, top-1 correct, top-5 correct), float64."""
        self.sums = torch.zeros(4, dtype=torch.float64)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a micro-batch; in evaluation add it to the sums too.

        Args:
            logits: (B, K), or (B, ceil(K/tp)) where they are cut. Half types are computed in float32: their own loss
                would have few bits.
            targets: (B,) int64, negative for a padded row (evaluation); or soft (B, K) float (training).

        Returns:
            Scalar, float32 (float64 for float64 logits). In evaluation without smoothing, over rows that are not
            padded, 0 if all are.
        """
        if logits.dtype in _HALF_TYPES:
            logits = logits.float()
        if not self.training:
            return self._evaluate(logits, targets)
        smoothing = 0.0 if targets.is_floating_point() else self.smoothing
        return cross_entropy(logits, targets, self.columns, smoothing)

    @torch.no_grad()
    def _evaluate(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = average_views(logits, self.views, self.columns), targets[:: self.views]
        # where and clamp instead of indexing with the mask, which would make the host wait for the device
        is_sample = targets >= 0  # (B,)
        targets = targets.clamp(min=0)
        losses = cross_entropy(logits, targets, self.columns, reduction="none")
        losses = torch.where(is_sample, losses, 0.0)
        rank = _rank_of_target(logits, targets, self.columns)
        is_top1 = is_sample & (rank < 1)
        is_top5 = is_sample & (rank < min(5, self.num_classes))
        added = [values.sum(dtype=torch.float64) for values in (is_sample, losses, is_top1, is_top5)]
        self.sums = self.sums.to(logits.device) + torch.stack(added)
        return losses.sum() / is_sample.sum().clamp(min=1)

    @staticmethod
    def metrics(sums: Tensor) -> dict[str, float]:
        """Turn sums into figures.

        Args:
            sums: (samples, loss, top-1 correct, top-5 correct), added over all replicas.

        Returns:
            eval/loss, eval/top1 and eval/top5 in 0 .. 1, eval/count.

        Raises:
            DataError: No sample was scored.
        """
        count, loss, top1, top5 = sums.tolist()
        if not count:
            raise DataError("The evaluation scored 0 samples, so it has no accuracy. Use a split that holds samples.")
        means = {"eval/loss": loss / count, "eval/top1": top1 / count, "eval/top5": top5 / count}
        return means | {"eval/count": int(count)}


def build_task(config: Config, num_classes: int, tp_group: ProcessGroup | None = None) -> Classification:
    """Build the task that the config names.

    Args:
        config: The whole config; task and recipe.smoothing are read.
        num_classes: Classes, K.
        tp_group: The ranks that the classes are cut over; None where logits are whole.

    Raises:
        ConfigError: No task has this name.
    """
    if config.task.name != "classification":
        raise ConfigError(
            f"task.name={config.task.name} is not a task that vit_tp knows; it knows classification. "
            f"Use task.name=classification."
        )
    return Classification(num_classes, config.recipe.smoothing, tp_group, eval_views(config))


def _rank_of_target(logits: Tensor, targets: Tensor, columns: Columns) -> Tensor:
    """Return how many classes stand before the target, (B,) int64.

    Of equal logits the lower class stands first, as in argmax. topk leaves that open, and half types tie often: the
    accuracy would depend on the size of the micro-batch. NaN stands before everything, so it never scores.
    """
    logits = columns.without_padding(logits)
    own = columns.sum(columns.pick(logits, targets)).unsqueeze(1)  # (B, 1), of whichever rank has it
    classes = torch.arange(columns.first, columns.first + columns.own, device=logits.device)
    is_before = classes < targets.unsqueeze(1)
    return columns.sum((~(logits <= own) | ((logits == own) & is_before)).sum(dim=1))
