"""A timm model on meta, or a sentence that says what to type."""

import pytest
import timm
import torch

from vit_tp.config import ModelConfig
from vit_tp.errors import ConfigError
from vit_tp.models.build import build_model, input_shape

TINY = {"embed_dim": 24, "depth": 2, "num_heads": 3}


def refusal(**fields) -> str:
    with pytest.raises(ConfigError) as caught:
        build_model(ModelConfig(**fields), num_classes=10, in_chans=3)
    return str(caught.value)


def test_the_model_is_stock_timm_on_meta():
    model = build_model(ModelConfig("vit_tiny_patch16_224", TINY), num_classes=7, in_chans=1)
    stock = timm.create_model("vit_tiny_patch16_224", num_classes=7, in_chans=1, **TINY)
    assert type(model) is type(stock)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in stock.named_parameters()}


def test_building_draws_no_random_numbers_and_warns_of_nothing(recwarn):
    before = torch.get_rng_state()
    build_model(ModelConfig("vit_tiny_patch16_224", TINY), 10, 3)
    assert torch.equal(torch.get_rng_state(), before) and not recwarn.list


@pytest.mark.parametrize(("img_size", "side"), [(None, 224), (64, 64)])
def test_the_input_has_the_models_size_unless_another_is_given(img_size, side):
    model = build_model(ModelConfig("vit_tiny_patch16_224", TINY, img_size), 10, 3)
    assert input_shape(model, 5) == (5, 3, side, side)
    assert model.pos_embed.shape[1] == (side // 16) ** 2 + 1


def test_kwargs_win_over_the_data_set():
    assert build_model(ModelConfig("vit_tiny_patch16_224", {**TINY, "num_classes": 3}), 10, 3).head.out_features == 3


@pytest.mark.parametrize("name", ["vit_base_patch16_244", "vit_bsae_patch16_224", "vit_base_patch16_244.augreg_in1k"])
def test_an_unknown_model_is_refused_with_close_names(name):
    text = refusal(timm=name)
    assert f"model.timm={name} is not a model of timm {timm.__version__}" in text
    assert "Did you mean" in text and "vit_base_patch16_224" in text


def test_a_name_like_no_other_points_to_the_list():
    assert "See `vit-tp doctor --models`." in refusal(timm="qqqqqqqq")


@pytest.mark.parametrize(
    ("kwargs", "shown"),
    [
        ({"embed_dims": 64}, "embed_dims=64"),
        ({"embed_dim": 65, "num_heads": 4}, "embed_dim=65"),
        ({"global_pool": "mean"}, "global_pool=mean"),
        ({"class_token": False}, "class_token=False"),
        ({"depth": "four"}, "depth=four"),
        ({"num_heads": 0}, "num_heads=0"),
    ],
)
def test_arguments_that_timm_refuses_are_shown(kwargs, shown):
    text = refusal(timm="vit_tiny_patch16_224", kwargs=kwargs)
    assert text.startswith("timm cannot build model.timm=vit_tiny_patch16_224 with ") and shown in text
    assert "Change model.kwargs or model.img_size." in text
