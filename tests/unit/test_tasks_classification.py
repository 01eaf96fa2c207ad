"""The loss is torch's, the figures are scikit-learn's, and padding counts for nothing."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, top_k_accuracy_score
from torch.nn import functional as F

from vit_tp.config import Config
from vit_tp.errors import ConfigError, DataError
from vit_tp.tasks.classification import Classification, build_task


def logits_and_targets(count=37, num_classes=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, num_classes, generator=generator) * 3
    return logits, torch.randint(num_classes, (count,), generator=generator)


def evaluate(task, logits, targets, micro_batch_size):
    """Score in padded micro-batches, as evaluation does."""
    task.eval()
    task.reset()
    for first in range(0, len(targets), micro_batch_size):
        rows = slice(first, first + micro_batch_size)
        missing = micro_batch_size - len(targets[rows])
        padding = torch.randn(missing, logits.shape[1], dtype=logits.dtype)
        task(torch.cat([logits[rows], padding]), torch.cat([targets[rows], torch.full((missing,), -100)]))
    return Classification.metrics(task.sums)


def test_training_with_hard_targets():
    logits, targets = logits_and_targets()
    loss = Classification(12, smoothing=0.1)(logits, targets)
    assert torch.equal(loss, F.cross_entropy(logits, targets, label_smoothing=0.1)) and loss.shape == ()


def test_soft_targets_are_not_smoothed_again():
    logits, targets = logits_and_targets()
    soft = F.one_hot(targets, 12).float() * 0.9 + 0.1 / 12
    loss = Classification(12, smoothing=0.1)(logits, soft)
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets, label_smoothing=0.1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_have_a_loss_in_float32(dtype):
    logits, targets = logits_and_targets()
    logits = logits.to(dtype).requires_grad_()
    loss = Classification(12)(logits, targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, F.cross_entropy(logits.float(), targets))
    loss.backward()
    assert logits.grad.dtype == dtype


@pytest.mark.parametrize("soft", [False, True])
def test_float64_stays_float64(soft):
    logits, targets = logits_and_targets()
    task = Classification(12)
    loss = task(logits.double(), F.one_hot(targets, 12).float() if soft else targets)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, F.cross_entropy(logits.double(), targets))


@pytest.mark.parametrize("micro_batch_size", [1, 4, 37, 64])
@pytest.mark.parametrize("num_classes", [12, 6, 3])
def test_figures_are_scikit_learns_for_any_micro_batch(micro_batch_size, num_classes):
    logits, targets = logits_and_targets(num_classes=num_classes)
    found = evaluate(Classification(num_classes, smoothing=0.1), logits, targets, micro_batch_size)
    scores, labels = logits.numpy(), np.arange(num_classes)
    assert found["eval/count"] == 37 and type(found["eval/count"]) is int
    assert found["eval/loss"] == pytest.approx(F.cross_entropy(logits.double(), targets).item(), rel=1e-6)
    assert found["eval/top1"] == pytest.approx(accuracy_score(targets, scores.argmax(1)))
    top5 = top_k_accuracy_score(targets, scores, k=5, labels=labels) if num_classes > 5 else 1.0
    assert found["eval/top5"] == pytest.approx(top5)


def test_sums_of_replicas_add_up():
    logits, targets = logits_and_targets()
    whole = evaluate(Classification(12), logits, targets, 8)
    parts = []
    for rows in (slice(0, 20), slice(20, 37)):
        task = Classification(12)
        evaluate(task, logits[rows], targets[rows], 8)
        parts.append(task.sums)
    assert parts[0].dtype == torch.float64
    assert Classification.metrics(sum(parts)) == pytest.approx(whole, rel=1e-6)


def test_an_evaluation_batch_returns_the_mean_over_its_samples():
    logits, targets = logits_and_targets(8)
    task = Classification(12, smoothing=0.3).eval()
    targets[5:] = -100
    assert task(logits, targets).item() == pytest.approx(F.cross_entropy(logits[:5], targets[:5]).item())
    assert task(logits, torch.full((8,), -100)).item() == 0.0
    assert task.sums[0] == 5


def test_padded_rows_may_hold_anything():
    logits, targets = logits_and_targets(4)
    logits[3], targets[3] = torch.nan, -100
    found = Classification(12).eval()(logits, targets)
    assert torch.isfinite(found)


def test_equal_logits_are_decided_as_argmax_decides():
    logits = torch.zeros(3, 12)
    logits[2, 7:9] = 1.0
    found = evaluate(Classification(12), logits, torch.tensor([0, 5, 8]), 3)
    assert (found["eval/top1"], found["eval/top5"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


def test_a_diverged_model_is_never_right():
    found = evaluate(Classification(12), torch.full((4, 12), torch.nan), torch.arange(4), 4)
    assert found["eval/top1"] == found["eval/top5"] == 0 and np.isnan(found["eval/loss"])


def test_training_leaves_the_sums_alone_and_reset_clears_them():
    logits, targets = logits_and_targets()
    task = Classification(12)
    task(logits, targets)
    assert not task.sums.any()
    evaluate(task, logits, targets, 8)
    assert task.sums.any()
    task.reset()
    assert not task.sums.any()


def test_the_pipeline_finds_nothing_to_count():
    task = Classification(12)
    assert not list(task.parameters()) and not list(task.buffers()) and not task.state_dict()


def test_no_samples_no_figures():
    with pytest.raises(DataError, match="scored 0 samples"):
        Classification.metrics(torch.zeros(4, dtype=torch.float64))


def test_built_from_the_config():
    config = Config()
    config.recipe.smoothing = 0.2
    task = build_task(config, 12)
    assert (task.num_classes, task.smoothing) == (12, 0.2)
    config.task.name = "guessing"
    with pytest.raises(ConfigError, match=r"task\.name=guessing"):
        build_task(config, 12)
