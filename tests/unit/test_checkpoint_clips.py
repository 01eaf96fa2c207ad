"""What a video model starts from: weights of its image model, inflated, or of a video model like it (P83)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

import vit_tp
from tests.distributed.models import randomise_
from vit_tp.checkpoint.export import VIDEO, fill_from
from vit_tp.checkpoint.pretrained import open_pretrained, start_from
from vit_tp.config import ModelConfig
from vit_tp.config.schema import VideoConfig
from vit_tp.errors import CheckpointError
from vit_tp.models.build import build_model
from vit_tp.models.stages import stage_names
from vit_tp.models.weights import Fill, FirstWeights, materialise

VIT = "vit_tiny_patch16_224"
SMALL: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 4, "patch_size": 8}
KERNEL = "patch_embed.proj.weight"


def wish(file: str | None, size: Any = 32, num_frames: int | None = 8, name: str = VIT, **video: Any) -> ModelConfig:
    return ModelConfig(name, SMALL, size, file, VideoConfig(num_frames, **video))


def image_model(name: str = VIT, **kwargs: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return randomise_(timm.create_model(name, **SMALL, **{"img_size": 32, "num_classes": 10, **kwargs})).eval()


def saved(model: nn.Module, path: Path, video: VideoConfig | None = None) -> str:
    """Write weights; with what an export's metadata says of a video model, where that is given."""
    metadata = None if video is None else {VIDEO: json.dumps(dataclasses.asdict(video))}
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path, metadata)
    return str(path)


def started(config: ModelConfig) -> dict[str, Tensor]:
    whole, fill = build_model(config, 10, 3), start_from(config, 10, 3, FirstWeights(0))
    stages = [materialise(whole, name, fill) for name in stage_names(whole)]
    return {name: tensor.clone() for stage in stages for name, tensor in stage.named_timm_tensors()}


@pytest.fixture
def image(tmp_path) -> str:
    return saved(image_model(), tmp_path / "image.safetensors")


@pytest.mark.parametrize("inflation", ["mean", "central"])
def test_the_stem_of_a_still_clip_is_the_image_models(image: str, inflation: str):
    stock, x = image_model(), torch.randn(2, 3, 32, 32)
    model = vit_tp.video_model(timm.create_model(VIT, **SMALL, img_size=32, num_classes=10), 8, tubelet_size=4)
    model.load_state_dict(started(wish(image, tubelet_size=4, inflation=inflation)))
    for tokens in model.patch_embed(x.unsqueeze(2).expand(-1, -1, 8, -1, -1)).flatten(2, 3).unbind(1):
        assert torch.allclose(tokens, stock.patch_embed(x), atol=1e-5)


def test_one_line_says_what_became_of_every_tensor(image: str):
    line = open_pretrained(wish(image, [48, 32], attention="divided"), 10, 3).describe()
    assert line == (
        f"{image}: 40 loaded, resized pos_embed (1 x 17 x 32 -> 1 x 25 x 32), "
        f"inflated {KERNEL} (mean, 32 x 3 x 2 x 8 x 8)"
        ", copied blocks.*.norm1 to blocks.*.norm_time, blocks.*.attn.qkv to blocks.*.attn_time.qkv"
        "; new time_embed, blocks.*.attn_time.proj"
    )
    line = open_pretrained(wish(image, position="sincos", attention="factorised"), 10, 3).describe()
    assert line == (
        f"{image}: 63 loaded, inflated {KERNEL} (mean, 32 x 3 x 2 x 8 x 8), copied blocks.1.norm1 to "
        "time_blocks.*.norm1, blocks.1.attn.qkv to time_blocks.*.attn.qkv, blocks.1.norm2 to time_blocks.*.norm2, "
        "blocks.1.mlp.fc1 to time_blocks.*.mlp.fc1"
        "; new time_blocks.*.attn.proj, time_blocks.*.mlp.fc2; ignored pos_embed"
    )
    line = open_pretrained(wish(image), 7, 3).describe()
    assert "re-made head.weight, head.bias" in line and "; new time_embed; " in line


def test_all_but_what_is_new_is_what_timm_loads(image: str):
    overlay = {"file": image}
    stock = timm.create_model(
        VIT, pretrained=True, pretrained_cfg_overlay=overlay, **SMALL, img_size=(48, 32), num_classes=10
    )
    found, wanted = started(wish(image, [48, 32], attention="divided")), stock.state_dict()
    wanted = {
        name: tensor for name, tensor in wanted.items() if not name.startswith("head")
    }  # timm expects 1000 classes
    for name, tensor in wanted.items():
        assert torch.equal(found[name].mean(2) * 2 if name == KERNEL else found[name], tensor), name
    for index in range(2):
        assert torch.equal(found[f"blocks.{index}.attn_time.qkv.weight"], wanted[f"blocks.{index}.attn.qkv.weight"])
        assert torch.equal(found[f"blocks.{index}.norm_time.weight"], wanted[f"blocks.{index}.norm1.weight"])
        assert not found[f"blocks.{index}.attn_time.proj.weight"].any()
    assert not found["time_embed"].any()


@pytest.mark.parametrize("attention", ["joint", "divided", "factorised"])
def test_a_loop_of_ones_own_starts_from_the_same_weights(image: str, attention: str):
    stock = timm.create_model(VIT, **SMALL, img_size=32, num_classes=10)
    stock.load_state_dict(load_file(image))
    wanted = vit_tp.video_model(stock, 8, attention=attention).state_dict()
    found = started(wish(image, attention=attention))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_what_timm_does_not_compute_stays_in_the_file(image: str):
    """Each rank touches its own part of a mapped file; only the small kernel is memory."""
    fitted = open_pretrained(wish(image, attention="divided"), 10, 3)
    other = fitted.weights["blocks.0.attn_time.qkv.weight"]
    assert other.data_ptr() == fitted.weights["blocks.0.attn.qkv.weight"].data_ptr()
    assert fitted.computed == []


@pytest.mark.parametrize("video", [{}, {"attention": "divided"}, {"attention": "factorised"}, {"position": "sincos"}])
def test_our_own_export_loads_as_it_is(tmp_path, video: dict):
    model = randomise_(vit_tp.video_model(image_model(), 8, **video))
    file = saved(model, tmp_path / "video.safetensors")
    found, state = started(wish(file, **video)), model.state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert open_pretrained(wish(file, **video), 10, 3).describe() == f"{file}: {len(state)} loaded"


def test_another_size_and_length_resample_both_tables(tmp_path):
    model = randomise_(vit_tp.video_model(image_model(), 8))
    file = saved(model, tmp_path / "video.safetensors")
    config = wish(file, [48, 32], num_frames=16)
    assert "resized pos_embed (1 x 17 x 32 -> 1 x 25 x 32), time_embed (1 x 4 x 32 -> 1 x 8 x 32)" in (
        open_pretrained(config, 10, 3).describe()
    )
    found = started(config)
    assert torch.equal(found["pos_embed"], resample_abs_pos_embed(model.pos_embed.detach(), (6, 4), (4, 4)))
    assert torch.allclose(found["time_embed"][0, 1], model.time_embed[0, 0] * 0.75 + model.time_embed[0, 1] * 0.25)


def test_patches_of_another_size_are_resampled_in_each_frame(tmp_path):
    from timm.layers import resample_patch_embed

    model = randomise_(vit_tp.video_model(image_model(), 8))
    config = wish(saved(model, tmp_path / "video.safetensors"), 32)
    config.kwargs = {**SMALL, "patch_size": 16}
    kernel = model.patch_embed.proj.weight.detach()
    wanted = torch.stack([resample_patch_embed(kernel[:, :, t].clone(), [16, 16]) for t in range(2)], dim=2)
    assert torch.allclose(started(config)[KERNEL], wanted, atol=1e-6)


def test_tubelets_of_another_size_are_refused(tmp_path):
    file = saved(vit_tp.video_model(image_model(), 8), tmp_path / "video.safetensors")
    with pytest.raises(CheckpointError, match=r"cover 2 frames.*tubelet_size=1;.* Use model\.video\.tubelet_size=2"):
        open_pretrained(wish(file, tubelet_size=1), 10, 3)
    with pytest.raises(CheckpointError, match=r"model\.video\.num_frames is null.* Use model\.video\.num_frames"):
        open_pretrained(wish(file, num_frames=None), 10, 3)
    with pytest.raises(CheckpointError, match=r"missing: blocks\.0\.norm_time\.weight"):
        open_pretrained(wish(file, attention="divided"), 10, 3)
    with pytest.raises(CheckpointError, match="missing: pos_embed|surplus: pos_embed"):
        open_pretrained(wish(file, position="sincos"), 10, 3)


def test_the_same_tensors_in_another_model_are_refused(tmp_path):
    """A rotary table has no weights: of an export of DINOv3, nothing else tells rope from sincos."""
    name, file = "vit_small_patch16_dinov3", tmp_path / "dinov3.safetensors"
    made = VideoConfig(8, position="rope")
    model = vit_tp.video_model(image_model(name), 8, position="rope")
    saved(model, file, made)
    config = wish(str(file), name=name, position="sincos")
    with pytest.raises(CheckpointError) as caught:
        open_pretrained(config, 10, 3)
    assert str(caught.value) == (
        f"{file} is of a video model with position=rope, and model.video.position=sincos; what its weights learnt "
        "there they do not mean here. Use model.video.position=rope, or start from the weights of the image model."
    )
    config.video = VideoConfig(16, position="rope", inflation="central", time_depth=2)
    found, state = started(config), model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items()), "lengths and inflation may differ"
    config.video = VideoConfig(8, position="sincos")
    config.pretrained = saved(model, tmp_path / "foreign.safetensors")
    assert started(config).keys() == state.keys(), "without metadata it goes on as ever"


def test_every_choice_of_an_export_is_asked_for_as_it_is_typed(tmp_path):
    made = VideoConfig(8, attention="factorised", time_depth=2)
    model = vit_tp.video_model(image_model(), 8, attention="factorised", time_depth=2)
    file = saved(model, tmp_path / "video.safetensors", made)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: "video.safetensors" for name in model.state_dict()}}))
    for source in (file, str(index)):
        with pytest.raises(
            CheckpointError, match=r"time_depth=2, and model\.video\.time_depth=3; .* Use model\.video\.time"
        ):
            open_pretrained(wish(source, attention="factorised", time_depth=3), 10, 3)
        with pytest.raises(CheckpointError) as caught:
            open_pretrained(wish(source, tubelet_size=4, attention="divided"), 10, 3)
        assert "Use model.video.tubelet_size=2 model.video.attention=factorised" in str(caught.value)
        with pytest.raises(CheckpointError) as caught:
            open_pretrained(wish(source, num_frames=None), 10, 3)
        assert str(caught.value).endswith(
            "Use model.video.num_frames=8 model.video.tubelet_size=2 model.video.attention=factorised "
            "model.video.position=learned model.video.time_depth=2."
        )
        assert open_pretrained(wish(source, attention="factorised", time_depth=2), 10, 3)
    with pytest.raises(CheckpointError, match=r"Use model\.video\.attention=factorised"):
        materialise(build_model(wish(None), 10, 3), "embed", fill_from_file(tmp_path, file))
    joint = saved(vit_tp.video_model(image_model(), 8), tmp_path / "joint.safetensors", VideoConfig(8))
    assert open_pretrained(wish(joint, time_depth=9), 10, 3), "of no meaning but for time blocks"


def fill_from_file(folder: Path, file: str) -> Fill:
    Path(file).rename(folder / "model.safetensors")
    return fill_from(folder, FirstWeights(0))


def test_an_eva_starts_from_its_image_model_too(tmp_path):
    name = "eva02_tiny_patch14_224"
    stock = image_model(name)
    file = saved(stock, tmp_path / "eva.safetensors")
    config = wish(file, name=name, position="rope")
    assert open_pretrained(config, 10, 3).describe().endswith("(mean, 32 x 3 x 2 x 8 x 8)"), "nothing is new"
    found = started(config)
    assert all(torch.equal(found[n], tensor) for n, tensor in stock.state_dict().items() if n != KERNEL)
