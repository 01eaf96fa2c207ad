"""What check() refuses and with which words; batches, fingerprints and dictionaries."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_tp.config import (
    Config,
    MixingConfig,
    batch_plan,
    check,
    config_hash,
    eval_batch_plan,
    eval_tag,
    fingerprint,
    from_dict,
    is_one_model,
    list_knobs,
    run_folder,
    to_dict,
)
from vit_tp.config.checks import read
from vit_tp.config.limits import NAMES, RANGES, READ_BY
from vit_tp.errors import ConfigError

TARS = {"data__source": "image_tars", "data__root": "/x"}  # reads most knobs, and is looked for later


def config_with(**knobs) -> Config:
    """Return the defaults with some knobs set; a double underscore stands for the dot."""
    config = Config()
    for path, value in knobs.items():
        *parents, leaf = path.split("__")
        target = config
        for name in parents:
            target = getattr(target, name)
        setattr(target, leaf, value)
    return config


def complaints_of(config: Config, **options) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(config, **options)
    return caught.value.complaints


def test_the_defaults_pass():
    check(Config())


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"run__name": "a/b"}, ["run.name=a/b", "path separator", "run.name=b"]),
        ({"run__name": ".."}, ["run.name='..'", "run.name=run"]),
        ({"run__seed": -1}, ["run.seed=-1", "at least 0"]),
        ({"task__name": "clasification"}, ["Did you mean task.name=classification?"]),
        ({"model__timm": ""}, ["model.timm is empty"]),
        ({"model__kwargs": {"num_classes": 5}}, ["model.kwargs.num_classes=5", "data source"]),
        ({"model__kwargs": {"img_size": 5}}, ["Use model.img_size"]),
        ({"model__kwargs": {"pretrained": True}}, ["model.kwargs.pretrained=true", "Use model.pretrained=true"]),
        ({"model__kwargs": {"checkpoint_path": "a"}}, ["checkpoint_path=a", "Use model.pretrained=<file>"]),
        (
            {"model__pretrained": "no/such.pth"},
            ["model.pretrained=no/such.pth is not a file (looked for from /", "Use"],
        ),
        ({"model__pretrained": False}, ["model.pretrained=false is neither true nor a file", "model.pretrained=null"]),
        ({"model__pretrained": " "}, ["neither true nor a file"]),
        ({"model__pretrained": 1}, ["model.pretrained=1 is neither true nor a file"]),
        ({"data__source": "digit"}, ["data.source=digit", "digits, image_folder", "Did you mean data.source=digits?"]),
        ({**TARS, "data__crop_scale": [0.5, 0.1]}, ["data.crop_scale=[0.5,0.1]", "data.crop_scale=[0.08,1.0]"]),
        ({**TARS, "data__auto_augment": "rnd-m9"}, ["no policy of timm's", "Did you mean data.auto_augment=rand-m9?"]),
        ({**TARS, "data__hflip": 1.5}, ["data.hflip=1.5", "at most 1"]),
        ({**TARS, "data__eval_crop": 0.0}, ["more than 0"]),
        ({"data__source": "image_folder"}, ["data.root is not set", "Use data.root=<folder>"]),
        (
            {"data__source": "image_folder", "data__root": "/no/such"},
            ["data.root=/no/such is not a folder", "Use data.root="],
        ),
        ({"recipe__global_batch_size": 0}, ["recipe.global_batch_size=0", "at least 1"]),
        ({"recipe__epochs": 0}, ["recipe.epochs=0", "recipe.epochs=1"]),
        ({"recipe__optimizer__lr": 0.0}, ["recipe.optimizer.lr=0.0", "more than 0"]),
        ({"recipe__optimizer__lr": float("nan")}, ["recipe.optimizer.lr=nan", "out of range"]),
        ({"recipe__optimizer__betas": [0.9]}, ["recipe.optimizer.betas=[0.9]", "[0.9,0.999]"]),
        ({"recipe__optimizer__betas": [0.9, 1.0]}, ["below 1"]),
        ({"recipe__optimizer__name": "adamW2"}, ["recipe.optimizer.name=adamW2", "adamw"]),
        ({"recipe__schedule__warmup_epochs": 11.0}, ["warmup_epochs=11", "recipe.epochs=10"]),
        ({"recipe__schedule__min_lr": 1.0}, ["min_lr=1", "recipe.optimizer.lr=0.001"]),
        ({"recipe__mixing__prob": 2.0}, ["recipe.mixing.prob=2.0", "at most 1"]),
        ({"recipe__mixing__mixup_alpha": -0.1}, ["recipe.mixing.mixup_alpha=-0.1"]),
        ({"recipe__mixing__mixup_alpha": 0.8, "compute__micro_batch_size": 1}, ["is odd", "mixup_alpha=0"]),
        ({"recipe__clip_grad": -1.0}, ["recipe.clip_grad=-1.0", "at least 0"]),
        ({"recipe__smoothing": 1.0}, ["recipe.smoothing=1.0"]),
        ({"recipe__freeze": [""]}, ["recipe.freeze=[]", "blocks.0.*"]),
        ({"parallel__tp": 0}, ["parallel.tp=0", "parallel.tp=1"]),
        ({"parallel__pp": -2}, ["parallel.pp=-2"]),
        ({"parallel__dp": 0}, ["parallel.dp=0"]),
        ({"parallel__partition": "flop"}, ["parallel.partition=flop", "parameters, flops"]),
        ({"parallel__partition": [1], "parallel__pp": 1}, ["does not start at block 0", "parallel.partition=[0]"]),
        ({"parallel__partition": [0, 3, 3], "parallel__pp": 3}, ["does not grow", "parallel.partition=[0,1,2]"]),
        ({"parallel__partition": [0, 3], "parallel__pp": 3}, ["has 2 stages, parallel.pp=3", "Use parallel.pp=2"]),
        ({"parallel__partition": []}, ["parallel.partition=[] is not known"]),
        ({"recipe__sync": "half"}, ["recipe.sync=half is not known", "exact, partial"]),
        ({"recipe__sync_fraction": 1.5}, ["recipe.sync_fraction=1.5", "at most 1", "Use for example", "fraction=1."]),
        ({"recipe__sync_fraction": -1.0}, ["Use for example recipe.sync_fraction=0."]),
        ({"recipe__sync": "partial", "parallel__sequence": True}, ["both cannot be", "parallel.sequence=false"]),
        (
            {"recipe__sync": "partial", "parallel__indivisible": "mlp_only"},
            ["parallel.indivisible=mlp_only", "Use parallel.indivisible=refuse"],
        ),
        ({"compute__recompute": "blocks"}, ["compute.recompute=blocks", "none, norm_act, block", "=2."]),
        ({"compute__recompute": -1}, ["compute.recompute=-1 is not known"]),
        ({"compute__recompute": True}, ["compute.recompute=true is not known"]),
        ({"compute__recompute": 1.5}, ["compute.recompute=1.5 is not known"]),
        (
            {"parallel__schedule": "dualpipe"},
            ["1f1b, dualpipev", "Did you mean parallel.schedule=dualpipev?"],
        ),
        (
            {
                "parallel__schedule": "dualpipev",
                "parallel__pp": 3,
                "parallel__partition": [0, 3, 6, 9],
                "recipe__global_batch_size": 60,
            },
            ["has 4 stages, parallel.pp=3 with parallel.schedule=dualpipev has 6", "Use parallel.pp=2 or"],
        ),
        (
            {"parallel__schedule": "dualpipev", "parallel__pp": 4, "compute__micro_batch_size": 16},
            [
                "recipe.global_batch_size=64 gives each replica of parallel.dp=1 4 micro-batches of 16 samples",
                "parallel.schedule=dualpipev has at least 8 under way on parallel.pp=4 stages",
                "Use compute.micro_batch_size=8, or recipe.global_batch_size=128 or parallel.schedule=1f1b.",
            ],
        ),
        (
            {"parallel__schedule": "dualpipev", "parallel__pp": 2, "recipe__global_batch_size": 6, "parallel__dp": 2},
            ["3 micro-batches of 1 samples", "Use recipe.global_batch_size=8 or parallel.schedule=1f1b."],
        ),
        ({"compute__dtype": "bf61"}, ["Did you mean compute.dtype=bf16?"]),
        ({"compute__dtype": "fp16", "compute__device": "cpu"}, ["fp16", "Use compute.dtype=bf16"]),
        ({"compute__device": "gpu"}, ["compute.device=gpu", "auto, cpu, cuda"]),
        ({"compute__micro_batch_size": 0}, ["compute.micro_batch_size=0"]),
        ({"compute__timeout_s": 0}, ["compute.timeout_s=0"]),
        ({"cluster__name": "slurm"}, ["cluster.name=slurm", "local"]),
        ({"cluster__port": 70000}, ["cluster.port=70000", "65535"]),
        ({"log__every_steps": 0}, ["log.every_steps=0"]),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_refuses_with_numbers_reason_and_what_to_type(knobs, words):
    [complaint] = complaints_of(config_with(**knobs))
    for word in words:
        assert word in complaint
    assert complaint.endswith((".", "?"))


@pytest.mark.parametrize("name", ["lamb", "lars", "adafactor", "muon", "LAMB"])
def test_layerwise_optimizers_are_refused_with_the_reason(name):
    [complaint] = complaints_of(config_with(recipe__optimizer__name=name))
    assert "whole layers" in complaint and "Use recipe.optimizer.name=adamw" in complaint


def test_all_complaints_come_at_once():
    config = config_with(recipe__epochs=0, parallel__tp=0, compute__dtype="fp8", run__name="a/b", cluster__port=0)
    assert len(complaints_of(config)) == 5


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"model__img_size": 0}, ["model.img_size=0 is no size", "model.img_size=224"]),
        ({"model__img_size": [224]}, ["model.img_size=[224]", "[256,448]"]),
        ({"model__img_size": "big"}, ["model.img_size=big"]),
        ({"recipe__resolution_schedule": [[0, 32], [0, 64]]}, ["[[0,32],[0,64]] is no schedule"]),
        ({"recipe__resolution_schedule": 32}, ["recipe.resolution_schedule=32 is no schedule"]),
        ({"recipe__resolution_schedule": [[30, 32]]}, ["names epochs 30 to 30", "Use epochs 0 to 9"]),
        (
            {"recipe__resolution_schedule": [[0, 32]]},
            ["model.img_size, which is null", "Use for example model.img_size=32"],
        ),
        (
            {"recipe__resolution_schedule": [[0, 32], [1, [32, 96]]], "model__img_size": 64},
            ["goes beyond model.img_size=64", "Use model.img_size=[32,96]"],
        ),
        ({**TARS, "data__crop_ratio": [2.0, 1.0]}, ["data.crop_ratio=[2.0,1.0]", "0 < low <= high"]),
        (
            {"data__source": "video_tars", "data__root": "/x", "model__video__num_frames": 8, "data__eval_crops": 2},
            ["data.eval_crops=2", "data.eval_crops=3"],
        ),
        ({"data__source": "image_tars"}, ["data.root is not set", "data.train_shards"]),
        ({"data__source": "moving_digits"}, ["gives clips", "Use for example model.video.num_frames=16"]),
        ({"model__video__num_frames": 8}, ["data.source=digits gives images", "data.source=moving_digits or"]),
        (
            {"data__source": "moving_digits", "model__video__num_frames": 7},
            [
                "model.video.num_frames=7 is not a multiple of model.video.tubelet_size=2",
                "Use model.video.num_frames=8",
            ],
        ),
        (
            {
                "data__source": "moving_digits",
                "model__video__num_frames": 8,
                "data__eval_clips": 2,
                "data__eval_crops": 3,
                "compute__eval_micro_batch_size": 8,
            },
            ["compute.eval_micro_batch_size=8 is not a multiple", "= 6", "Use compute.eval_micro_batch_size=12"],
        ),
    ],
)
def test_what_samples_cannot_look_like(knobs, words):
    complaints = complaints_of(config_with(**knobs))
    assert len(complaints) == 1
    assert all(word in complaints[0] for word in words), complaints


@pytest.mark.parametrize("size", [96, [64, 128]])
def test_an_input_may_be_wide(size):
    check(config_with(model__img_size=size, recipe__resolution_schedule=[[0, 32], [5, [32, 64]]]))


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"root": "/data"}, ["data.root=/data", "data.source=digits", "data.source=image_folder or"]),
        ({"hflip": 0.0}, ["data.hflip=0.0", "would change nothing", "Leave it out"]),
        ({"source": "image_tars", "root": "/x", "tile_size": 64}, ["data.tile_size=64", "data.source=image_folder"]),
        (
            {"source": "image_tars", "root": "/x", "decoder": "pyav"},
            ["data.decoder=pyav", "data.source=moving_digits or"],
        ),
    ],
)
def test_a_knob_that_a_source_does_not_read_is_named(knobs, words):
    [complaint] = complaints_of(config_with(**{f"data__{knob}": value for knob, value in knobs.items()}))
    assert all(word in complaint for word in words), complaint


def test_knobs_that_a_choice_passes_over_are_named():
    video = {"data__source": "video_tars", "data__root": "/x", "model__video__num_frames": 8}
    [complaint] = complaints_of(config_with(**video, data__frame_stride=8))
    assert "data.sampling=segments" in complaint and "data.sampling=dense" in complaint
    [complaint] = complaints_of(config_with(**video, data__timeout_s=900.0))
    assert "compute.timeout_s=600" in complaint


def test_every_knob_of_the_data_is_read_by_some_source():
    knobs = {knob.path.removeprefix("data.") for knob in list_knobs() if knob.path.startswith("data.")}
    assert set().union(*READ_BY.values()) | {"source"} == knobs
    assert set(READ_BY) == set(NAMES["data.source"])


def test_rows_of_an_evaluation_are_whole_samples():
    """Five views of a sample: micro-batches of 8 become 10 rows, those of 20 stay."""
    video = {"data__source": "video_folder", "data__eval_clips": 5, "recipe__global_batch_size": 8}
    assert batch_plan(config_with(**video), 1).eval_micro_batch_size == 10
    assert eval_batch_plan(config_with(**video, compute__eval_micro_batch_size=20), 1).eval_micro_batch_size == 20
    assert batch_plan(config_with(recipe__global_batch_size=8, data__eval_clips=5), 1).views == 1


def test_how_samples_are_read_does_not_change_what_is_learnt():
    first = fingerprint(Config())
    for knob, value in {"prefetch": 9, "timeout_s": None, "max_bad_fraction": 0.5, "eval_clips": 5}.items():
        assert fingerprint(config_with(**{f"data__{knob}": value})) == first
    for knob, value in {
        "decoder": "pyav",
        "decoder_device": "cuda",
        "num_streams": 4,
        "repeats": 3,
        "reduced_decode": "never",
    }.items():
        assert fingerprint(config_with(**{f"data__{knob}": value})) != first


def test_an_image_folder_without_its_splits_says_what_it_found(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    [complaint] = complaints_of(config_with(data__source="image_folder", data__root=str(tmp_path)))
    assert "has no val folder (it holds test, train)" in complaint


def test_a_checkpoint_is_looked_for_where_the_command_was_typed(tmp_path, monkeypatch):
    (tmp_path / "w.pth").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for pretrained in (True, "w.pth", "./w.pth", "~/w.pth", str(tmp_path / "w.pth")):
        check(config_with(model__pretrained=pretrained))


def test_an_evaluation_does_not_ask_for_what_the_run_started_from():
    check(config_with(model__pretrained="gone.pth"), training=False)


def test_every_number_has_a_range_and_every_range_a_knob():
    numbers = {knob.path for knob in list_knobs() if knob.type in (int, float, int | None, float | None)}
    assert numbers == set(RANGES)
    assert set(RANGES) | set(NAMES) <= {knob.path for knob in list_knobs()}


def test_every_knob_has_one_line_of_text():
    for knob in list_knobs():
        assert knob.text and "\n" not in knob.text


# --- batches


@pytest.mark.parametrize(
    ("batch", "dp", "pp", "micro", "expected"),
    [
        (64, 1, 1, None, (64, 1)),
        (64, 2, 1, None, (32, 1)),
        (64, 1, 2, None, (16, 4)),
        (64, 2, 2, None, (8, 4)),
        (6, 1, 2, None, (2, 3)),  # P40: tp and pp ranks are no data ranks
        (7, 1, 2, None, (7, 1)),
        (64, 2, 2, 4, (4, 8)),
    ],
)
def test_batch_plan(batch, dp, pp, micro, expected):
    config = config_with(
        recipe__global_batch_size=batch, parallel__pp=pp, parallel__tp=2, compute__micro_batch_size=micro
    )
    plan = batch_plan(config, dp)
    assert (plan.micro_batch_size, plan.grad_accum_steps) == expected
    assert plan.eval_micro_batch_size == plan.micro_batch_size


SIZES = (st.integers(1, 512), st.integers(1, 8), st.integers(1, 8), st.none() | st.integers(1, 16))


@given(*SIZES)
def test_batch_plan_multiplies_out_or_names_a_size_that_does(batch, dp, pp, micro):
    config = config_with(recipe__global_batch_size=batch, parallel__pp=pp, compute__micro_batch_size=micro)
    try:
        plan = batch_plan(config, dp)
    except ConfigError as error:
        legal = int(re.search(r"Use recipe.global_batch_size=(\d+)", str(error))[1])
        fixed = config_with(recipe__global_batch_size=legal, parallel__pp=pp, compute__micro_batch_size=micro)
        batch_plan(fixed, dp)
    else:
        assert plan.micro_batch_size * plan.grad_accum_steps * dp == batch == plan.global_batch_size
        assert micro is not None or plan.grad_accum_steps <= max(1, 2 * pp if pp > 1 else 1)


@given(*SIZES)
def test_dualpipev_gets_as_many_micro_batches_as_chunks_or_names_sizes_that_give_them(batch, dp, pp, micro):
    config = config_with(recipe__global_batch_size=batch, parallel__pp=pp, compute__micro_batch_size=micro)
    config.parallel.schedule = "dualpipev"
    try:
        plan = batch_plan(config, dp)
    except ConfigError as error:
        if "is not a multiple" in str(error):
            return
        for knob, size in re.findall(r"(global_batch_size|micro_batch_size)=(\d+)", str(error).partition("Use ")[2]):
            fixed = replace(config, recipe=replace(config.recipe), compute=replace(config.compute))
            setattr(fixed.recipe if knob == "global_batch_size" else fixed.compute, knob, int(size))
            assert batch_plan(fixed, dp).grad_accum_steps >= 2 * pp
    else:
        assert plan.micro_batch_size * plan.grad_accum_steps * dp == batch
        assert plan.grad_accum_steps >= 2 * pp
        fewer = [parts for parts in range(2 * pp, plan.grad_accum_steps) if batch // dp % parts == 0]
        assert micro is not None or not fewer


def test_a_batch_that_does_not_divide_is_refused_with_legal_values():
    config = config_with(recipe__global_batch_size=10, parallel__dp=4)
    [complaint] = complaints_of(config)
    assert "recipe.global_batch_size=10 is not a multiple of parallel.dp=4" in complaint
    assert "recipe.global_batch_size=8 or recipe.global_batch_size=12" in complaint
    config = config_with(recipe__global_batch_size=12, compute__micro_batch_size=5)
    [complaint] = complaints_of(config)
    assert "compute.micro_batch_size=1, 2, 3, 4, 6, 12" in complaint


def test_an_evaluation_need_not_divide_the_training_batch():
    config = config_with(recipe__global_batch_size=10, parallel__dp=4)
    check(config, training=False)
    assert eval_batch_plan(config, 4).grad_accum_steps == 1


# --- fingerprint and hash


@pytest.mark.parametrize(
    ("knobs", "same"),
    [
        ({"parallel__tp": 4, "parallel__pp": 2, "parallel__partition": [0, 3]}, True),
        ({"compute__dtype": "bf16", "compute__micro_batch_size": 8}, True),
        ({"model__pretrained": "vit.pth"}, False),
        ({"log__every_steps": 3, "cluster__port": 1234, "run__name": "other", "run__dir": "else"}, True),
        ({"data__num_workers": 3, "data__root": "/elsewhere"}, True),
        ({"parallel__sequence": True, "parallel__tp": 2, "compute__recompute": "block"}, True),
        ({"recipe__sync": "partial", "parallel__tp": 2}, False),
        ({"recipe__sync": "partial"}, True),
        ({"recipe__sync_fraction": 0.25}, True),
        ({"run__seed": 1}, False),
        ({"recipe__optimizer__lr": 2e-3}, False),
        ({"model__kwargs": {"depth": 3}}, False),
        ({**TARS, "data__hflip": 0.0}, False),
        ({"model__kwargs": {"attn_drop_rate": 0.0, "proj_drop_rate": 0.0}}, False),
    ],
)
def test_the_fingerprint_is_what_is_learnt(knobs, same):
    changed = config_with(**knobs)
    assert (fingerprint(changed) == fingerprint(Config())) == same
    assert config_hash(changed) != config_hash(Config())


@pytest.mark.parametrize(
    "knobs", [{"recipe__mixing": MixingConfig(mixup_alpha=0.8)}, {"model__kwargs": {"drop_path_rate": 0.1}}]
)
def test_micro_batches_join_the_fingerprint_where_they_are_learnt(knobs):
    whole, halves = (config_with(**knobs, compute__micro_batch_size=size) for size in (64, 32))
    assert fingerprint(whole) != fingerprint(halves)
    unset = config_with(**knobs)
    assert fingerprint(unset, dp_size=2) == fingerprint(halves)
    assert fingerprint(unset) == fingerprint(whole)


@pytest.mark.parametrize("name", ["attn_drop_rate", "proj_drop_rate", "drop_rate", "drop_path_rate", "pos_drop_rate"])
def test_tensor_parallel_ranks_join_where_each_draws_its_own_mask(name):
    knobs = {"model__kwargs": {name: 0.1}, "compute__micro_batch_size": 8}
    one, two, wider = (config_with(**knobs, parallel__tp=tp, parallel__pp=pp) for tp, pp in ((1, 1), (2, 1), (2, 2)))
    assert (fingerprint(one) != fingerprint(two)) == (name in ("attn_drop_rate", "proj_drop_rate"))
    assert fingerprint(two) == fingerprint(wider)


def test_one_and_one_point_zero_are_one_value():
    assert fingerprint(config_with(recipe__clip_grad=1)) == fingerprint(config_with(recipe__clip_grad=1.0))


# --- dictionaries


def test_a_dictionary_and_back():
    config = config_with(parallel__partition=[0, 2], parallel__pp=2, model__kwargs={"depth": 4}, data__root="x")
    assert from_dict(to_dict(config)) == config
    assert from_dict({}) == Config()


def test_unknown_knobs_and_wrong_types_come_at_once_with_close_names():
    with pytest.raises(ConfigError) as caught:
        from_dict(
            {
                "recipe": {"epoch": 3, "epochs": "ten", "optimizer": {"lr": "1e-3", "weight_decays": 1}},
                "modle": {},
                "parallel": {"tp": True},
                "data": 3,
            }
        )
    first, second, third, fourth, fifth, sixth = caught.value.complaints
    assert first == "There is no knob recipe.epoch; nothing would read it. Did you mean recipe.epochs?"
    assert second.startswith("recipe.epochs=ten is not a whole number")
    assert "recipe.optimizer.weight_decay?" in third
    assert "Did you mean model?" in fourth
    assert "parallel.tp=true is not a whole number" in fifth
    assert "data=3" in sixth


def test_numbers_fit_where_nothing_is_lost():
    config = from_dict({"recipe": {"optimizer": {"lr": "1e-3", "betas": (0, 1)}}, "run": {"name": 7}})
    assert config.recipe.optimizer.lr == 1e-3
    assert config.recipe.optimizer.betas == [0.0, 1.0]
    assert config.run.name == "7"


def test_an_evaluation_in_another_dtype_has_another_name():
    assert eval_tag(config_with(parallel__dp=3, parallel__tp=2)) == "pp1_dp3_tp2_fp32"
    assert eval_tag(config_with(parallel__dp=3, parallel__tp=2, compute__dtype="bf16")) == "pp1_dp3_tp2_bf16"


def test_the_run_folder_knows_no_clock():
    assert str(run_folder(config_with(run__dir="a", run__name="b"))) == "a/b"


def test_check_does_not_change_the_config():
    config = config_with(recipe__clip_grad=1)
    before = to_dict(config)
    check(config)
    assert to_dict(config) == before and read(config, "recipe.clip_grad") == 1
    assert replace(config) == config


@pytest.mark.parametrize(("rate", "tp", "is_learnt"), [(0.1, 2, True), (0.1, 1, False), (0.0, 2, False)])
def test_divided_tokens_join_where_each_rank_draws_for_its_own(rate, tp, is_learnt):
    whole, divided = (
        config_with(
            model__kwargs={"proj_drop_rate": rate},
            compute__micro_batch_size=8,
            parallel__tp=tp,
            parallel__sequence=is_divided,
        )
        for is_divided in (False, True)
    )
    assert (fingerprint(whole) != fingerprint(divided)) == is_learnt


@pytest.mark.parametrize(("fraction", "is_learnt"), [(0.5, True), (0.0, True), (1.0, False)])
def test_tensor_parallel_ranks_join_where_channels_are_not_all_summed(fraction, is_learnt):
    """A run goes on, and is evaluated, on its own tp only."""
    two, four = (config_with(recipe__sync="partial", recipe__sync_fraction=fraction, parallel__tp=tp) for tp in (2, 4))
    assert (fingerprint(two) != fingerprint(four)) == is_learnt
    assert is_one_model(two) == (not is_learnt)
    assert is_one_model(config_with(recipe__sync="partial", recipe__sync_fraction=fraction, parallel__tp=1))
