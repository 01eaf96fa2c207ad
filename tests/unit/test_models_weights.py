"""First weights: distributed as stock timm's, decided by (seed, stage) alone, and complete."""

import math

import pytest
import timm
import torch
from torch import nn

from vit_tp.config import ModelConfig
from vit_tp.models.build import build_model
from vit_tp.models.stages import stage_names
from vit_tp.models.weights import FirstWeights, materialise

NAME = "vit_tiny_patch16_224"
RICH = {
    "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4, "reg_tokens": 4, "qk_norm": True,
    "init_values": 0.1, "global_pool": "map",
}  # fmt: skip
INITS = {
    "timm": {"weight_init": ""},
    "jax": {"weight_init": "jax"},
    "jax_nlhb": {"weight_init": "jax_nlhb"},
    "moco": {"weight_init": "moco"},
    "reset": {"weight_init": "reset"},
    "fix_init": {"weight_init": "", "fix_init": True},
    "jax, fix_init, pre_norm": {"weight_init": "jax", "fix_init": True, "pre_norm": True},
}
SIGMAS = 5.0
"""Of the sampling error of a mean and of a standard deviation; seeds are fixed, so this cannot flicker."""


def on_meta(**kwargs) -> nn.Module:
    return build_model(ModelConfig(NAME, {**RICH, **kwargs}, img_size=32), num_classes=10, in_chans=3)


def first_weights(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    stages = [materialise(model, name, FirstWeights(seed)) for name in stage_names(model)]
    return {name: p.detach() for stage in stages for name, p in stage.named_timm_parameters()}


@pytest.mark.parametrize("kwargs", INITS.values(), ids=INITS)
def test_mean_and_spread_of_every_parameter_are_those_of_stock_timm(kwargs):
    torch.manual_seed(0)
    stock = timm.create_model(NAME, img_size=32, num_classes=10, **RICH, **kwargs)
    ours = first_weights(on_meta(**kwargs), seed=0)
    assert ours.keys() == dict(stock.named_parameters()).keys()
    for name, theirs in stock.named_parameters():
        found, n = ours[name], theirs.numel()
        assert found.shape == theirs.shape and not found.isnan().any(), name
        if theirs.min() == theirs.max():
            assert torch.equal(found, theirs), name  # constants: zero biases, unit norms, LayerScale
            continue
        std = theirs.std().item()
        assert abs(found.mean() - theirs.mean()) < SIGMAS * std * math.sqrt(2 / n), name
        assert abs(found.std() / std - 1) < SIGMAS / math.sqrt(n), name


def test_fix_init_scales_each_block_by_its_own_depth():
    plain, scaled = (first_weights(on_meta(fix_init=on), seed=0) for on in (False, True))
    for index in range(RICH["depth"]):
        for name in (f"blocks.{index}.attn.proj.weight", f"blocks.{index}.mlp.fc2.weight"):
            torch.testing.assert_close(scaled[name] * math.sqrt(2 * (index + 1)), plain[name])
        assert torch.equal(scaled[f"blocks.{index}.attn.qkv.weight"], plain[f"blocks.{index}.attn.qkv.weight"])


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    model = on_meta()
    first = first_weights(model, seed=3)
    torch.rand(5)
    again, other = first_weights(model, seed=3), first_weights(model, seed=4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name, tensor in first.items() if tensor.min() < tensor.max()]
    assert len(drawn) > 10 and not any(torch.equal(first[name], other[name]) for name in drawn)


def test_a_stage_depends_on_no_other_stage():
    """Nor on how many there are: a pipeline rank fills its own stages, in its own order."""
    short, long = on_meta(depth=2), on_meta(depth=5)
    wanted = first_weights(short, seed=0)
    for name in ("head", "blocks.1", "embed"):
        for timm_name, parameter in materialise(long, name, FirstWeights(0)).named_timm_parameters():
            assert torch.equal(parameter, wanted[timm_name]), timm_name


def test_blocks_differ():
    weights = first_weights(on_meta(), seed=0)
    assert not torch.equal(weights["blocks.0.attn.qkv.weight"], weights["blocks.1.attn.qkv.weight"])


def test_filling_leaves_the_model_on_meta_and_the_default_generator_alone():
    model, state = on_meta(), torch.get_rng_state()
    first_weights(model, seed=0)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_real_model_is_copied_and_not_aliased():
    model = timm.create_model(NAME, img_size=32, num_classes=10, **RICH)
    named = dict(model.named_parameters())

    def fill(model, stage):
        raise AssertionError("a real model needs no filling")

    for stage_name in stage_names(model):
        for name, parameter in materialise(model, stage_name, fill).named_timm_parameters():
            assert torch.equal(parameter, named[name]) and parameter.data_ptr() != named[name].data_ptr()
            assert parameter.requires_grad
            with torch.no_grad():
                parameter.zero_()
    assert named["blocks.0.attn.qkv.weight"].abs().sum() > 0


def test_frozen_parameters_stay_frozen():
    model = on_meta()
    model.blocks[1].requires_grad_(False)
    assert not any(p.requires_grad for p in materialise(model, "blocks.1", FirstWeights(0)).parameters())
    assert all(p.requires_grad for p in materialise(model, "blocks.0", FirstWeights(0)).parameters())


def test_a_tensor_left_unset_is_refused_by_name():
    def forgets_a_bias(model, stage):
        for name, parameter in stage.inner.named_parameters():
            if not name.endswith("mlp.fc1.bias"):
                parameter.fill_(1.0)

    with pytest.raises(RuntimeError, match=r"^blocks\.1\.mlp\.fc1\.bias of stage blocks\.1 were left without a value"):
        materialise(on_meta(), "blocks.1", forgets_a_bias)


def test_a_tensor_filled_in_part_is_refused():
    def forgets_a_row(model, stage):
        for parameter in stage.parameters():
            parameter.fill_(1.0)
        stage.block.attn.qkv.weight[-1].fill_(float("nan"))

    with pytest.raises(RuntimeError, match="attn.qkv.weight of stage blocks.0"):
        materialise(on_meta(), "blocks.0", forgets_a_row)
