"""Every timm model that can be cut, tiny, on two and four ranks against stock timm in float64."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import randomise_
from tests.distributed.parity import Comparison, compare
from tests.distributed.tiny import FAMILY_OF, builds, image_size, tiny
from tests.tolerances import FAMILY_FLOAT64, LAMBDAS_FLOAT32
from tests.worlds import run_world

build_of = cache(builds)  # when first asked: every rank of a world imports this module


ONLY_LEGAL = {
    "crossvit_18_240": [1, 7],  # timm takes no other number of heads here
    "vit_5b_patch16_sapiens2": [1, 2],  # two key/value heads
}


def compare_all(names: list[str]) -> dict[str, Comparison | str]:
    """Compare each model on this rank; a refusal is its sentence."""
    import vit_tp
    from vit_tp.errors import TopologyError

    torch.set_default_dtype(torch.float64)
    found: dict[str, Comparison | str] = {}
    for name in names:
        whole = randomise_(tiny(name)).eval()
        cut = copy.deepcopy(whole)
        x = torch.randn(2, 3, *image_size(name), generator=torch.Generator().manual_seed(1))
        try:
            found[name] = compare(whole, cut, x, lambda model: vit_tp.shard_(model, dist.group.WORLD))
        except TopologyError as error:
            found[name] = str(error)
    return found


@cache
def found(tp_size: int) -> list[dict[str, Comparison | str]]:
    """Return the comparisons of all builds by rank: one world for all, or starting them would take an hour."""
    return run_world(compare_all, tp_size, sorted(set(build_of().values())), timeout_s=500)


@pytest.mark.parametrize("name", FAMILY_OF)
@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_cut_model_has_the_numbers_of_stock_timm(name: str, tp_size: int):
    build = build_of()[name]
    legal = ONLY_LEGAL.get(build, [1, 2, 4])
    for rank, by_name in enumerate(found(tp_size)):
        result = by_name[build]
        if tp_size not in legal:
            assert f"parallel.tp={', '.join(map(str, legal))}" in result
            continue
        assert result.cut > 0
        wrong = {n: e for n, e in result.errors.items() if not e <= tolerance(n)}
        assert not wrong, f"rank {rank}: {wrong}"


def tolerance(name: str) -> float:
    """timm keeps the lambdas of differential attention in float32; they take part in the norm too."""
    return LAMBDAS_FLOAT32 if "lambda_" in name else FAMILY_FLOAT64


WIDE = [
    "eva02_base_patch14_224", "vit_base_patch16_dinov3", "vit_pe_core_base_patch16_224", "vit_small_patch16_rope_224",
    "vit_small_patch16_rope_mixed_224", "qwen3_vit_88m", "gemma4_vit_167m", "naflexvit_base_patch16_gap",
]  # fmt: skip


def compare_wide(names: list[str], size: tuple[int, int]) -> dict[str, Comparison]:
    """Compare models with rotary tables on images that are not square (P77)."""
    import vit_tp

    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        whole = randomise_(tiny(name, img_size=size)).eval()
        cut = copy.deepcopy(whole)
        x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
        found[name] = compare(whole, cut, x, lambda model: vit_tp.shard_(model, dist.group.WORLD))
    return found


@pytest.mark.parametrize("size", [(32, 64), (64, 32)], ids=["wide", "high"])
def test_images_that_are_not_square(size):
    for found in run_world(compare_wide, 2, WIDE, size):
        for name, result in found.items():
            assert max(result.errors.values()) <= FAMILY_FLOAT64, name
