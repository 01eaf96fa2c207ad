"""What is the answer about a sample that was looked at several times?

The mean of the class probabilities of its views (clips and crops), as SlowFast and TimeSformer evaluate videos.

Does not know: what a view is, figures.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from vit_tp.parallel.columns import Columns


def average_views(logits: Tensor, views: int, columns: Columns) -> Tensor:
    """Return logits whose softmax is the mean of the views' softmax, outside autograd.

    Args:
        logits: (B, ceil(K/tp)), the views of a sample in rows that follow one another.
        views: V, which divides B.
        columns: Which classes are this rank's.

    Returns:
        (B/V, ceil(K/tp)), padding zero.
    """
    if views == 1:
        return logits
    x = columns.without_padding(logits)
    x = x - columns.highest(x).unsqueeze(1)
    log_probabilities = x - columns.sum(x.exp().sum(1)).log().unsqueeze(1)
    mean = log_probabilities.unflatten(0, (-1, views)).logsumexp(1) - math.log(views)
    return F.pad(mean, (0, columns.held - columns.own)) if columns.held > columns.own else mean
