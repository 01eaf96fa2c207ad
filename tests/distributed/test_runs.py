"""Runs through the feed, the loop and the evaluation: who reads, who receives, and the same figures on any grid."""

from __future__ import annotations

import pytest
import timm
import torch
from safetensors.torch import load_file

from tests.distributed.runs import DIGITS_VIT, digits_config, eval_digits, train_digits
from tests.worlds import run_world

GRIDS = [(2, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1)]
# micro-batches of 8 on every grid: mixing is drawn for each micro-batch
MIXED = {"compute__micro_batch_size": 8, "recipe__mixing__mixup_alpha": 0.4, "recipe__mixing__cutmix_alpha": 1.0,
         "recipe__smoothing": 0.1}  # fmt: skip


def world(grid: tuple[int, int, int], *args, **kwargs) -> list:
    pp, dp, tp = grid
    return run_world(kwargs.pop("fn", train_digits), pp * dp * tp, pp, dp, tp, *args, **kwargs)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict:
    return world((1, 1, 1), str(tmp_path_factory.mktemp("one")), MIXED)[0]


@pytest.mark.parametrize("grid", GRIDS)
def test_one_process_of_each_replica_reads_and_all_see_the_same(grid, one, tmp_path):
    """P05, P11, P38, P52: with mixup and cutmix."""
    pp, dp, tp = grid
    ranks = world(grid, str(tmp_path), {**MIXED})
    assert ranks[0]["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert ranks[0]["figures"]["eval/top1"] == one["figures"]["eval/top1"]
    assert ranks[0]["figures"]["eval/loss"] == pytest.approx(one["figures"]["eval/loss"], rel=1e-5)

    replicas: dict[int, list[dict]] = {}
    for rank in ranks:
        replicas.setdefault(rank["place"][1], []).append(rank)
    for members in replicas.values():
        first = [m for m in members if m["place"][0] == 0]
        last = [m for m in members if m["place"][0] == pp - 1]
        middle = [m for m in members if 0 < m["place"][0] < pp - 1]
        reader = next(m for m in first if m["place"][2] == 0)
        assert all(not m["read"] for m in members if m is not reader), "only one process of a replica reads"
        assert all(m["images"] == reader["images"] for m in first)
        assert all(m["targets"] == reader["targets"] for m in last)
        assert all(not m["images"] and not m["targets"] for m in middle)
    readers = [rank for rank in ranks if rank["read"]]
    assert len(readers) == dp
    own = [{key for key in r["read"] if key[0] == "train"} for r in readers]
    assert sum(map(len, own)) == len(set().union(*own)) == 6 * 32, "replicas read disjoint samples"
    assert set().union(*own) == {key for key in one["read"] if key[0] == "train"}
    scored = [key for r in readers for key in r["read"] if key[0] == "val"]
    assert len(scored) == len(set(scored)) == 360, "each validation sample is read once"


def test_workers_change_nothing(one, tmp_path):
    """P46, P53: two loader processes, tp=2."""
    ranks = world((1, 1, 2), str(tmp_path), {**MIXED, "data__num_workers": 2})
    assert ranks[0]["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert ranks[0]["images"][: len(one["images"])] == one["images"]


def test_the_rank_that_reads_draws_nothing_that_its_peers_do_not(tmp_path):
    """P46: with loader processes, dropout and drop path, over the wrap of an epoch and an evaluation."""
    dropped = {**DIGITS_VIT, "drop_rate": 0.1, "proj_drop_rate": 0.1, "drop_path_rate": 0.1}
    few = {"recipe__global_batch_size": 512, "recipe__max_steps": 4, "compute__micro_batch_size": 256}
    ranks = world((1, 1, 2), str(tmp_path), {**few, "model__kwargs": dropped, "data__num_workers": 2})
    assert len(ranks[0]["generators"]) == 4 + 2 and ranks[0]["generators"] == ranks[1]["generators"]


@pytest.mark.parametrize("grid", [(2, 1, 2), (2, 2, 1), (1, 2, 1), (1, 1, 1)])
@pytest.mark.parametrize("size", [7, pytest.param(64, marks=pytest.mark.slow)])
def test_evaluation_scores_each_sample_once_whatever_its_batch_size(grid, size, one, tmp_path):
    """P07, P08, P55: 360 samples in micro-batches of 7 and 64, while training goes on in micro-batches of 8."""
    ranks = world(grid, str(tmp_path), {**MIXED, "compute__eval_micro_batch_size": size})
    figures = ranks[0]["figures"]
    assert figures["eval/count"] == 360
    assert figures["eval/top1"] == one["figures"]["eval/top1"]
    assert figures["eval/top5"] == one["figures"]["eval/top5"]
    assert figures["eval/loss"] == pytest.approx(one["figures"]["eval/loss"], rel=1e-5)
    timed = dict.fromkeys(("samples_per_s", "train_and_eval_s", "first_step_s"))
    assert all(rank["figures"] | timed == figures | timed for rank in ranks)


def test_evaluating_leaves_training_alone(tmp_path):
    """P08, P10: an epoch of two steps, evaluated after each with other shapes, against none until the end."""
    small = {"recipe__global_batch_size": 512, "recipe__max_steps": 5, "compute__micro_batch_size": 128}
    often = world((2, 1, 1), str(tmp_path / "often"), {**small, "compute__eval_micro_batch_size": 50})[0]
    never = world((2, 1, 1), str(tmp_path / "never"), {**small, "log__eval_every_epochs": 0})[0]
    assert sum("eval/top1" in m for m in often["metrics"]) == 3
    assert sum("eval/top1" in m for m in never["metrics"]) == 1
    assert often["losses"] == never["losses"]
    assert len(often["losses"]) == 5


def test_batch_sizes_count_replicas_only(tmp_path):
    """P40: tensor- and pipeline-parallel ranks are not data-parallel ranks."""
    sizes = {"compute__micro_batch_size": 2, "recipe__max_steps": 1}
    for grid, batch in [((2, 1, 2), 6), ((1, 2, 2), 12)]:
        rank = world(grid, str(tmp_path / str(batch)), {**sizes, "recipe__global_batch_size": batch})[0]
        assert rank["plan"].grad_accum_steps == 3
        assert rank["global_samples"] == rank["figures"]["samples"] == batch


@pytest.mark.parametrize(
    ("dtype", "schedule"),
    [("fp32", "1f1b"), *(pytest.param("bf16", name, marks=pytest.mark.slow) for name in ("1f1b", "dualpipev"))],
)
def test_exported_weights_evaluate_alike_everywhere_and_load_in_stock_timm(dtype, schedule, tmp_path):
    overrides = {"compute__dtype": dtype, "recipe__max_steps": 30, "recipe__optimizer__lr": 3e-3}
    in_training = {**overrides, "parallel__schedule": schedule}
    trained = run_world(train_digits, 4, 2, 1, 2, str(tmp_path), in_training, export=True)[0]["figures"]
    for grid in [(1, 1, 1), (1, 1, 4), (4, 1, 1), (1, 3, 1), (2, 2, 1)]:
        found = world(grid, str(tmp_path), overrides, fn=eval_digits)[0]
        assert found["eval/count"] == 360
        assert found["eval/loss"] == pytest.approx(trained["eval/loss"], rel=1e-5 if dtype == "fp32" else 2e-2)
        if dtype == "fp32":
            assert found["eval/top1"] == trained["eval/top1"]

    weights = load_file(tmp_path / "export" / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    stock = timm.create_model("vit_tiny_patch16_224", img_size=8, num_classes=10, in_chans=1, **DIGITS_VIT).eval()
    stock.load_state_dict(weights, strict=True)
    assert stock_figures(stock)["eval/loss"] == pytest.approx(
        trained["eval/loss"], rel=1e-5 if dtype == "fp32" else 2e-2
    )


def stock_figures(model: torch.nn.Module) -> dict[str, float]:
    from torchvision.transforms import Normalize

    from vit_tp.data.digits import SPEC
    from vit_tp.data.order import SampleKey
    from vit_tp.data.sources import build_source
    from vit_tp.data.spec import Form

    source = build_source(digits_config().data, Form("val", 0, (8, 8)))
    images, targets = zip(*(source.load(SampleKey(0, index)) for index in range(len(source))))
    normalise = Normalize([255 * SPEC.mean[0]], [255 * SPEC.std[0]])  # torchvision's
    with torch.no_grad():
        logits = model(normalise(torch.stack(images).float()))
    wanted = torch.tensor(targets)
    return {
        "eval/loss": torch.nn.functional.cross_entropy(logits, wanted).item(),
        "eval/top1": (logits.argmax(1) == wanted).float().mean().item(),
    }


def test_frozen_prefix_trains_and_matches_one_process(tmp_path):
    """P14: the output of the embedding is constant, at a stage boundary right after frozen blocks too."""
    frozen = {"recipe__freeze": ["patch_embed.*", "pos_embed", "blocks.0.*"], "recipe__max_steps": 3}
    single = world((1, 1, 1), str(tmp_path / "one"), frozen)[0]
    for grid in [(2, 1, 1), (2, 1, 2)]:
        many = world(grid, str(tmp_path / str(grid)), frozen)[0]
        assert many["losses"] == pytest.approx(single["losses"], rel=1e-5)


@pytest.mark.parametrize("grid", [(1, 1, 2), (2, 1, 2)])
def test_a_wide_head_is_cut_and_changes_nothing(grid, tmp_path):
    """Ten classes pass for wide here."""
    whole = world((1, 1, 1), str(tmp_path / "one"), {})[0]
    cut = world(grid, str(tmp_path / "cut"), {"parallel__cut_head_from": 10}, export=True)[0]
    assert cut["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert cut["figures"]["eval/top1"] == whole["figures"]["eval/top1"]
    assert load_file(tmp_path / "cut" / "export" / "model.safetensors")["head.weight"].shape == (10, 32)


@pytest.mark.parametrize(
    ("grid", "overrides"),
    [
        ((2, 1, 2), {"parallel__sequence": True, "compute__recompute": "block"}),
        pytest.param((1, 2, 2), {"parallel__sequence": True, "compute__recompute": "norm_act"}, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), {"compute__recompute": 2}, marks=pytest.mark.slow),
        ((1, 1, 2), {"recipe__sync": "partial", "recipe__sync_fraction": 1.0}),
    ],
)
def test_divided_tokens_and_recompute_change_nothing_of_a_run(grid, overrides, one, tmp_path):
    """Mixed images, evaluation with padded batches included."""
    ranks = world(grid, str(tmp_path), {**MIXED, **overrides})
    assert ranks[0]["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert ranks[0]["figures"]["eval/top1"] == one["figures"]["eval/top1"]
    assert ranks[0]["figures"]["eval/loss"] == pytest.approx(one["figures"]["eval/loss"], rel=1e-5)


@pytest.mark.slow
def test_partial_sums_are_one_model_on_one_stage_and_two(tmp_path):
    settings = {**MIXED, "recipe__sync": "partial", "recipe__sync_fraction": 0.5}
    exact, flat, staged = (
        world(grid, str(tmp_path / str(index)), chosen)[0]["losses"]
        for index, (grid, chosen) in enumerate([((1, 1, 2), MIXED), ((1, 1, 2), settings), ((2, 1, 2), settings)])
    )
    assert staged == pytest.approx(flat, rel=1e-5)
    assert flat != pytest.approx(exact, rel=1e-3), "else half of the channels would mean nothing"
