"""A cut model against the whole one in float64: outputs, input gradient and every parameter gradient, on every rank.

The commonest mistakes leave outputs exact and gradients wrong, and some only on one rank's copy of a whole parameter.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import SMALL, randomise_, small_vit
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


def gradients_of(name: str) -> dict:
    """Compare a cut copy with the whole model on this rank; return the largest relative errors."""
    import vit_tp
    from vit_tp.sharding.placement import Replicated, Sharded, placement_of

    kwargs = MODELS[name]
    torch.set_default_dtype(torch.float64)
    whole, cut = small_vit(**kwargs), small_vit(**kwargs)
    cut.load_state_dict(randomise_(whole).state_dict())
    if name == "unfused attention":
        for block in [*whole.blocks, *cut.blocks]:
            block.attn.fused_attn = False
    vit_tp.shard_(cut, dist.group.WORLD, cut_head_from=24)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 3, 32, 32, generator=generator)
    weights = torch.randn(3, whole.num_classes, generator=generator)
    inputs, outputs = [x.clone().requires_grad_() for _ in range(2)], []
    for model, given in zip((whole, cut), inputs):
        y = model(given)
        (y * weights).sum().backward()
        outputs.append(y.detach())

    errors = {"output": error(outputs[1], outputs[0]), "input": error(inputs[1].grad, inputs[0].grad)}
    references = dict(whole.named_parameters())
    params = dict(cut.named_parameters())
    assert params.keys() == references.keys()
    reference_norm = torch.stack([p.grad.square().sum() for p in references.values()]).sum().sqrt()
    partial = {n: error(p.grad, references[n].grad) for n, p in params.items() if placement_of(p) == Replicated(True)}
    norm = vit_tp.finish_gradients_(cut)
    errors["norm"] = abs(norm / reference_norm - 1).item()
    # softmax does not see a bias of all keys: the gradient of k_norm.bias is rounding only, and has no scale of its own
    floor = 1e-3 * max(p.grad.abs().max().item() for p in references.values())
    for n, p in params.items():
        placement = placement_of(p)
        # cut by our own placement: sound because outputs and the merged state are compared with stock timm as well
        wanted = placement.cut(references[n].grad, dist.get_world_size(), dist.get_rank())
        errors[n] = error(p.grad, wanted, floor)
    errors["state"] = max(
        error(full, whole.state_dict()[n]) for n, full in vit_tp.full_state_dict(cut, dist.group.WORLD).items()
    )
    sharded = sum(isinstance(placement_of(p), Sharded) for p in params.values())
    return {"errors": errors, "partial": partial, "sharded": sharded}


def error(found: torch.Tensor, wanted: torch.Tensor, floor: float = 1e-30) -> float:
    """Largest difference relative to the largest value, or to `floor` where that is larger."""
    assert found.shape == wanted.shape
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=floor)).item()


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_cut_model_has_the_numbers_of_the_whole_one(name: str, tp_size: int):
    for rank, found in enumerate(run_world(gradients_of, tp_size, name)):
        wrong = {n: e for n, e in found["errors"].items() if not e <= BLOCK_FLOAT64}
        assert not wrong, f"rank {rank}: {wrong}"
        wide_head = 2 if name == "wide head" else 0
        no_bias = 2 if name == "no biases" else 0
        assert found["sharded"] == SMALL["depth"] * (6 - no_bias) + wide_head
        if MODELS[name].get("qk_norm") or MODELS[name].get("act_layer"):
            assert found["partial"], "the model has parameters whose gradient each rank holds in part"
            assert max(found["partial"].values()) > 0.01, "unsummed they would be wrong, so the sum was needed"


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
