"""What a run starts from equals what stock timm loads, name by name; what does not fit is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.distributed.models import randomise_
from vit_tp.checkpoint.export import MARK
from vit_tp.checkpoint.pretrained import open_pretrained, start_from
from vit_tp.config import ModelConfig
from vit_tp.errors import CheckpointError
from vit_tp.models.build import build_model
from vit_tp.models.stages import Stage, stage_names
from vit_tp.models.weights import FirstWeights, materialise

VIT = "vit_tiny_patch16_224"
SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 4}


def stock(name: str = VIT, seed: int = 0, **kwargs) -> nn.Module:
    return randomise_(timm.create_model(name, **kwargs), seed)


def saved(state: dict[str, Tensor], path: Path) -> str:
    state = {name: tensor.clone() if isinstance(tensor, Tensor) else tensor for name, tensor in state.items()}
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return str(path)


def wish(pretrained: str | bool | None, name: str = VIT, img_size: int | None = 32, **kwargs) -> ModelConfig:
    return ModelConfig(name, {**(SMALL if name == VIT else {}), **kwargs}, img_size, pretrained)


def starting_weights(model: ModelConfig, num_classes: int, in_chans: int = 3) -> dict[str, Tensor]:
    """All stages of a training, filled as a run fills them."""
    whole = build_model(model, num_classes, in_chans)
    fill = start_from(model, num_classes, in_chans, FirstWeights(seed=5))
    stages = [materialise(whole, name, fill) for name in stage_names(whole)]
    return {name: param.detach() for stage in stages for name, param in stage.named_timm_parameters()}


def loaded_by_timm(file: str, seed: int = 9, name: str = VIT, **kwargs) -> dict[str, Tensor]:
    """The oracle: stock timm, told of the file as its users tell it."""
    torch.manual_seed(seed)
    overlay = {"file": file, **kwargs.pop("overlay", {})}
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs).state_dict()


@pytest.fixture
def checkpoint(tmp_path) -> str:
    return saved(stock(img_size=32, num_classes=7, **SMALL).state_dict(), tmp_path / "vit.safetensors")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin"])
def test_every_tensor_is_that_of_the_file(suffix, tmp_path):
    state = stock(img_size=32, num_classes=7, **SMALL).state_dict()
    found = starting_weights(wish(saved(state, tmp_path / f"vit{suffix}")), num_classes=7)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_head_for_other_classes_is_drawn_and_the_rest_is_the_files(checkpoint):
    """P64."""
    found, drawn = (starting_weights(wish(file), num_classes=10) for file in (checkpoint, None))
    theirs = loaded_by_timm(checkpoint, img_size=32, num_classes=10, overlay={"num_classes": 7}, **SMALL)
    for name, tensor in found.items():
        assert torch.equal(tensor, drawn[name] if name.startswith("head.") else theirs[name]), name
    line = open_pretrained(wish(checkpoint), 10, 3).describe()
    assert line == f"{checkpoint}: 30 loaded; re-made head.weight, head.bias"


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"img_size": 64}, ["resized pos_embed (1 x 5 x 32 -> 1 x 17 x 32)"]),
        ({"img_size": 48, "patch_size": 8}, ["pos_embed (1 x 5 x 32 -> 1 x 37 x 32)", "16 x 16 -> 32 x 3 x 8 x 8"]),
        ({"img_size": 32, "in_chans": 1}, ["patch_embed.proj.weight (32 x 3 x 16 x 16 -> 32 x 1 x 16 x 16)"]),
        ({"img_size": (64, 32)}, ["pos_embed (1 x 5 x 32 -> 1 x 9 x 32)"]),
    ],
    ids=["4x larger grid", "patches", "channels", "oblong"],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_what_has_another_size_is_resampled_by_timm_and_told(wanted, told, suffix, tmp_path):
    """P76: a local file, not only timm's own."""
    state = stock(img_size=32, num_classes=7, **SMALL).state_dict()
    file = saved(state, tmp_path / f"vit{suffix}")
    kwargs = {**SMALL, **wanted}
    img_size, in_chans = kwargs.pop("img_size"), kwargs.pop("in_chans", 3)
    model = ModelConfig(VIT, kwargs, img_size, file)
    found = starting_weights(model, 7, in_chans)
    theirs = loaded_by_timm(
        file, img_size=img_size, in_chans=in_chans, num_classes=7, overlay={"num_classes": 7}, **kwargs
    )
    assert all(torch.equal(found[name], theirs[name]) for name in theirs)
    changed = [name for name in theirs if theirs[name].shape != state[name].shape]
    line = open_pretrained(model, 7, in_chans).describe()
    assert changed and all(name in line for name in changed) and all(words in line for words in told), line


def test_a_224_file_starts_a_448_run(tmp_path):
    """P76, at the sizes of its report."""
    file = saved(stock(num_classes=7, **SMALL).state_dict(), tmp_path / "224.pth")
    found = starting_weights(wish(file, img_size=448), 7)
    theirs = loaded_by_timm(file, img_size=448, num_classes=7, overlay={"num_classes": 7}, **SMALL)
    assert torch.equal(found["pos_embed"], theirs["pos_embed"])
    assert "pos_embed (1 x 197 x 32 -> 1 x 785 x 32)" in open_pretrained(wish(file, img_size=448), 7, 3).describe()


@pytest.mark.parametrize("wrap", ["state_dict", "model", "state_dict_ema", "model_ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_wrappers_that_timm_unwraps(wrap, prefix, tmp_path):
    state, other = (stock(seed=seed, img_size=32, num_classes=7, **SMALL).state_dict() for seed in (0, 1))
    other = {prefix + name: tensor for name, tensor in other.items()}
    wrapped = {wrap: {prefix + name: tensor for name, tensor in state.items()}, "epoch": 3}
    if wrap.endswith("_ema"):
        wrapped["state_dict"] = other  # the average comes before it
    found = starting_weights(wish(saved(wrapped, tmp_path / "train.pth")), 7)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_an_index_leads_to_the_parts_of_large_weights(tmp_path):
    """As exports above 2 GiB are written."""
    state = stock(img_size=32, num_classes=7, **SMALL).state_dict()
    where = {name: f"model-0000{1 + (i % 3)}-of-00003.safetensors" for i, name in enumerate(state)}
    for part in set(where.values()):
        saved({name: state[name] for name in state if where[name] == part}, tmp_path / part)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    found = starting_weights(wish(str(index)), 7)
    assert all(torch.equal(found[name], state[name]) for name in state)


def refused(model: ModelConfig, num_classes: int = 7) -> str:
    with pytest.raises(CheckpointError) as error:
        open_pretrained(model, num_classes, 3)
    return str(error.value)


@pytest.mark.parametrize("num_classes", [7, 10])
def test_missing_and_surplus_tensors_are_named_whatever_the_classes(num_classes, tmp_path):
    """P64: stock timm lets both pass where the classes differ."""
    state = stock(img_size=32, num_classes=7, **SMALL).state_dict()
    state["blocks.1.mlp.fc3.weight"] = state.pop("blocks.1.mlp.fc2.weight")
    del state["blocks.0.attn.proj.bias"]
    text = refused(wish(saved(state, tmp_path / "vit.pth")), num_classes)
    assert "2 missing: blocks.0.attn.proj.bias, blocks.1.mlp.fc2.weight; 1 surplus: blocks.1.mlp.fc3.weight." in text
    assert f"model.timm={VIT}" in text and "Use the model.timm and model.kwargs" in text


def test_half_a_head_is_not_made_anew(tmp_path):
    state = stock(img_size=32, num_classes=7, **SMALL).state_dict()
    del state["head.bias"]
    assert "1 missing: head.bias" in refused(wish(saved(state, tmp_path / "vit.pth")))


def test_a_file_without_head_starts_a_classifier_and_says_so(tmp_path):
    state = stock(img_size=32, num_classes=0, **SMALL).state_dict()
    file = saved(state, tmp_path / "features.safetensors")
    assert "re-made head.weight, head.bias" in open_pretrained(wish(file), 7, 3).describe()
    found = starting_weights(wish(file), 7)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_another_model_is_refused_with_ten_names_and_a_count(tmp_path):
    deep = stock(img_size=32, num_classes=7, **{**SMALL, "depth": 4})
    text = refused(wish(saved(deep.state_dict(), tmp_path / "deep.pth")))
    assert "24 surplus: blocks.2.norm1.weight" in text and "and 14 more" in text
    wide = stock(img_size=32, num_classes=7, **{**SMALL, "embed_dim": 64})
    text = refused(wish(saved(wide.state_dict(), tmp_path / "wide.pth")))
    assert "cls_token (1 x 1 x 64 there, 1 x 1 x 32 in the model)" in text
    assert "head.weight" in text or "more" in text
    foreign = {f"layer{i}.conv.weight": torch.ones(1) for i in range(3)}
    text = refused(wish(saved(foreign, tmp_path / "resnet.pth")))
    assert "3 surplus: layer0.conv.weight" in text and "missing: cls_token" in text


def test_a_missing_position_table_is_accepted_where_it_is_computed(tmp_path):
    """P76: learnt tables must come from the file; rotary ones are in no file."""
    state = stock(img_size=32, num_classes=7, **SMALL).state_dict()
    del state["pos_embed"]
    assert "1 missing: pos_embed." in refused(wish(saved(state, tmp_path / "vit.pth")))
    rope = {"embed_dim": 48, "depth": 2, "num_heads": 2}
    name = "vit_small_patch16_rope_224"
    state = stock(name, img_size=32, num_classes=7, **rope).state_dict()
    assert not any("pos" in key or "rope" in key for key in state)
    file = saved(state, tmp_path / "rope.pth")
    assert len(open_pretrained(wish(file, name, **rope), 7, 3).weights) == len(state)


def test_an_old_pth_is_refused_with_how_to_convert_it(tmp_path):
    path = tmp_path / "old.pth"
    torch.save(stock(img_size=32, num_classes=7, **SMALL).state_dict(), path, _use_new_zipfile_serialization=False)
    text = refused(wish(str(path)))
    code = text.split('python -c "')[1].split('"')[0]
    assert "cannot be mapped" in text and "model.pretrained=converted.pth" in text
    exec(code.replace("'converted.pth'", repr(str(tmp_path / "converted.pth"))))
    assert len(open_pretrained(wish(str(tmp_path / "converted.pth")), 7, 3).weights) == 32


@pytest.mark.parametrize("name", ["broken.safetensors", "broken.pth", "weights.npz"])
def test_a_file_that_is_no_checkpoint_is_refused(name, tmp_path):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1")
    text = refused(wish(str(tmp_path / name)))
    assert name in text and ("Use" in text or "Convert" in text)


def test_numbers_that_are_none_are_refused_by_name(checkpoint, tmp_path):
    state = timm.models.load_state_dict(checkpoint)
    state["blocks.0.mlp.fc1.bias"][3] = float("nan")
    with pytest.raises(CheckpointError, match=r"blocks\.0\.mlp\.fc1\.bias holds NaN in model\.pretrained=.*diverged"):
        starting_weights(wish(saved(state, tmp_path / "nan.safetensors")), 7)
    state["blocks.0.mlp.fc1.bias"] = torch.zeros(len(state["blocks.0.mlp.fc1.bias"]), dtype=torch.int8)
    text = refused(wish(saved(state, tmp_path / "int8.safetensors")))
    assert "1 of another type: blocks.0.mlp.fc1.bias (torch.int8 there, torch.float32 in the model)" in text


def test_code_in_a_pickle_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    assert "evil.pth cannot be read" in refused(wish(str(tmp_path / "evil.pth")))
    assert not (tmp_path / "ran").exists()


@torch.no_grad()
def test_statistics_of_batch_norms_come_from_the_file(tmp_path):
    model = stock("test_resnet", num_classes=7)
    for buffer in model.buffers():
        buffer.copy_(torch.rand(buffer.shape) * 9)
    file = saved(model.state_dict(), tmp_path / "resnet.pth")
    other = timm.create_model("test_resnet", num_classes=7)
    fill = start_from(ModelConfig("test_resnet", pretrained=file), 7, 3, lambda whole, stage, skip: None)
    fill(other, Stage(other, "model"))
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_null_draws_first_weights():
    fill = FirstWeights(0)
    assert start_from(wish(None), 7, 3, fill) is fill


def test_timm_is_left_as_it_was(checkpoint):
    from timm.models import _builder
    from torch.utils.serialization import config

    kept = _builder.load_pretrained
    open_pretrained(wish(checkpoint), 7, 3)
    assert _builder.load_pretrained is kept and config.load.mmap is False


def test_a_timm_that_loads_otherwise_is_noticed(checkpoint, monkeypatch):
    from timm.models import vision_transformer

    original = vision_transformer.build_model_with_cfg
    monkeypatch.setattr(
        vision_transformer, "build_model_with_cfg", lambda cls, name, pretrained, **kw: original(cls, name, False, **kw)
    )
    assert "asked 0 times for the weights" in refused(wish(checkpoint))


def test_weights_of_partial_sums_are_no_start(tmp_path):
    """They have timm's names and shapes, and are another model on any other tp."""
    file = tmp_path / "model.safetensors"
    marked = {MARK: "trained with recipe.sync=partial on parallel.tp=2"}
    save_file({"head.bias": torch.zeros(2)}, file, metadata=marked)
    with pytest.raises(CheckpointError, match="trained with recipe.sync=partial on parallel.tp=2, where each rank"):
        open_pretrained(ModelConfig(timm="vit_tiny_patch16_224", pretrained=str(file)), 2, 3)
