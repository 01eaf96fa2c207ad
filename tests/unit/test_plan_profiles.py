"""Profiles of stages: alike stages are run once, and only those that are alike."""

from __future__ import annotations

import itertools

import pytest
import timm
import torch

from vit_tp.plan import profiles
from vit_tp.plan.live import LiveBytes
from vit_tp.plan.profiles import Layout, Profiler
from vit_tp.sharding.cutting import Cutting

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 5, "num_heads": 4, "num_classes": 10}
MODELS = {
    "plain": ("vit_tiny_patch16_224", {}),
    "drop path from 0 up": ("vit_tiny_patch16_224", {"drop_path_rate": 0.2, "qk_norm": True}),
    "shared tables": ("eva02_tiny_patch14_224", {}),
    "position biases": ("beit_base_patch16_224", {"use_shared_rel_pos_bias": True}),
    "LayerScale, no bias": ("vit_tiny_patch16_224", {"init_values": 0.1, "qkv_bias": False}),
}


def build(name: str) -> torch.nn.Module:
    model, kwargs = MODELS[name]
    with torch.device("meta"):
        return timm.create_model(model, **TINY, **kwargs)


@pytest.mark.parametrize(
    "layout", [Layout(4), Layout(4, tp=2, cutting=Cutting(recompute=2, indivisible="mlp_only"))], ids=["whole", "cut"]
)
@pytest.mark.parametrize("name", MODELS)
def test_stages_that_are_run_once_are_alike(name, layout, monkeypatch):
    found = Profiler(build(name))
    once = found.profile(layout)
    assert len(found._seen) < len(once)
    number = itertools.count()
    monkeypatch.setattr(profiles, "_kind_of", lambda stage: next(number))
    each = Profiler(build(name))
    assert each.profile(layout) == once
    assert len(each._seen) == len(once)


def test_blocks_that_are_recomputed_are_not_taken_for_others():
    kept = [stage.saved for stage in Profiler(build("plain")).profile(Layout(4, cutting=Cutting(recompute=2)))[1:6]]
    assert kept[0] == kept[2] == kept[4] < 8 < kept[1] == kept[3]


def test_what_is_frozen_keeps_less_and_has_no_gradients():
    model = build("plain")
    whole, frozen = (
        Profiler(model, freeze).profile(Layout(4)) for freeze in ((), ("patch_embed.*", "*_*", "blocks.*"))
    )
    assert frozen[1].saved == 0 == frozen[1].backward < whole[1].saved
    assert frozen[1].tensors.frozen == whole[1].tensors.num_trainable > 0


def test_live_bytes_follow_what_is_made_until_it_is_let_go_of():
    known = torch.empty(100, device="meta")
    with LiveBytes([known]) as live:
        view = known.view(10, 10)
        made = known + 1
        again = made + 1
        del made
    assert (live.now, live.peak) == (400, 800)
    del again, view
    assert live.now == 0
