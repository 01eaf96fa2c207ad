"""Which models can be cut: every family of timm is in a list, and what the lists and conf/model say is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import timm
import timm.models

import vit_tp.conf
from tests.distributed.tiny import FAMILIES
from vit_tp.compose import compose
from vit_tp.config import check
from vit_tp.errors import ConfigError
from vit_tp.models.build import build_model
from vit_tp.sharding.catalogue import REFUSED, list_cuttable, require_cuttable
from vit_tp.sharding.matches import legal_tp_sizes, plan_cut
from vit_tp.sharding.survey import MAX_TP, survey

REFUSED_MODULES = [module for modules in REFUSED.values() for module in modules]
CHOICES = sorted(Path(vit_tp.conf.__path__[0]).glob("model/*.yaml"))


def test_every_module_of_timm_is_cut_or_refused():
    """A new release of timm shows here: put its new modules where they belong."""
    modules = timm.list_modules()
    assert sorted([*FAMILIES, *REFUSED_MODULES]) == sorted(modules)
    assert len(list_cuttable()) == sum(len(timm.list_models(module=module)) for module in FAMILIES) == 396


@pytest.mark.parametrize("module", REFUSED_MODULES)
def test_a_name_of_a_refused_family_says_why(module: str):
    name = timm.list_models(module=module)[0]
    with pytest.raises(ConfigError, match=f"model.timm={name} cannot be cut: it is .* vit_small_patch16_224"):
        require_cuttable(name)
    require_cuttable("vit_base_patch16_224.augreg_in1k")


def test_patterns_choose_and_what_fits_nothing_is_refused_all_at_once():
    assert list_cuttable(["vit_tiny_patch16_224"]) == ["vit_tiny_patch16_224"]
    assert list_cuttable(["deit3_large*", "vit_tiny_patch16_3*"]) == [
        *("deit3_large_patch16_224", "deit3_large_patch16_384", "vit_tiny_patch16_384"),
    ]
    assert list_cuttable(["vit_tiny_patch16_224.augreg_in21k"]) == ["vit_tiny_patch16_224"]
    with pytest.raises(ConfigError) as refused:
        list_cuttable(["swin*", "resnet50", "vit_bse_patch16_224", "zzz"])
    swin, resnet, misspelt, nothing = refused.value.complaints
    assert "hierarchical" in swin and "resnet50 cannot be cut: it is a convolutional network" in resnet
    assert "Did you mean vit_base_patch16_224" in misspelt and "Use a shell pattern" in nothing


@pytest.mark.parametrize(
    ("name", "cut", "tp_sizes", "num_tokens", "stages"),
    [
        ("vit_base_patch16_224", "Attention + Mlp", [1, 2, 3, 4, 6, 12], 197, "yes"),
        ("eva02_large_patch14_448", "EvaAttention + SwiGLU", [1, 2], 1025, "yes"),
        ("samvit_base_patch16", "Attention + Mlp", [1, 2, 3, 4, 6, 12], 4096, "yes"),
        ("vit_pwee_patch16_reg1_gap_256", "ParallelScalingBlock", [1, 2, 4], 257, "yes"),
        ("crossvit_9_240", "Attention + Mlp + CrossAttention", [1, 2, 4], 401, "two streams"),
        ("cait_xxs24_224", "TalkingHeadAttn + Mlp + ClassAttn", [1, 2, 4], 196, "yes"),
    ],
)
def test_a_survey_says_what_timm_builds(name: str, cut: str, tp_sizes: list[int], num_tokens: int, stages: str):
    found = survey(name)
    assert (found.cut, found.tp_sizes, found.num_tokens, found.stages) == (cut, tp_sizes, num_tokens, stages)
    assert found.num_params == sum(p.numel() for p in timm.create_model(name).parameters())


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: path.stem)
def test_the_first_lines_of_a_model_file_say_what_timm_builds(path: Path):
    takes_clips = "num_frames" in path.read_text()
    config = compose([f"model={path.stem}", f"data={'moving_digits' if takes_clips else 'digits'}"])
    check(config)
    data = {"vit_digits": (10, 1), "vit_moving_digits": (10, 3)}
    model = build_model(config.model, *data.get(path.stem, (1000, 3)))
    text = " ".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    size, unit, depth, width = re.search(
        r"([\d.]+) ([MB]) parameters.*?: (?:.*? )?(\d+) blocks of width (\d+)", text
    ).groups()
    num_params = sum(p.numel() for p in model.parameters())
    assert num_params == pytest.approx(float(size) * {"M": 1e6, "B": 1e9}[unit], rel=0.05)
    assert (len(model.blocks), model.embed_dim) == (int(depth), int(width))
    named = [int(tp) for tp in re.findall(r"\d+", re.search(r"tp=([\d, or]+)", text)[1])]
    assert named == [tp for tp in legal_tp_sizes(plan_cut(model, 1)) if 1 < tp <= MAX_TP]


def test_vit_22b_is_the_papers():
    """arXiv 2302.05442, table 1: 48 blocks of width 6144, MLP 24576, 48 heads, 21,743 M parameters in them."""
    model = build_model(compose(["model=vit_22b"]).model, 1000, 3)
    block = model.blocks[0]
    assert type(block).__name__ == "ParallelScalingBlock" and block.num_heads == 48
    assert block.mlp_out_proj.in_features == 24576 and block.in_proj.bias is None
    assert sum(p.numel() for p in model.blocks.parameters()) == pytest.approx(21.743e9, rel=1e-3)
    for tp_size in (8, 16):
        assert sum(match.rule.cuts for match in plan_cut(model, tp_size)) == 48
