"""A cut model against the whole one in float64: outputs, input gradient and every parameter gradient, on every rank.

The commonest mistakes leave outputs exact and gradients wrong, and some only on one rank's copy of a whole parameter.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import SMALL, randomise_, small_vit
from tests.distributed.parity import Comparison, compare, error
from tests.tolerances import BLOCK_FLOAT64
from tests.worlds import run_world

MODELS = {
    "plain": {},
    "qk_norm, LayerScale, registers": {"qk_norm": True, "init_values": 0.3, "reg_tokens": 3},  # P32
    "average pooling, no class token": {"global_pool": "avg", "class_token": False},
    "average and maximum": {"global_pool": "avgmax"},
    "attention pooling": {"global_pool": "map", "class_token": False},
    "prr pooling": {"global_pool": "prr"},
    "CLIP-like": {"pre_norm": True, "norm_layer": "layernorm"},
    "no biases": {"qkv_bias": False, "proj_bias": False, "no_embed_class": True},
    "RMSNorm": {"norm_layer": "rmsnorm", "qk_norm": True},
    "learnt activation": {"act_layer": "prelu"},
    "unfused attention": {"qk_norm": True},
    "wide head": {"num_classes": 24},
}


def gradients_of(name: str) -> Comparison:
    """Compare a cut copy with the whole model on this rank."""
    import vit_tp

    kwargs = MODELS[name]
    torch.set_default_dtype(torch.float64)
    whole, cut = randomise_(small_vit(**kwargs)), small_vit(**kwargs)
    if name == "unfused attention":
        for block in [*whole.blocks, *cut.blocks]:
            block.attn.fused_attn = False
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return compare(whole, cut, x, lambda model: vit_tp.shard_(model, dist.group.WORLD, cut_head_from=24))


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_cut_model_has_the_numbers_of_the_whole_one(name: str, tp_size: int):
    for rank, found in enumerate(run_world(gradients_of, tp_size, name)):
        wrong = {n: e for n, e in found.errors.items() if not e <= BLOCK_FLOAT64}
        assert not wrong, f"rank {rank}: {wrong}"
        wide_head = 2 if name == "wide head" else 0
        no_bias = 2 if name == "no biases" else 0
        assert found.cut == SMALL["depth"] * (6 - no_bias) + wide_head
        if MODELS[name].get("qk_norm") or MODELS[name].get("act_layer"):
            assert found.partial, "the model has parameters whose gradient each rank holds in part"
            assert max(found.partial.values()) > 0.01, "unsummed they would be wrong, so the sum was needed"


def odd_world() -> float:
    """tp=3 with 6 heads."""
    import vit_tp

    torch.set_default_dtype(torch.float64)
    kwargs = {"num_heads": 6, "embed_dim": 48}
    whole, cut = small_vit(**kwargs), small_vit(**kwargs)
    cut.load_state_dict(randomise_(whole).state_dict())
    vit_tp.shard_(cut, dist.group.WORLD)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return error(cut(x).detach(), whole(x).detach())


def test_three_ranks_share_six_heads():
    assert max(run_world(odd_world, 3)) <= BLOCK_FLOAT64
