"""Every timm model that can be cut, built tiny: the same classes and features, a few heads and two or three blocks.

The names are timm's own list, so a new release shows here what is not covered. Two names whose tiny builds have the
same modules, parameters and attributes differ in size alone, and share one build.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any

import timm
import torch
from torch import nn

_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 4.0}
_STEMMED = {key: value for key, value in _VIT.items() if key != "patch_size"}
_AS_WIDE_AS_THE_STEM = {"img_size": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 4.0}
_PAIR = {"embed_dim": (16, 32), "num_heads": (4, 4), "mlp_ratio": (4, 4, 1)}

FAMILIES: dict[str, dict[str, Any]] = {
    "beit": _VIT,
    "cait": _VIT,
    "convit": {**_VIT, "embed_dim": 8, "local_up_to_layer": 1},  # timm multiplies the width by the heads
    "crossvit": {**_PAIR, "img_size": 120, "depth": ((1, 1, 0), (1, 2, 1))},
    "deepseek_vit": {**_VIT, "out_features": 24},
    "deit": _VIT,
    "eva": _VIT,
    "gemma4_vit": {
        "img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "head_dim": 8,
        "intermediate_size": 64, "position_embedding_size": 16,
    },
    "mlp_mixer": {"img_size": 64},
    "naflexvit": {**_VIT, "pos_embed_grid_size": (4, 4)},
    "qwen3_vit": {**_VIT, "pos_embed_grid_size": 4},
    "tnt": {
        "img_size": 32, "patch_size": 16, "embed_dim": 32, "inner_dim": 8, "depth": 2, "num_heads_inner": 4,
        "num_heads_outer": 4,
    },
    "vision_transformer": _VIT,
    "vision_transformer_hybrid": {**_STEMMED, "img_size": 64},
    "vision_transformer_relpos": _VIT,
    "vision_transformer_sam": {**_VIT, "window_size": 2, "global_attn_indexes": (1,), "neck_chans": 16},
    "vitamin": _AS_WIDE_AS_THE_STEM,
    "xcit": {key: value for key, value in _VIT.items() if key != "mlp_ratio"},
}  # fmt: skip
"""Modules of timm whose models are isotropic transformers or mixers -> what makes them tiny."""

OF_NAME: dict[str, dict[str, Any]] = {
    "vit_base_mci_224": _AS_WIDE_AS_THE_STEM,
    "crossvit_18_240": {"img_size": 120},
}

AS_WIDE_AS_THEY_ARE = ("mlp_mixer", "vision_transformer_hybrid", "vitamin")
"""Families whose width timm does not let one choose: there, numbers of three digits and more are sizes."""

FAMILY_OF = {name: family for family in FAMILIES for name in timm.list_models(module=family)}
NUM_CLASSES = 12


def tiny(name: str, device: str = "cpu", **kwargs: Any) -> nn.Module:
    """Return a timm model of that name, made tiny, the same in every process."""
    kwargs = {**OF_NAME.get(name, FAMILIES[FAMILY_OF[name]]), "num_classes": NUM_CLASSES, **kwargs}
    if name.endswith(("_enc", "_align", "_merge")):
        del kwargs["num_classes"]  # no classifier
    has_fixed_depth = FAMILY_OF[name] == "mlp_mixer" or name == "crossvit_18_240"
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # initialisers on meta warn that they do nothing
        torch.manual_seed(0)
        if not has_fixed_depth:
            return _create(name, device, kwargs)
        model = _shorten_(_create(name, "meta", kwargs))
        return model if device == "meta" else _materialise_(model)


def image_size(name: str) -> tuple[int, int]:
    """Return height and width of the images that `tiny` of that name takes."""
    size = OF_NAME.get(name, FAMILIES[FAMILY_OF[name]])["img_size"]
    return size, size


def _create(name: str, device: str, kwargs: dict[str, Any]) -> nn.Module:
    with torch.device(device):
        try:
            return timm.create_model(name, **kwargs)
        except AssertionError as error:
            if "num_kv_heads" not in str(error):
                raise
            # grouped-query attention, in timm a number for each block: one block with, one without
            return timm.create_model(name, **kwargs, num_kv_heads=(4, 2))


@torch.no_grad()
def _materialise_(model: nn.Module) -> nn.Module:
    """Give a model of linear layers and norms some weights; it has no buffers that a constructor computes."""
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    for param in model.parameters():
        param.normal_(std=0.05) if param.ndim > 1 else param.fill_(1.0)
    return model


def _shorten_(model: nn.Module) -> nn.Module:
    """Keep two blocks, where timm takes no other depth (mixers, crossvit_18)."""
    if hasattr(model, "blocks"):
        del model.blocks[2:]
        for branch in (b for block in model.blocks for b in getattr(block, "blocks", [])):
            del branch[2:]
    return model


def fingerprint(model: nn.Module) -> str:
    """Return all that tells two builds apart: modules, parameters, buffers and plain attributes."""
    lines = []
    for path, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str, tuple, type(None)))}
        plain.pop("training", None)
        tensors = {
            n: tuple(t.shape) for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None
        }
        lines.append(f"{path} {type(module).__module__}.{type(module).__qualname__} {sorted(plain.items())} {tensors}")
    return "\n".join(lines)


def builds(names: Iterable[str] = FAMILY_OF) -> dict[str, str]:
    """Return for each name the smallest model that has the same tiny build."""
    same: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        model = tiny(name, "meta")
        key = fingerprint(model)
        if FAMILY_OF[name] in AS_WIDE_AS_THEY_ARE:
            key = re.sub(r"\d{3,}", "size", key)
        same.setdefault(key, []).append((sum(p.numel() for p in model.parameters()), name))
    return {name: min(sharing)[1] for sharing in same.values() for _, name in sharing}
