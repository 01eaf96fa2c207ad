"""Tokens divided over tp, and what backward makes again: the numbers of stock timm in float64, whatever N is (P44)."""

from __future__ import annotations

import copy
import itertools
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, ResPostBlock
from torch import nn

from tests.distributed.models import RICH, SMALL, randomise_, small_vit
from tests.distributed.parity import Comparison, compare
from tests.distributed.stagewise import compare_stages
from tests.distributed.tiny import image_size, tiny
from tests.tolerances import BLOCK_FLOAT64, LAMBDAS_FLOAT32, NORMS_FLOAT32
from tests.worlds import run_world

# Tokens: 16 without prefix, 17 with a class token, 18 with a second, 21 with four registers, 19, 26 of other images.
VITS: dict[str, dict[str, Any]] = {
    "no prefix": {**SMALL, "class_token": False, "global_pool": "avg"},
    "class token": {**SMALL, "init_values": 0.5},
    "qk-norm, two registers": RICH,
    "five prefix tokens": {**SMALL, "reg_tokens": 4, "pre_norm": True, "fc_norm": True, "global_pool": "avg"},
    "post-norm": {**SMALL, "block_fn": ResPostBlock},
    "parallel, two projections": {**SMALL, "block_fn": ParallelScalingBlock, "qk_norm": True, "init_values": 0.5},
    "parallel attentions and MLPs": {**SMALL, "block_fn": ParallelThingsBlock, "init_values": 0.5},
}
FAMILIES = [
    "deit_base_distilled_patch16_224",
    "beit_base_patch16_224",
    "beitv2_base_patch16_224",
    "vit_relpos_base_patch16_224",
    "vit_relpos_small_patch16_rpn_224",
    "eva02_base_patch16_clip_224",
    "vit_base_patch16_rope_mixed_ape_224",
    "vit_small_patch16_dinov3",
    "vit_pe_core_base_patch16_224",
    "vit_base_patch16_siglip_224",
    "naflexvit_base_patch16_map",
    "cait_s24_224",
    "qwen3_vit_88m",
    "gemma4_vit_167m",
    "deepseek_vit_412m",
    "vit_base_patch16_xp_224",
    "vit_dpwee_patch16_reg1_gap_256",
    "vit_dwee_patch16_reg1_gap_256",
]
RECOMPUTE = ["none", "norm_act", "timm"]
CASES = [*itertools.product(VITS, RECOMPUTE), *itertools.product(FAMILIES, ["none", "norm_act"])]


def build(name: str) -> nn.Module:
    model = small_vit(**VITS[name]) if name in VITS else tiny(name)
    return randomise_(model.double()).eval()


def compare_all(region: str, cases: list[tuple[str, str]] = CASES) -> dict[tuple[str, str], Comparison]:
    import vit_tp

    torch.set_default_dtype(torch.float64)
    found = {}
    for name, recompute in cases:
        whole = build(name)
        cut = copy.deepcopy(whole)
        size = (32, 32) if name in VITS else image_size(name)
        x = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(1))

        def shard_(model: nn.Module, recompute: str = recompute) -> None:
            own = "none" if recompute == "timm" else recompute
            vit_tp.shard_(model, dist.group.WORLD, region, recompute=own)
            if recompute == "timm":
                model.set_grad_checkpointing()

        found[name, recompute] = compare(whole, cut, x, shard_)
    return found


@cache
def found(region: str, tp_size: int) -> list[dict[tuple[str, str], Comparison]]:
    return run_world(compare_all, tp_size, region, timeout_s=300)


def tolerance(name: str, parameter: str) -> float:
    if name.startswith("deepseek"):
        return NORMS_FLOAT32
    return LAMBDAS_FLOAT32 if "dpwee" in name or "dwee" in name or "lambda" in parameter else BLOCK_FLOAT64


@pytest.mark.parametrize(("name", "recompute"), CASES)
@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("region", ["sequence", "exact"])
def test_divided_tokens_have_the_numbers_of_stock_timm(region: str, tp_size: int, name: str, recompute: str):
    for rank in found(region, tp_size):
        result = rank[name, recompute]
        assert result.cut >= 4
        for what, distance in result.errors.items():
            assert distance <= tolerance(name, what), what
        if region == "sequence":
            assert max(result.partial.values()) > 1e-3, "left unsummed they must be wrong, or nothing is divided"


STAGED = {
    "no prefix": VITS["no prefix"],
    "qk-norm, two registers": RICH,
    "five prefix tokens": VITS["five prefix tokens"],
    "parallel, two projections": VITS["parallel, two projections"],
    "drop path": {**RICH, "drop_path_rate": 0.4},
}


def compare_staged(pp: int, tp: int) -> dict[tuple, dict[str, float]]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, region, recompute in itertools.product(STAGED, ["sequence", "exact"], ["none", "norm_act", "block", 2]):
        if region == "exact" and recompute == "none":
            continue
        whole = randomise_(small_vit(**STAGED[name]).double())
        whole.train(name == "drop path")
        x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        wanted = seeded_as_stages(copy.deepcopy(whole)) if name == "drop path" else None
        found[name, region, recompute] = compare_stages(
            whole, x, pp, tp, region=region, recompute=recompute, oracle=wanted
        )
    return found


def seeded_as_stages(model: nn.Module) -> nn.Module:
    """Let each block of a stock model draw what its stage draws: from seed, step, micro-batch and name."""
    from vit_tp.parallel.rng import seed_from

    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(
            lambda block, args, index=index: torch.manual_seed(seed_from(0, 0, 1, f"blocks.{index}")) and None
        )
    return model


@pytest.mark.parametrize(
    ("pp", "tp"), [(1, 2), (2, 2), *(pytest.param(pp, 4, marks=pytest.mark.slow) for pp in (1, 2))]
)
def test_stages_of_divided_and_recomputed_blocks(pp: int, tp: int):
    for rank in run_world(compare_staged, pp * tp, pp, tp, timeout_s=300):
        assert len(rank) == len(STAGED) * 7
        for case, errors in rank.items():
            for what, distance in errors.items():
                assert distance <= BLOCK_FLOAT64, (case, what)
