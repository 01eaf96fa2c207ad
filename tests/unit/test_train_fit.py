"""A run that does not fit is refused with its numbers, and what is advised makes it fit."""

from __future__ import annotations

import re

import pytest

from tests.distributed.runs import digits_config
from vit_tp.errors import ConfigError
from vit_tp.plan.limits import DeviceMemory, Limit
from vit_tp.train.fit import with_values
from vit_tp.train.preflight import preflight

VIT_B = {"model__timm": "vit_base_patch16_224", "model__img_size": 224, "model__kwargs": {}}
VIT_B |= {"recipe__global_batch_size": 64}
VALUES = {"true": True, "block": "block", "bf16": "bf16"}


def refusal(**overrides) -> str:
    with pytest.raises(ConfigError) as refused:
        preflight(digits_config(**overrides))
    return str(refused.value)


def advised(text: str) -> list[dict]:
    """What stands behind "Use", each as values of dotted knobs."""
    advice = text.partition(" Use ")[2]
    changes = re.findall(r"((?:\w+\.\w+=\w+ ?)+)(?:together )?\(", advice)
    split = [dict(word.split("=") for word in change.split()) for change in changes]
    return [{k: VALUES.get(v) or int(v) for k, v in change.items()} for change in split]


@pytest.mark.parametrize(
    ("overrides", "knobs"),
    [
        ({"compute__memory_gb": 4}, ["compute.recompute", "compute.micro_batch_size", "parallel.tp", "parallel.pp"]),
        pytest.param(
            {"compute__memory_gb": 4, "compute__recompute": "block", "recipe__global_batch_size": 256},
            ["parallel.pp"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"compute__memory_gb": 4.8, "parallel__tp": 2},
            ["parallel.sequence", "compute.recompute"],
            marks=pytest.mark.slow,
        ),
        ({"compute__memory_gb": 5.6}, ["compute.dtype"]),
        (
            {"compute__memory_gb": 4, "parallel__dp": 4, "recipe__global_batch_size": 256},
            ["parallel.pp", "parallel.dp"],
        ),
        ({"compute__memory_gb": 0.5}, ["compute.micro_batch_size", "parallel.tp"]),  # several together
    ],
)
def test_what_is_advised_fits(overrides, knobs):
    overrides = VIT_B | overrides
    text = refusal(**overrides)
    assert "pipeline stage 0 (embed to" in text and f"compute.memory_gb: {overrides['compute__memory_gb']:g} GB" in text
    changes = advised(text)
    assert set(knobs) <= {knob for change in changes for knob in change}
    for change in changes:
        assert preflight(with_values(digits_config(**overrides), change)).lines
        for knob, value in change.items():  # nothing that was on already
            group, name = knob.split(".")
            assert getattr(getattr(digits_config(**overrides), group), name) != value


def test_no_advice_where_none_helps():
    text = refusal(**VIT_B, compute__memory_gb=0.01)
    assert text.endswith("Use a smaller model or image.") and "are not enough (with compute.recompute=block" in text


def test_a_run_that_fits_is_told_its_peak():
    lines = preflight(digits_config(**VIT_B, compute__memory_gb=12)).lines
    (stage,) = (line for line in lines if line.startswith("stage 0"))
    (memory,) = (line for line in lines if line.startswith("memory"))
    peak = re.search(r"; peak (\S+) GB", stage)[1]
    assert 9 < float(peak) < 9.5
    assert memory == f"memory    tensors of a rank take at most {peak} GB of 12 GB (compute.memory_gb: 12 GB)"


def test_places_and_hosts_bound_the_advice():
    """No more ranks than GPUs; and ranks that share a host's memory gain nothing from being more."""
    config = digits_config(**VIT_B)
    for device, absent in [
        (DeviceMemory((Limit("GPU 0", 4 * 10**9),), num_ranks=1, max_ranks=1), "parallel."),
        (DeviceMemory((Limit("host", 4 * 10**9, is_shared=True),), num_ranks=1), "parallel.tp=4 ("),
    ]:
        with pytest.raises(ConfigError) as refused:
            preflight(config, memory=device)
        assert absent not in str(refused.value) and "compute.recompute=block" in str(refused.value)


def test_all_complaints_at_once_and_memory_among_them():
    with pytest.raises(ConfigError) as refused:
        preflight(digits_config(**{**VIT_B, "recipe__global_batch_size": 2048}, compute__memory_gb=4))
    small, memory = refused.value.complaints
    assert "1437" in small and "compute.memory_gb" in memory


def test_an_evaluation_is_not_judged_by_what_training_takes():
    assert preflight(digits_config(**VIT_B, compute__memory_gb=0.5), training=False)
