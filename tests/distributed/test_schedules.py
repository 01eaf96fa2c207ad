"""DualPipeV in whole runs: the masks, the samples, the evaluations and the weights of 1F1B.

Its numbers against stock timm are in test_training_parity.py and test_family_pipelines.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

from tests.distributed.models import LR, RICH, batches, own_micro_batches, small_vit
from tests.distributed.runs import DIGITS_VIT, eval_digits, train_digits
from tests.distributed.test_randomness import CUT, WHOLE
from tests.distributed.test_runs import stock_figures
from tests.distributed.test_training_parity import train_grid
from tests.tolerances import LOSS_FLOAT32
from tests.worlds import run_world

SLOW = pytest.mark.slow
# micro-batches of 4 on every grid: mixing is drawn for each micro-batch
PARTS: dict[str, Any] = {"compute__micro_batch_size": 4}
FOLDED: dict[str, Any] = {**PARTS, "parallel__schedule": "dualpipev"}
MIXED: dict[str, Any] = {"recipe__mixing__mixup_alpha": 0.4, "recipe__mixing__cutmix_alpha": 1.0}


def world(fn, grid: tuple[int, int, int], *args, **kwargs) -> list:
    pp, dp, tp = grid
    return run_world(fn, pp * dp * tp, pp, dp, tp, *args, **kwargs)


@pytest.mark.parametrize(
    ("grid", "cut"),
    [
        ((2, 1, 2), {"region": "sequence", "recompute": "block"}),
        *(pytest.param((2, 1, 2), cut, marks=SLOW) for cut in ({}, {"region": "partial", "fraction": 0.5})),
        pytest.param((2, 2, 1), {"recompute": "norm_act"}, marks=SLOW),
    ],
)
def test_masks_are_those_of_1f1b(grid, cut):
    """Both chunks of a rank meet every micro-batch, at other times: each must count for itself."""
    kwargs = {**RICH, **WHOLE, **CUT}
    straight, folded = (
        world(train_grid, grid, 4, kwargs, 3, {}, schedule=schedule, **cut) for schedule in ("1f1b", "dualpipev")
    )
    for one, other in zip(straight, folded):
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-6)
        assert other["norms"] == pytest.approx(one["norms"], rel=1e-5)
    without = world(train_grid, grid, 4, RICH, 3, {}, schedule="dualpipev", **cut)[0]
    assert without["losses"] != pytest.approx(folded[0]["losses"], rel=1e-3), "the rates must matter"


@SLOW
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("grid", "parts"), [((1, 1, 1), 2), ((2, 1, 1), 5), ((4, 1, 1), 8), ((4, 1, 1), 10)])
def test_any_length_of_v_and_any_number_of_micro_batches_gives_the_numbers_of_1f1b(grid, parts, dtype):
    kwargs, settings = {**RICH, "depth": 8, "drop_path_rate": 0.3}, {"bf16": {"enabled": dtype == "bf16"}}
    ranks = [world(train_parts, grid, parts, kwargs, settings, schedule) for schedule in ("1f1b", "dualpipev")]
    for straight, folded in zip(*ranks):
        assert folded == pytest.approx(straight, rel=1e-5 if dtype == "fp32" else 1e-2)


def train_parts(pp: int, dp: int, tp: int, parts: int, kwargs: dict, settings: dict, schedule: str) -> list[float]:
    """Train in micro-batches of two images, however many; return losses and norms."""
    import vit_tp

    loss_fn = torch.nn.functional.cross_entropy
    pipe = vit_tp.pipeline(small_vit("meta", **kwargs), vit_tp.Topology(pp, dp, tp), loss_fn, schedule=schedule)
    engine = vit_tp.initialize(pipe, {**accumulating(parts), **settings, "gradient_clipping": 0.5})
    found = []
    for images, targets in batches(4, 2 * parts):
        found.append(engine.train_batch(iter(own_micro_batches(images, targets, 0, 1, parts))).item())
        found.append(float(engine.get_global_grad_norm()))
    return found


def accumulating(parts: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": parts,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict:
    return world(train_digits, (1, 1, 1), str(tmp_path_factory.mktemp("one")), {**PARTS, **MIXED})[0]


@pytest.mark.parametrize(
    ("grid", "size"),
    [
        ((2, 1, 2), 64),
        *(pytest.param(*run, marks=SLOW) for run in [((2, 2, 1), 7), ((2, 1, 2), 7), ((2, 1, 1), 200)]),
    ],
)
def test_a_run_reads_scores_and_saves_as_one_process(grid, size, one, tmp_path):
    """360 samples in padded micro-batches, more and fewer (2) than a training step has (8, or 4 on two replicas).

    With mixup and cutmix; the ten classes pass for a wide head, which tp cuts.
    """
    pp, dp, tp = grid
    overrides = {**FOLDED, **MIXED, "compute__eval_micro_batch_size": size, "parallel__cut_head_from": 10}
    ranks = world(train_digits, grid, str(tmp_path), overrides, export=True)
    assert ranks[0]["losses"] == pytest.approx(one["losses"], rel=LOSS_FLOAT32)
    for rank in ranks:
        assert rank["figures"]["eval/count"] == 360
        assert rank["figures"]["eval/top1"] == one["figures"]["eval/top1"]
        assert rank["figures"]["eval/loss"] == pytest.approx(one["figures"]["eval/loss"], rel=LOSS_FLOAT32)

    for rank in ranks:
        stage, dp_rank, tp_rank = rank["place"]
        reader = next(r for r in ranks if r["place"] == (0, dp_rank, 0))
        assert bool(rank["read"]) == (rank is reader)
        if stage == 0:
            assert rank["images"] == reader["images"] and rank["targets"] == reader["targets"]
            assert all(rank["targets"]), "images and loss are on the same ranks"
        else:
            assert not rank["images"] and not rank["targets"]

    stock = timm.create_model("vit_tiny_patch16_224", img_size=8, num_classes=10, in_chans=1, **DIGITS_VIT).eval()
    stock.load_state_dict(load_file(tmp_path / "export" / "model.safetensors"), strict=True)
    assert stock_figures(stock)["eval/loss"] == pytest.approx(one["figures"]["eval/loss"], rel=LOSS_FLOAT32)
    found = world(eval_digits, grid, str(tmp_path), overrides)[0]
    assert found["eval/top1"] == one["figures"]["eval/top1"]
    assert found["eval/loss"] == pytest.approx(one["figures"]["eval/loss"], rel=LOSS_FLOAT32)


@SLOW
def test_evaluating_leaves_training_alone(tmp_path):
    small = {**FOLDED, "recipe__global_batch_size": 512, "recipe__max_steps": 5, "compute__micro_batch_size": 128}
    uneven = {"compute__eval_micro_batch_size": 50}
    often = world(train_digits, (2, 1, 1), str(tmp_path / "often"), {**small, **uneven})[0]
    never = world(train_digits, (2, 1, 1), str(tmp_path / "never"), {**small, "log__eval_every_epochs": 0})[0]
    assert sum("eval/top1" in m for m in often["metrics"]) == 3
    assert often["losses"] == never["losses"]


def test_a_first_chunk_may_be_frozen_whole(tmp_path):
    """Its rank trains the last chunk; there is nothing to go back to in the first."""
    frozen = {"recipe__freeze": ["patch_embed.*", "pos_embed", "blocks.0.*"], "recipe__max_steps": 3}
    single = world(train_digits, (1, 1, 1), str(tmp_path / "one"), frozen)[0]
    many = world(train_digits, (2, 1, 1), str(tmp_path / "two"), {**FOLDED, **frozen})[0]
    assert many["losses"] == pytest.approx(single["losses"], rel=LOSS_FLOAT32)


def own_loop() -> dict[str, Any]:
    """What a person's own loop sees: chunks, refusals, and evaluations of any number of micro-batches."""
    import vit_tp
    from vit_tp.errors import ConfigError

    topology, loss_fn = vit_tp.Topology(pp=2, dp=1, tp=1), torch.nn.functional.cross_entropy
    refused = []
    for model, schedule in [(small_vit("meta"), "gpipe"), (small_vit("meta", depth=3), "dualpipev")]:
        with pytest.raises(ConfigError) as caught:
            vit_tp.pipeline(model, topology, loss_fn, schedule=schedule)
        refused.append(str(caught.value))
    pipe = vit_tp.pipeline(small_vit("meta"), topology, loss_fn, schedule="dualpipev")
    with pytest.raises(ConfigError) as caught:
        vit_tp.initialize(pipe, accumulating(3))
    refused.append(str(caught.value))
    engine, evaluated = vit_tp.initialize(pipe, accumulating(4)), {}
    straight = vit_tp.initialize(vit_tp.pipeline(small_vit("meta"), topology, loss_fn), accumulating(4))
    for parts in (1, 3, 4, 9):
        [(images, targets)] = batches(1, 2 * parts)
        own = own_micro_batches(images, targets, 0, 1, parts)
        evaluated[parts] = [e.eval_batch(iter(own), num_micro_batches=parts).item() for e in (engine, straight)]
    return {"refused": refused, "evaluated": evaluated, "chunks": [[s.name for s in run] for run in pipe.chunks]}


def test_an_own_loop_has_it_too():
    ranks = run_world(own_loop, 2)
    assert [rank["chunks"] for rank in ranks] == [
        [["embed", "blocks.0"], ["blocks.3", "head"]],
        [["blocks.1"], ["blocks.2"]],
    ]
    for rank in ranks:
        unknown, shallow, few = rank["refused"]
        assert "schedule='gpipe' is not known; there are 1f1b, dualpipev" in unknown
        assert "parallel.pp=2 with parallel.schedule=dualpipev cuts the model into 4 runs of blocks" in shallow
        assert "it has 3 blocks. Use parallel.pp=1 or less, or parallel.schedule=1f1b" in shallow
        assert "gradient_accumulation_steps=3 is too few" in few and "Use gradient_accumulation_steps=4" in few
        for folded, straight in rank["evaluated"].values():
            assert folded == straight
