"""Parameter groups are timm's, optimizers are torch's and timm's."""

import pytest
import timm
import torch
from timm.optim import Lion, NAdamW, param_groups_weight_decay
from torch import nn

from vit_tp.config import OptimizerConfig
from vit_tp.errors import ConfigError
from vit_tp.recipe.optimizer import build_optimizer, is_frozen, no_decay_names, param_groups

MODELS = {
    "vit_tiny_patch16_224": {"embed_dim": 48, "depth": 2},
    "vit_small_patch14_reg4_dinov2": {"embed_dim": 48, "num_heads": 3, "depth": 2, "img_size": 28},
    "vit_base_patch16_clip_224": {"embed_dim": 48, "num_heads": 3, "depth": 2, "qk_norm": True},
}


def build(name="vit_tiny_patch16_224", device=None):
    with torch.device(device or "meta"):
        return timm.create_model(name, **MODELS[name])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("frozen", [[], ["blocks.0.*", "pos_embed", "patch_embed.*"]])
def test_groups_are_those_of_timm(name, frozen):
    model = build(name)
    no_decay = no_decay_names(model)  # asked before anything is frozen, as training does
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(parameter_name, frozen))
    theirs = param_groups_weight_decay(model, weight_decay=0.05, no_weight_decay_list=model.no_weight_decay())
    ours = param_groups(model.named_parameters(), no_decay, weight_decay=0.05)
    assert [group["weight_decay"] for group in ours] == [group["weight_decay"] for group in theirs]
    for mine, timms in zip(ours, theirs, strict=True):
        assert [id(parameter) for parameter in mine["params"]] == [id(parameter) for parameter in timms["params"]]


def test_what_timm_excludes_by_name_is_excluded():
    assert {"pos_embed", "cls_token", "blocks.0.attn.qkv.bias", "norm.weight"} <= no_decay_names(build())
    assert "blocks.0.attn.qkv.weight" not in no_decay_names(build())


def test_a_model_without_no_weight_decay_is_judged_by_dimensions():
    assert no_decay_names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) == {"0.bias", "1.weight", "1.bias"}


def test_a_stage_with_one_kind_of_parameter_has_one_group():
    named = [("norm.weight", nn.Parameter(torch.ones(2))), ("norm.bias", nn.Parameter(torch.ones(2)))]
    (group,) = param_groups(named, {"norm.weight", "norm.bias"}, 0.05)
    assert group["weight_decay"] == 0.0 and len(group["params"]) == 2


@pytest.mark.parametrize(
    ("name", "patterns", "frozen"),
    [
        ("blocks.1.attn.qkv.weight", ["blocks.1.*"], True),
        ("blocks.10.attn.qkv.weight", ["blocks.1.*"], False),
        ("pos_embed", ["patch_embed.*", "pos_embed"], True),
        ("head.weight", [], False),
    ],
)
def test_freezing_by_shell_pattern(name, patterns, frozen):
    assert is_frozen(name, patterns) is frozen


def twins():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    second = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    second.load_state_dict(first.state_dict())
    return first, second


def train(model, optimizer):
    data = torch.randn(10, 4, 6, generator=torch.Generator().manual_seed(1))
    for batch in data:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def stock(name, params, cfg):
    betas = tuple(cfg.betas)
    return {
        "adamw": lambda: torch.optim.AdamW(params, cfg.lr, betas, cfg.eps),
        "adam": lambda: torch.optim.Adam(params, cfg.lr, betas, cfg.eps),
        "nadamw": lambda: NAdamW(params, cfg.lr, betas, cfg.eps),
        "sgd": lambda: torch.optim.SGD(params, cfg.lr, cfg.momentum, nesterov=True),
        "momentum": lambda: torch.optim.SGD(params, cfg.lr, cfg.momentum),
        "lion": lambda: Lion(params, cfg.lr, betas),
    }[name]()


@pytest.mark.parametrize("name", ["adamw", "adam", "nadamw", "sgd", "momentum", "lion"])
def test_an_optimizer_takes_exactly_the_steps_of_the_stock_one(name):
    ours, theirs = twins()
    cfg = OptimizerConfig(name=name, lr=0.01, betas=[0.8, 0.95], eps=1e-6, momentum=0.7)
    groups = param_groups(ours.named_parameters(), no_decay_names(ours), 0.1)
    reference = stock(name, param_groups_weight_decay(theirs, 0.1), cfg)
    optimizer = build_optimizer(cfg, groups)
    assert type(optimizer) is type(reference)
    assert torch.equal(train(ours, optimizer), train(theirs, reference))


def test_adamw_is_torchs_in_its_plain_form():
    optimizer = build_optimizer(OptimizerConfig(), [{"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.3}])
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    assert (group["foreach"], group["fused"], group["weight_decay"]) == (False, None, 0.3)
    assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.9, 0.999), 1e-8)


def test_a_layerwise_optimizer_is_refused():
    with pytest.raises(ConfigError, match=r"recipe\.optimizer\.name=lamb .*Use recipe\.optimizer\.name=adamw"):
        build_optimizer(OptimizerConfig(name="lamb"), [{"params": [nn.Parameter(torch.ones(2))]}])


def test_a_stage_that_is_wholly_frozen_is_refused():
    with pytest.raises(ConfigError, match=r"recipe\.freeze"):
        build_optimizer(OptimizerConfig(), [])
