"""What timm lets one do with a whole model works on a cut one, with stock timm's results."""

from __future__ import annotations

import pytest
import timm.optim
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.models import randomise_
from tests.distributed.parity import error
from tests.distributed.tiny import image_size, tiny
from tests.tolerances import BLOCK_FLOAT64
from tests.worlds import run_world

NAMES = [
    "vit_base_patch16_224", "deit_base_distilled_patch16_224", "eva02_base_patch14_224", "beit_base_patch16_224",
    "vit_relpos_base_patch16_224", "vit_small_patch16_rope_mixed_224", "samvit_base_patch16", "cait_s24_224",
    "vit_pwee_patch16_reg1_gap_256", "naflexvit_base_patch16_gap", "xcit_small_12_p16_224", "gmlp_s16_224",
    "crossvit_9_240",
]  # fmt: skip
RESIZABLE = [
    "vit_base_patch16_224", "eva02_base_patch14_224", "beit_base_patch16_224", "vit_small_patch16_rope_mixed_224",
    "vit_relpos_base_patch16_224",
]  # fmt: skip


def pair(name: str, cut_head_from: int = 4096, **kwargs) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """Stock timm, a cut copy and an input, in float64."""
    import vit_tp

    torch.set_default_dtype(torch.float64)
    whole, cut = randomise_(tiny(name, **kwargs)), tiny(name, **kwargs)
    cut.load_state_dict(whole.state_dict())
    vit_tp.shard_(cut, dist.group.WORLD, cut_head_from=cut_head_from)
    return whole.eval(), cut.eval(), torch.randn(2, 3, *image_size(name), generator=torch.Generator().manual_seed(1))


def tensors(found: object) -> list[torch.Tensor]:
    """Flatten what a forward returns."""
    if isinstance(found, torch.Tensor):
        return [found]
    return [tensor for part in found for tensor in tensors(part)]


def far(found: object, wanted: object) -> float:
    return max(error(a.detach(), b.detach()) for a, b in zip(tensors(found), tensors(wanted), strict=True))


def gradients(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    given = x.clone().requires_grad_()
    sum(t.square().sum() for t in tensors(model(given))).backward()
    return given.grad


def read_only(name: str) -> dict[str, float]:
    """Features, intermediates and checkpointed gradients, as distances from stock timm's."""
    whole, cut, x = pair(name)
    assert hasattr(whole, "no_weight_decay") == hasattr(cut, "no_weight_decay")
    if hasattr(whole, "no_weight_decay"):
        assert cut.no_weight_decay() == whole.no_weight_decay()
    assert str(cut.group_matcher()) == str(whole.group_matcher()) or name.startswith("cait")  # a function
    assert layers(cut) == layers(whole)
    distances = {"features": far(cut.forward_features(x), whole.forward_features(x))}
    if hasattr(whole, "forward_intermediates"):
        distances["intermediates"] = far(cut.forward_intermediates(x), whole.forward_intermediates(x))
    plain = gradients(whole, x)
    if name not in ("crossvit_9_240",):  # has none
        cut.set_grad_checkpointing(True)
    distances["checkpointed"] = error(gradients(cut, x), plain)
    return distances


def layers(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Learning-rate scale and decay of each parameter in timm's layer-wise groups."""
    names = {id(param): name for name, param in model.named_parameters()}
    groups = timm.optim.param_groups_layer_decay(model, 0.05, layer_decay=0.75)
    return {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}


@pytest.mark.parametrize("name", NAMES)
def test_reading_contracts_give_what_stock_timm_gives(name: str):
    for found in run_world(read_only, 2, name):
        assert max(found.values()) <= BLOCK_FLOAT64, found


def with_new_head(name: str, cut_head_from: int) -> tuple[float, torch.Tensor, list[str]]:
    """Reset the classifier under another random state on each rank; return the distance from stock timm."""
    import vit_tp
    from vit_tp.sharding.placement import Sharded, placement_of

    whole, cut, x = pair(name, cut_head_from)
    torch.manual_seed(dist.get_rank())
    cut.reset_classifier(8)
    whole.reset_classifier(8)
    whole.load_state_dict(vit_tp.full_state_dict(cut, dist.group.WORLD), strict=True)
    gradients(cut, x), gradients(whole, x)
    vit_tp.finish_gradients_(cut)
    sharded = [n for n, p in cut.named_parameters() if n.startswith("head") and isinstance(placement_of(p), Sharded)]
    return far(cut(x), whole(x)), vit_tp.full_state_dict(cut, dist.group.WORLD)["head.weight"], sharded


@pytest.mark.parametrize("name", ["vit_base_patch16_224", "deit_base_distilled_patch16_224", "eva02_base_patch14_224"])
@pytest.mark.parametrize("cut_head_from", [4096, 8])
def test_a_new_classifier_is_the_same_on_every_rank_and_cut_where_wide(name: str, cut_head_from: int):
    ranks = run_world(with_new_head, 2, name, cut_head_from)
    assert max(distance for distance, *_ in ranks) <= BLOCK_FLOAT64
    assert torch.equal(ranks[0][1], ranks[1][1]) and ranks[0][1].shape == (8, 32)
    assert bool(ranks[0][2]) == (cut_head_from == 8)


def resized(name: str) -> dict[str, float]:
    """Resize after the cut; return distances from stock timm resized."""
    import vit_tp
    from vit_tp.sharding.placement import placement_of

    whole, cut, _ = pair(name)
    before = {n: placement_of(p) for n, p in cut.named_parameters()}
    for model in (whole, cut):
        model.set_input_size((48, 64))
    x = torch.randn(2, 3, 48, 64, generator=torch.Generator().manual_seed(1))
    distances = {"output": far(cut(x), whole(x)), "input": error(gradients(cut, x), gradients(whole, x))}
    vit_tp.finish_gradients_(cut)
    after = {n: placement_of(p) for n, p in cut.named_parameters()}
    assert {n: type(p) for n, p in before.items()} == {n: type(p) for n, p in after.items()}
    state = whole.state_dict()
    merged = vit_tp.full_state_dict(cut, dist.group.WORLD)
    distances["state"] = max(error(full, state[n]) for n, full in merged.items())
    return distances


@pytest.mark.parametrize("name", RESIZABLE)
def test_a_cut_model_takes_another_input_size(name: str):
    for found in run_world(resized, 2, name):
        assert max(found.values()) <= BLOCK_FLOAT64, found


def averaged() -> float:
    """Keep an average of a cut model as timm does; return its distance from the average of stock timm."""
    from timm.utils import ModelEmaV3

    import vit_tp

    whole, cut, x = pair("vit_relpos_base_patch16_224")
    averages = [ModelEmaV3(model, decay=0.5) for model in (whole, cut)]
    for model, average in zip((whole, cut), averages):
        gradients(model, x)
        if model is cut:
            vit_tp.finish_gradients_(cut)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        average.update(model)
    return far(averages[1].module(x), averages[0].module(x))


def test_an_average_of_a_cut_model_talks_to_the_same_ranks():
    assert max(run_world(averaged, 2)) <= BLOCK_FLOAT64
