"""What is refused before any rank starts: each sentence names the number, the reason and the override to type."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.runs import digits_config
from vit_tp.errors import ConfigError
from vit_tp.train.preflight import preflight

REFUSED = {
    "heads": ({"parallel__tp": 3}, ["parallel.tp=3", "num_heads=4", "Use parallel.tp=1, 2, 4."]),
    "MLP width": (
        {"parallel__tp": 4, "model__kwargs": {"embed_dim": 36, "num_heads": 4, "mlp_ratio": 2.5, "patch_size": 2}},
        ["MLP width=90", "Use parallel.tp=1, 2, or"],
    ),
    "too many stages": ({"parallel__pp": 5}, ["parallel.pp=5", "4 blocks", "Use parallel.pp=4 or less."]),
    "too many chunks": (
        {"parallel__pp": 3, "parallel__schedule": "dualpipev", "recipe__global_batch_size": 36},
        [
            "parallel.pp=3 with parallel.schedule=dualpipev cuts the model into 6 runs of blocks, 2 on each stage's",
            "it has 4 blocks. Use parallel.pp=2 or less, or parallel.schedule=1f1b.",
        ],
    ),
    "two streams in chunks": (
        {
            "model__timm": "tnt_s_patch16_224",
            "model__kwargs": {},
            "model__img_size": None,
            "parallel__schedule": "dualpipev",
        },
        ["parallel.pp=1 with parallel.schedule=dualpipev", "TNT", "Use parallel.pp=1 parallel.schedule=1f1b"],
    ),
    "frozen chunks": (
        {"parallel__pp": 2, "parallel__schedule": "dualpipev", "recipe__freeze": ["blocks.[12].*"]},
        ["pipeline stage 1 (blocks.1 to blocks.1 and blocks.2 to blocks.2)", "parallel.pp=1"],
    ),
    "explicit stages": (
        {"parallel__pp": 2, "parallel__partition": [0, 7]},
        ["parallel.partition=[0, 7]", "4 blocks on 2 stages", "parallel.partition=[0, 2]"],
    ),
    "batch": (
        {"recipe__global_batch_size": 30, "compute__micro_batch_size": 8},
        ["recipe.global_batch_size=30", "recipe.global_batch_size=24", "recipe.global_batch_size=32"],
    ),
    "small data set": ({"recipe__global_batch_size": 2048}, ["1437", "2048", "recipe.global_batch_size"]),
    "unknown model": ({"model__timm": "vit_bse_patch16_224"}, ["vit_bse_patch16_224", "vit_base_patch16_224"]),
    "timm's own refusal": (
        {"model__kwargs": {"embed_dim": 30, "num_heads": 4}},
        ["dim should be divisible", "model.kwargs"],
    ),
    "unknown argument": ({"model__kwargs": {"num_haeds": 4}}, ["num_haeds", "model.kwargs"]),
    "hierarchical": (
        {"model__timm": "swin_tiny_patch4_window7_224", "model__kwargs": {}, "model__img_size": None},
        ["swin_tiny_patch4_window7_224 cannot be cut: it is hierarchical", "vit-tp doctor --models"],
    ),
    "two streams": (
        {"model__timm": "tnt_s_patch16_224", "model__kwargs": {}, "model__img_size": None, "parallel__pp": 2},
        ["TNT", "two streams", "parallel.pp=1"],
    ),
    "no classifier": (
        {"model__timm": "gemma4_vit_167m_enc", "model__kwargs": {}, "model__img_size": None},
        ["Gemma4VitEncoder is an encoder without a classifier", "*_enc"],
    ),
    "no pooling": (
        {"model__kwargs": {"embed_dim": 32, "num_heads": 4, "patch_size": 2, "class_token": False, "global_pool": ""}},
        ["one row of logits", "global_pool"],
    ),
    "frozen stage": (
        {"parallel__pp": 2, "recipe__freeze": ["patch_embed.*", "pos_embed", "blocks.[01].*"]},
        ["pipeline stage 0 (embed to blocks.1)", "recipe.freeze", "parallel.pp=1"],
    ),
    "pattern that freezes nothing": (
        {"recipe__freeze": ["blocks.0.*", "encoder.*"]},
        ["recipe.freeze=['encoder.*'] fits no parameter", "patch_embed.proj.weight"],
    ),
    "odd mixing": (
        {"recipe__mixing__mixup_alpha": 0.2, "recipe__global_batch_size": 33},
        ["compute.micro_batch_size=33 is odd", "compute.micro_batch_size=34"],
    ),
    "missing root": (
        {"data__source": "image_folder", "data__root": "/nowhere/at/all"},
        ["/nowhere/at/all", "data.root"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_sentence(name):
    overrides, texts = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        preflight(digits_config(**overrides))
    for text in texts:
        assert text in str(refused.value)


def test_all_complaints_at_once():
    with pytest.raises(ConfigError) as refused:
        preflight(digits_config(parallel__tp=3, parallel__pp=9, recipe__global_batch_size=4096))
    assert len(refused.value.complaints) == 3


def test_linear_probe_trains_only_the_head_on_one_stage_and_is_refused_on_two():
    """P17."""
    probe = {"recipe__freeze": ["patch_embed.*", "pos_embed", "blocks.*", "fc_norm.*"]}
    assert preflight(digits_config(**probe))
    with pytest.raises(ConfigError, match="stage 0"):
        preflight(digits_config(**probe, parallel__pp=2))


def test_the_plan_is_the_request():
    """P22, P23: weights of the ends, explicit cuts, and what each rank will hold."""
    explicit = preflight(digits_config(parallel__pp=2, parallel__partition=[0, 3]))
    assert explicit.bounds == [0, 4, 6]
    heavy_ends = preflight(digits_config(parallel__pp=3, parallel__embed_weight=2.0, parallel__head_weight=1.0))
    assert heavy_ends.bounds == [0, 2, 4, 6]  # embed and one block (3), two blocks (2), one block and the head (2)
    by_flops = preflight(digits_config(parallel__pp=4, parallel__partition="flops"))
    assert by_flops.bounds == [0, 2, 3, 4, 6]
    folded = preflight(digits_config(parallel__pp=2, parallel__schedule="dualpipev", parallel__partition=[0, 1, 2, 3]))
    assert folded.bounds == [0, 2, 3, 4, 6] and folded.plan.grad_accum_steps == 4
    assert any("embed .. blocks.0 and blocks.3 .. head: each rank holds" in line for line in folded.lines)
    assert any("stage 1" in line and "at most 3 and 2 micro-batches" in line for line in folded.lines)
    whole, half = preflight(digits_config()), preflight(digits_config(parallel__tp=2))
    assert any("stage 0" in line for line in whole.lines)
    assert half.topology == replace(whole.topology, tp=2)


def test_an_evaluation_takes_any_grid_that_fits_the_model():
    """Replicas that do not divide the training batch, frozen stages and all."""
    frozen = {"recipe__freeze": ["*"], "recipe__global_batch_size": 32, "parallel__dp": 3, "parallel__pp": 2}
    assert preflight(digits_config(**frozen), training=False).topology.world_size == 6
    with pytest.raises(ConfigError, match="num_heads=4"):
        preflight(digits_config(parallel__tp=3), training=False)


def test_a_rank_holds_its_share_of_every_block():
    """P41."""
    import torch

    from vit_tp.models.build import build_model
    from vit_tp.plan.stages import plan_stages

    model = build_model(digits_config(model__img_size=224, model__kwargs={}).model, 10, 3)  # a ViT-Ti: 3 heads
    for tp in (1, 3):
        for stage in plan_stages(model, 1, tp, torch.float32)[1:-1]:
            assert stage.num_params == pytest.approx(444_864 / tp, rel=0.01)  # what is whole: norms and row biases


def test_the_plan_knows_a_cut_classifier():
    """Ten classes over four ranks: three rows each, with padding."""
    from vit_tp.models.build import build_model
    from vit_tp.models.dtypes import DTYPES
    from vit_tp.plan.stages import plan_stages
    from vit_tp.sharding.cutting import Cutting

    config = digits_config(parallel__tp=4, parallel__cut_head_from=10)
    told = "head      10 classes cut over tp=4: each rank holds 3, and logits are not gathered"
    assert told in preflight(config).lines
    config.parallel.cut_head_from = 11
    assert not any(line.startswith("head") for line in preflight(config).lines)

    model = build_model(config.model, 10, 1)
    cuttings = Cutting(cut_head_from=11), Cutting(cut_head_from=10, gather_logits=False)
    whole, cut = (plan_stages(model, 8, 4, DTYPES["fp32"], cutting)[-1] for cutting in cuttings)
    assert whole.num_params - cut.num_params == (10 - 3) * (32 + 1)
    assert cut.activation_bytes == whole.activation_bytes


def test_what_a_run_starts_from_is_checked_and_told_before_any_rank(tmp_path):
    """P64, P76: other classes and a 4x larger grid; then a tensor less."""
    import timm
    import torch

    from tests.distributed.runs import DIGITS_VIT

    state = timm.create_model("vit_tiny_patch16_224", img_size=4, num_classes=7, in_chans=1, **DIGITS_VIT).state_dict()
    torch.save(state, tmp_path / "vit.pth")
    config = digits_config(model__pretrained=str(tmp_path / "vit.pth"))
    assert preflight(config).lines[-1] == (
        f"weights   {tmp_path}/vit.pth: 53 loaded, resized pos_embed (1 x 4 x 32 -> 1 x 16 x 32); "
        f"re-made head.weight, head.bias"
    )
    del state["blocks.2.attn.qkv.bias"]
    torch.save(state, tmp_path / "vit.pth")
    config.parallel.tp = 3
    with pytest.raises(ConfigError) as refused:
        preflight(config)
    damaged, heads = sorted(refused.value.complaints)
    assert "1 missing: blocks.2.attn.qkv.bias" in damaged and "parallel.tp=3" in heads
    config.parallel.tp = 1
    assert preflight(config, training=False)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["parallel.sequence=true", "parallel.tp=4"], "sequence  5 tokens between blocks, 2 on each of 4 ranks"),
        (["recipe.sync=partial", "parallel.tp=2"], "sync      0.5 of the channels are summed over tp=2: the weights"),
        (["parallel.sequence=true"], "sequence  no effect"),
        (["recipe.sync=partial"], "sync      no effect"),
        (["compute.recompute=2"], "recompute blocks 0, 2"),
        (["compute.recompute=block"], "recompute all blocks"),
        (["compute.recompute=norm_act"], "recompute outputs of norms and activations"),
    ],
)
def test_the_plan_says_what_blocks_pass_on_and_make_again(changes, line):
    """P19: the plan in force is printed."""
    from vit_tp.compose import compose

    config = compose(["model=vit_digits", "model.kwargs.class_token=true", "model.kwargs.global_pool=token", *changes])
    assert any(found.startswith(line) for found in preflight(config).lines)
    assert not any(found.split()[0] in ("sequence", "sync", "recompute") for found in preflight(compose([])).lines)
