"""model.pretrained=true: timm's own weights of a name, from the cache of the Hugging Face hub, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor

from tests.unit.test_checkpoint_pretrained import SMALL, VIT, refused, saved, starting_weights, stock, wish
from vit_tp.checkpoint.pretrained import open_pretrained
from vit_tp.config import ModelConfig
from vit_tp.errors import CheckpointError, ConfigError


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """An empty cache of the Hugging Face hub, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put_in(hub: Path, repo: str, file: str, state: dict[str, Tensor]) -> None:
    folder = hub / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    saved(state, snapshot / file)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_true_takes_timms_own_weights_from_the_hubs_cache(file, hub):
    state = stock(num_classes=1000, **SMALL).state_dict()
    put_in(hub, "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", file, state)
    found = starting_weights(wish(True, img_size=64), 7)
    theirs = timm.create_model(VIT, pretrained=True, img_size=64, num_classes=7, **SMALL).state_dict()
    assert all(torch.equal(found[name], theirs[name]) for name in theirs if not name.startswith("head."))
    line = open_pretrained(wish(True, img_size=64), 7, 3).describe()
    assert line.startswith("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k: 30 loaded, resized pos_embed")
    assert all(torch.equal(starting_weights(wish(True, img_size=None), 1000)[name], state[name]) for name in state)


def test_true_takes_the_tag_that_was_asked_for(hub):
    tagged = "vit_tiny_patch16_224.augreg_in21k"
    state = stock(num_classes=21843, **SMALL).state_dict()
    put_in(hub, f"timm/{tagged}", "model.safetensors", state)
    model = ModelConfig(tagged, SMALL, None, True)
    assert torch.equal(open_pretrained(model, 21843, 3).weights["head.weight"], state["head.weight"])


def test_what_is_in_the_cache_is_not_asked_for_again(hub, monkeypatch):
    from huggingface_hub import constants, errors, file_download

    asked = []

    def no_network(*args, **kwargs):
        if not constants.HF_HUB_OFFLINE:
            asked.append(args)
        raise errors.OfflineModeIsEnabled("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(file_download, "get_hf_file_metadata", no_network)
    with pytest.raises(CheckpointError, match="cannot be had"):
        open_pretrained(wish(True), 1000, 3)
    assert asked
    asked.clear()
    put_in(hub, "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", "model.safetensors", stock(**SMALL).state_dict())
    assert open_pretrained(wish(True), 1000, 3).weights and not asked
    assert constants.HF_HUB_OFFLINE is False


def test_true_without_network_and_cache_is_one_sentence(hub):
    text = refused(wish(True))
    assert "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k) cannot be had" in text and "\n" not in text
    assert f"Run timm.create_model('{VIT}', pretrained=True) once" in text


def test_true_for_a_model_without_weights_is_refused_by_name():
    with pytest.raises(ConfigError) as error:
        open_pretrained(ModelConfig("vit_giant_patch14_224", {}, None, True), 1000, 3)
    text = str(error.value)
    assert "no weights for model.timm=vit_giant_patch14_224" in text and "vit_giant_patch14_dinov2" in text
