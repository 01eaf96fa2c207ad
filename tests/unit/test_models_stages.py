"""Stages run one after another are stock timm's model: the same bits, the same names."""

import pytest
import timm
import torch
from torch import nn

from vit_tp.errors import ConfigError
from vit_tp.models.costs import stage_bounds
from vit_tp.models.stages import build_stage, stage_names
from vit_tp.parallel.rng import Clock

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
POOLS = ["token", "avg", "avgmax", "max", "map", "prr"]
OPTIONS = {
    "plain": {},
    "registers": {"reg_tokens": 2},
    "pre_norm": {"pre_norm": True},
    "no_embed_class": {"no_embed_class": True, "reg_tokens": 2},
    "dynamic_img_size": {"dynamic_img_size": True},
    "qk_norm": {"qk_norm": True},
    "init_values": {"init_values": 0.1},
    "patch_drop": {"patch_drop_rate": 0.5},
    "prefix in the pool": {"pool_include_prefix": True},
    "no final norm": {"final_norm": False},
    "no positions": {"pos_embed": "none"},
}
ENDS = [(pool, class_token) for pool in POOLS for class_token in (True, False) if class_token or pool != "token"]
CASES = [
    pytest.param({"global_pool": pool, "class_token": class_token, **options}, id=f"{pool}-{class_token}-{name}")
    for pool, class_token in ENDS
    for name, options in OPTIONS.items()
    if name in ("plain", "registers") or (pool, class_token) in [("token", True), ("avg", False), ("prr", True)]
]


def random_model(device="cpu", **kwargs) -> nn.Module:
    """A stock timm model in which no parameter is left at zero or one."""
    with torch.device(device):
        model = timm.create_model("vit_tiny_patch16_224", **{**SMALL, **kwargs})
    if device == "cpu":
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


def run(model: nn.Module, x: torch.Tensor, clock: Clock | None = None) -> torch.Tensor:
    for name in stage_names(model):
        x = build_stage(model, name, clock)(x)
        assert x.is_contiguous()
    return x


@pytest.mark.parametrize("kwargs", CASES)
def test_stages_in_a_row_are_the_whole_model_to_the_bit(kwargs):
    model = random_model(**kwargs)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        staged, whole = run(model, x), model(x)
        # Without prefix tokens timm's stay strided as the convolution left them, and a mean over them rounds otherwise.
        model.blocks.register_forward_pre_hook(lambda module, args: (args[0].contiguous(),))
        assert torch.equal(staged, model(x))
    torch.testing.assert_close(staged, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kwargs", CASES)
def test_stages_share_out_every_parameter_under_its_timm_name(kwargs):
    model = random_model(device="meta", **kwargs)
    named = [item for name in stage_names(model) for item in build_stage(model, name).named_timm_parameters()]
    assert len(named) == len({name for name, _ in named})
    assert {name: id(p) for name, p in named} == {name: id(p) for name, p in model.named_parameters()}


def test_another_size_and_shape_with_dynamic_img_size():
    model = random_model(dynamic_img_size=True, reg_tokens=1)
    x = torch.randn(2, 3, 48, 24, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(run(model, x), model(x))


def test_the_backward_through_stages_is_that_of_the_model():
    model = random_model(qk_norm=True, reg_tokens=1)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    grads = []
    for forward in (lambda: run(model, x), lambda: model(x)):
        model.zero_grad()
        forward().square().sum().backward()
        grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[1])


def test_one_tensor_of_tokens_crosses_every_boundary():
    model = random_model(reg_tokens=2)
    x = torch.randn(2, 3, 32, 32)
    for name in stage_names(model)[:-1]:
        x = build_stage(model, name)(x)
        assert x.shape == (2, 16 + 3, 32) and x.is_floating_point()


def test_inputs_are_cast_to_the_weights():
    model = random_model().to(torch.bfloat16)
    assert build_stage(model, "embed")(torch.randn(2, 3, 32, 32)).dtype == torch.bfloat16


def test_randomness_belongs_to_the_moment_and_leaves_no_trace():
    model = random_model(proj_drop_rate=0.3, pos_drop_rate=0.3, drop_path_rate=0.3, patch_drop_rate=0.5).train()
    x, clock = torch.randn(4, 3, 32, 32), Clock(seed=1)
    state = torch.get_rng_state()
    first = run(model, x, clock)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert torch.equal(run(model, x, clock), first)
    clock.next_micro_batch()
    assert not torch.equal(run(model, x, clock), first)


def test_building_stages_leaves_the_model_as_it_was():
    model = random_model(global_pool="prr")
    before = (str(model), list(model.state_dict()))
    for name in stage_names(model):
        build_stage(model, name)
    assert (str(model), list(model.state_dict())) == before


class Sub(timm.models.vision_transformer.VisionTransformer):
    """May do anything in forward that its stages would not."""


@pytest.mark.parametrize("build", [lambda: Sub(depth=1, embed_dim=12), lambda: timm.create_model("tnt_s_patch16_224")])
def test_other_classes_are_one_stage_and_refused_in_pieces(build):
    with torch.device("meta"):
        model = build()
    assert stage_names(model) == ["model"] and stage_bounds(model, 1) == [0, 1]
    with pytest.raises(
        ConfigError, match=rf"parallel.pp=2 needs blocks .* those of {type(model).__name__} are not one"
    ):
        stage_bounds(model, 2)


def test_patches_of_many_sizes_are_refused_by_name():
    with pytest.raises(ConfigError, match="a pipeline was given a dict; .* vit_tp.shard_, which takes NaFlex dicts"):
        build_stage(random_model(), "embed")({"patches": torch.zeros(1, 4, 192)})


def test_a_layout_that_does_not_name_a_part_is_refused():
    model = random_model()
    model.adapter = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="does not say where adapter belongs"):
        stage_names(model)
