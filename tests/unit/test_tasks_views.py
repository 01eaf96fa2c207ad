"""The answer about a sample that was looked at several times, with whole and with cut classes."""

import pytest
import torch

from tests.worlds import run_world
from vit_tp.parallel.columns import Columns
from vit_tp.tasks.classification import Classification
from vit_tp.tasks.views import average_views

VIEWS, SAMPLES, K = 3, 4, 7


def views_of(seed=0):
    return torch.randn(SAMPLES * VIEWS, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4


def test_the_answer_is_the_mean_of_the_probabilities():
    logits = views_of()
    wanted = logits.softmax(1).view(SAMPLES, VIEWS, K).mean(1)
    torch.testing.assert_close(average_views(logits, VIEWS, Columns(K)).softmax(1), wanted, rtol=1e-12, atol=0)
    assert average_views(logits, 1, Columns(K)) is logits


def test_figures_count_samples_and_not_views():
    logits, targets = views_of(), torch.tensor([1, 4, 0, -100])
    task = Classification(K, views=VIEWS).eval()
    task(logits, targets.repeat_interleave(VIEWS))
    mean = logits.softmax(1).view(SAMPLES, VIEWS, K).mean(1)[:3]
    figures = task.metrics(task.sums)
    assert figures["eval/count"] == 3
    assert figures["eval/loss"] == pytest.approx(-mean.log()[range(3), targets[:3]].mean().item(), rel=1e-12)
    assert figures["eval/top1"] == pytest.approx((mean.argmax(1) == targets[:3]).double().mean().item())


def test_in_training_every_row_counts():
    logits, targets = views_of(), torch.arange(SAMPLES * VIEWS) % K
    loss = Classification(K, views=VIEWS).train()(logits, targets)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, targets))


def averaged_over_cut_classes() -> torch.Tensor:
    import torch.distributed as dist

    columns = Columns.over(dist.group.WORLD, K)
    padded = torch.nn.functional.pad(views_of(), (0, columns.tp_size * columns.held - K))
    own = padded[:, columns.tp_rank * columns.held :][:, : columns.held]
    return columns.gather(average_views(own.contiguous(), VIEWS, columns))


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_cut_classes_give_the_same(tp):
    wanted = average_views(views_of(), VIEWS, Columns(K))
    for found in run_world(averaged_over_cut_classes, tp):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
