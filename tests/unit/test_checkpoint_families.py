"""Checkpoints as their authors published them, by other names, come out of timm's filters as stock timm loads them.

Each is written backwards from a small stock model, so that the right values are known without any filter.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from tests.unit.test_checkpoint_pretrained import loaded_by_timm, stock, wish
from vit_tp.checkpoint.pretrained import open_pretrained
from vit_tp.errors import CheckpointError

State = dict[str, Tensor]


def renamed(state: State, rules: list[tuple[str, str]], prefix: str = "") -> State:
    out = {}
    for name, tensor in state.items():
        for old, new in rules:
            name = re.sub(old, new, name)
        out[prefix + name] = tensor
    return out


def dinov2(state: State) -> State:
    """Registers, and a class token whose position is stored in the table."""
    state = renamed(state, [("^reg_token", "register_tokens")])
    width = state["cls_token"].shape[-1]
    position = torch.full((1, 1, width), 0.25)
    state["cls_token"] = state["cls_token"] - 0.25
    return {**state, "pos_embed": torch.cat([position, state["pos_embed"]], 1), "mask_token": torch.ones(1, width)}


def openai_clip(state: State) -> State:
    rules = [
        (r"^patch_embed\.proj", "conv1"), ("^pos_embed", "positional_embedding"), ("^norm_pre", "ln_pre"),
        ("^norm", "ln_post"), (r"^blocks\.", "transformer.resblocks."), (r"\.norm", ".ln_"), (r"qkv\.", "in_proj_"),
        (r"attn\.proj", "attn.out_proj"), ("fc1", "c_fc"), ("fc2", "c_proj"),
    ]  # fmt: skip
    proj = state["head.weight"].T.contiguous()
    state = {name: t for name, t in state.items() if not name.startswith("head.")}
    out = renamed(state, rules, "visual.")
    out["visual.class_embedding"] = out.pop("visual.cls_token").flatten()
    out["visual.positional_embedding"] = out["visual.positional_embedding"][0]
    return {**out, "visual.proj": proj, "logit_scale": torch.ones(()), "token_embedding.weight": torch.ones(9, 4)}


def open_clip(state: State) -> State:
    head = {"visual.head.proj.weight": state["head.weight"], "text.positional_embedding": torch.ones(3)}
    return {**renamed({n: t for n, t in state.items() if "head" not in n}, [], "visual.trunk."), **head}


def deit3(state: State) -> dict:
    return {"model": renamed(state, [(r"ls(\d)\.gamma", r"gamma_\1")])}


def eva02(state: State) -> dict:
    """Masked image modelling: a mask token, a head over a codebook, a last norm that becomes the head's norm."""
    rules = [
        (r"fc1_g\.", "w1."),
        (r"fc1_x\.", "w2."),
        (r"fc2\.", "w3."),
        (r"mlp\.norm", "mlp.ffn_ln"),
        ("^fc_norm", "norm"),
    ]
    out = renamed({n: t for n, t in state.items() if "head" not in n}, rules)
    extra = {
        "mask_token": torch.ones(1, 1, 48),
        "lm_head.weight": torch.ones(9, 48),
        "rope.freqs_cos": torch.ones(4, 24),
    }
    return {"module": {**out, **extra}}


def dinov3(state: State) -> State:
    """Two of the three biases of qkv, under one name."""
    out = renamed(state, [("^reg_token", "storage_tokens"), ("gamma_", "ls"), (r"ls(\d)$", r"ls\1.gamma")])
    for name in [name for name in out if name.endswith("q_bias")]:
        q, v = out.pop(name), out.pop(name.replace("q_bias", "v_bias"))
        out[name.replace("q_bias", "qkv.bias")] = torch.cat([q, torch.full_like(q, float("nan")), v])
    return {**out, "mask_token": torch.ones(1, 48), "rope_embed.periods": torch.ones(6)}


def beit3(state: State) -> dict:
    """Three projections for each qkv, a branch for text beside the one for images, two positions too many."""
    rules = [
        (r"^patch_embed\.", "vision_embed."), ("^cls_token", "vision_embed.cls_token"),
        (r"^blocks\.", "encoder.layers."),
        (r"\.norm1\.", ".self_attn_layer_norm.A."), (r"\.norm2\.", ".final_layer_norm.A."),
        (r"\.attn\.norm\.", ".self_attn.inner_attn_ln.A."), (r"\.mlp\.norm\.", ".ffn.A.ffn_layernorm."),
        (r"\.mlp\.", ".ffn.A."), (r"\.attn\.proj\.", ".self_attn.out_proj.A."), (r"\.attn\.", ".self_attn."),
    ]  # fmt: skip
    ends = {name: state.pop(name) for name in list(state) if name.startswith(("head.", "fc_norm."))}
    table = torch.cat([torch.zeros(2, 48), state.pop("pos_embed")[0]])
    out = renamed(state, rules, "beit3.")
    for name in [name for name in out if ".qkv." in name]:
        for part, tensor in zip("qkv", out.pop(name).chunk(3)):
            out[name.replace(".qkv.", f".{part}_proj.A.")] = tensor
    return {"model": {**out, **ends, "beit3.encoder.embed_positions.A.weight": table}}


VIT = {"embed_dim": 48, "depth": 2, "num_heads": 4}
FAMILIES = {
    "DINOv2": ("vit_small_patch14_reg4_dinov2", dinov2, 28, VIT),
    "OpenAI CLIP": ("vit_base_patch32_clip_224", openai_clip, 64, VIT),
    "OpenCLIP": ("vit_base_patch16_siglip_224", open_clip, 32, VIT),
    "DeiT III": ("deit3_small_patch16_224", deit3, 32, VIT),
    "EVA-02": ("eva02_tiny_patch14_224", eva02, 28, {**VIT, "num_heads": 2}),
    "DINOv3": ("vit_small_patch16_dinov3_qkvb", dinov3, 32, {**VIT, "num_heads": 2}),
    "BEiT-3": ("beit3_base_patch16_224", beit3, 32, VIT),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_checkpoint_gives_the_models_tensors(family, tmp_path):
    name, publish, size, kwargs = FAMILIES[family]
    model = stock(name, img_size=size, num_classes=7, **kwargs)
    state = model.state_dict()
    published = publish(dict(state))
    path = tmp_path / "published.pth"
    torch.save(published, path)
    found = open_pretrained(wish(str(path), name, size, **kwargs), 7, 3)
    classes = {"num_classes": 0 if found.remade else 7}  # what the authors' file has; timm would be told
    theirs = loaded_by_timm(str(path), name=name, img_size=size, num_classes=7, overlay=classes, **kwargs)
    for key in state.keys() - set(found.remade):
        assert torch.equal(found.weights[key], theirs[key]), key
        if key != "head.bias":  # CLIP's projection has none
            assert torch.allclose(found.weights[key], state[key], atol=1e-6), key
    by_its_own_names = published.get("model", published.get("module", published))
    assert by_its_own_names.keys() != state.keys(), "the filter must have something to do"


def test_a_pooling_that_timm_leaves_out_by_name_is_told_and_elsewhere_refused(tmp_path):
    """SigLIP without its attention pooling is a model of timm's own that loads the file of the whole one."""
    state = stock("vit_base_patch16_siglip_224", img_size=32, num_classes=0, **VIT).state_dict()
    path = tmp_path / "siglip.pth"
    torch.save(state, path)
    found = open_pretrained(wish(str(path), "vit_base_patch16_siglip_gap_224", 32, **VIT), 7, 3)
    assert set(found.idle) == {name for name in state if name.startswith("attn_pool.")}
    assert found.weights.keys() == state.keys() - set(found.idle)
    plain = {**VIT, "class_token": False, "global_pool": "avg", "fc_norm": False}
    with pytest.raises(CheckpointError, match=f"{len(found.idle)} surplus: attn_pool.latent"):
        open_pretrained(wish(str(path), "vit_base_patch16_224", 32, **plain), 7, 3)


def test_a_hybrid_takes_its_own_weights_and_not_its_backbones(tmp_path):
    state = stock("vit_small_resnet26d_224", img_size=64, num_classes=7, depth=1).state_dict()
    torch.save(state, tmp_path / "hybrid.pth")
    found = open_pretrained(wish(str(tmp_path / "hybrid.pth"), "vit_small_resnet26d_224", 64, depth=1), 7, 3)
    assert found.weights.keys() == state.keys()
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in state.items())
