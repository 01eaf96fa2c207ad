"""The learning rate of a step is timm's, and a function of the step alone."""

import math

import pytest
import torch
from timm.scheduler import create_scheduler_v2

from vit_tp.config import ScheduleConfig
from vit_tp.errors import ConfigError
from vit_tp.recipe.schedule import build_schedule

STEPS_PER_EPOCH, EPOCHS = 7, 6
TOTAL = STEPS_PER_EPOCH * EPOCHS


class ParamGroups:
    """What DeepSpeed's optimizer wrapper shares with an optimizer."""

    def __init__(self, *rates):
        self.param_groups = [{"lr": rate} for rate in rates]


def rates(cfg, peak=0.01, steps=range(TOTAL + 2)):
    optimizer = ParamGroups(peak)
    schedule = build_schedule(optimizer, cfg, STEPS_PER_EPOCH, TOTAL)
    found = []
    for step in steps:
        schedule.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("warmup_epochs", [0, 2])
def test_the_cosine_is_that_of_timms_training_script(warmup_epochs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.01)
    theirs, epochs = create_scheduler_v2(
        optimizer,
        "cosine",
        num_epochs=EPOCHS,
        warmup_epochs=warmup_epochs,
        warmup_lr=1e-4,
        min_lr=1e-5,
        step_on_epochs=False,
        updates_per_epoch=STEPS_PER_EPOCH,
    )
    assert epochs == EPOCHS
    expected = []
    for step in range(TOTAL + 2):
        theirs.step_update(step)
        expected.append(optimizer.param_groups[0]["lr"])
    cfg = ScheduleConfig(name="cosine", warmup_epochs=warmup_epochs, warmup_lr=1e-4, min_lr=1e-5)
    assert rates(cfg) == expected


def test_the_cosine_by_hand():
    found = rates(ScheduleConfig(warmup_epochs=2, warmup_lr=1e-4, min_lr=1e-5))
    assert found[0] == 1e-4
    assert found[7] == pytest.approx((1e-4 + 0.01) / 2)
    assert found[21] == pytest.approx(1e-5 + (0.01 - 1e-5) * (1 + math.cos(math.pi * 21 / TOTAL)) / 2)
    assert found[TOTAL] == 1e-5


def test_a_constant_rate_with_and_without_warm_up():
    assert rates(ScheduleConfig(name="constant")) == [0.01] * (TOTAL + 2)
    found = rates(ScheduleConfig(name="constant", warmup_epochs=1, warmup_lr=0.003))
    assert found[:7] == pytest.approx([0.003 + 0.001 * step for step in range(7)])
    assert found[7:] == [0.01] * (TOTAL - 5)


def test_the_rate_of_a_step_does_not_depend_on_the_steps_before():
    cfg = ScheduleConfig(warmup_epochs=1)
    assert rates(cfg, steps=[30]) == [rates(cfg)[30]]


def test_warm_up_of_a_part_of_an_epoch():
    found = rates(ScheduleConfig(name="constant", warmup_epochs=0.5, warmup_lr=0.0))
    assert found[:5] == pytest.approx([0.0, 0.0025, 0.005, 0.0075, 0.01])


def test_each_group_keeps_its_own_peak():
    optimizer = ParamGroups(0.01, 0.002)
    build_schedule(optimizer, ScheduleConfig(min_lr=0.0), STEPS_PER_EPOCH, TOTAL).step_update(TOTAL // 2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.005, 0.001])


def test_an_unknown_schedule():
    with pytest.raises(ConfigError, match=r"recipe\.schedule\.name=linear"):
        build_schedule(ParamGroups(0.1), ScheduleConfig(name="linear"), STEPS_PER_EPOCH, TOTAL)
