"""Partially synchronised activations against lanes in one process, to 1e-12, gradients of every parameter included."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.models.vision_transformer import ResPostBlock

from tests.distributed import lanes
from tests.distributed.models import RICH, SMALL, randomise_, small_vit
from tests.distributed.parity import error
from tests.distributed.stagewise import gradients
from tests.distributed.test_regions import FAMILIES
from tests.distributed.tiny import image_size, tiny
from tests.tolerances import FAMILY_FLOAT64, LANES_FLOAT64, NORMS_FLOAT32
from tests.worlds import run_world

FRACTIONS = [1.0, 0.75, 0.5, 0.25, 0.0]
MODELS: dict[str, dict[str, Any]] = {
    "biases, LayerScale, qk-norm": RICH,
    "drop path": {**RICH, "drop_path_rate": 0.4},
    "post-norm": {**SMALL, "block_fn": ResPostBlock},
}
X = (4, 3, 32, 32)


def build(name: str) -> torch.nn.Module:
    torch.set_default_dtype(torch.float64)
    return randomise_(small_vit(**MODELS[name]).double())


def oracle(name: str, num_lanes: int, fraction: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = build(name).train()
    torch.manual_seed(5)
    logits = lanes.forward(model, torch.randn(X), num_lanes, fraction)
    F.cross_entropy(logits, torch.arange(4)).backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters()}


def against_lanes(name: str, fraction: float, recompute: str) -> dict[str, float]:
    """Return this rank's distances of a model cut by `shard_`."""
    import vit_tp
    from vit_tp.sharding.placement import placement_of

    tp_size, tp_rank = dist.get_world_size(), dist.get_rank()
    wanted, references = oracle(name, tp_size, fraction)
    model = copy.deepcopy(build(name).train())
    vit_tp.shard_(model, dist.group.WORLD, "partial", fraction=fraction, recompute=recompute)
    torch.manual_seed(5)
    logits = model(torch.randn(X))
    F.cross_entropy(logits, torch.arange(4)).backward()
    norm = vit_tp.finish_gradients_(model)
    whole = torch.stack([grad.square().sum() for grad in references.values()]).sum().sqrt()
    floor = 1e-3 * max(grad.abs().max().item() for grad in references.values())
    errors = {"logits": error(logits.detach(), wanted), "norm": abs(norm / whole - 1).item()}
    for n, p in model.named_parameters():
        errors[n] = error(p.grad, placement_of(p).cut(references[n], tp_size, tp_rank), floor)
    return errors


def all_against_lanes() -> dict[tuple, dict[str, float]]:
    cases = itertools.product(MODELS, FRACTIONS, ["none", "norm_act"])
    return {case: against_lanes(*case) for case in cases}


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_partial_sums_equal_lanes_in_one_process(tp_size: int):
    for rank in run_world(all_against_lanes, tp_size, timeout_s=240):
        assert len(rank) == len(MODELS) * len(FRACTIONS) * 2
        for case, errors in rank.items():
            for what, distance in errors.items():
                assert distance <= LANES_FLOAT64, (case, what)


def stages_against_lanes(fraction: float, recompute: str) -> dict[str, float]:
    """The same on two pipeline stages; the sum over the streams' gradients stands before the first block only."""
    import vit_tp
    from vit_tp.sharding.placement import placement_of

    model = build("biases, LayerScale, qk-norm")
    wanted, references = oracle("biases, LayerScale, qk-norm", 2, fraction)
    topology = vit_tp.Topology(pp=2, dp=1, tp=2)
    pipe = vit_tp.pipeline(model, topology, F.cross_entropy, region="partial", fraction=fraction, recompute=recompute)
    torch.manual_seed(5)
    logits, found = gradients(pipe, torch.randn(X), lambda out: F.cross_entropy(out, torch.arange(4)))
    place = pipe.groups.place
    floor = 1e-3 * max(grad.abs().max().item() for grad in references.values())
    errors = {
        n: error(found[n], placement_of(p).cut(references[n], 2, place.tp), floor)
        for n, p in pipe.named_timm_parameters()
    }
    return errors | ({"logits": error(logits, wanted)} if place.pp == 1 else {})


@pytest.mark.parametrize(("fraction", "recompute"), [(1.0, "none"), (0.5, "none"), (0.25, "block"), (0.0, "norm_act")])
def test_partial_sums_with_pipeline_stages(fraction: float, recompute: str):
    for rank in run_world(stages_against_lanes, 4, fraction, recompute):
        assert max(rank.values()) <= LANES_FLOAT64, rank


def test_lanes_are_stock_timm_where_all_channels_are_summed():
    """The oracle's own proof."""
    for num_lanes, name in itertools.product((1, 2, 4), MODELS):
        model = build(name).eval()
        x = torch.randn(X)
        assert error(lanes.forward(model, x, num_lanes, 1.0), model(x)) < LANES_FLOAT64
    assert error(lanes.forward(model, x, 1, 0.3), model(x)) < LANES_FLOAT64, "one lane is no lane"
    assert error(lanes.forward(model, x, 2, 0.5), model(x)) > 1e-2, "else the fraction would mean nothing"
    torch.set_default_dtype(torch.float32)


def logits_of_families() -> dict[str, torch.Tensor]:
    """This rank's logits of half-summed models of many families, and its gradients of whole parameters."""
    import vit_tp
    from vit_tp.sharding.placement import Replicated, placement_of

    torch.set_default_dtype(torch.float64)
    found = {}
    for name in [*FAMILIES, "vit_base_patch16_224", "naflexvit_base_patch16_gap"]:
        model = randomise_(tiny(name).double()).eval()
        vit_tp.shard_(model, dist.group.WORLD, "partial", fraction=0.5)
        logits = model(torch.randn(2, 3, *image_size(name), generator=torch.Generator().manual_seed(1)))
        logits.square().sum().backward()
        vit_tp.finish_gradients_(model)
        whole = [p.grad for p in model.parameters() if p.grad is not None and isinstance(placement_of(p), Replicated)]
        found[name] = torch.cat([logits.detach().flatten(), *(grad.flatten() for grad in whole)])
    return found


def test_ranks_agree_on_logits_and_on_the_gradients_of_whole_parameters():
    """Whatever a block does behind its sums: a norm there mixes summed channels with private ones."""
    first, second = run_world(logits_of_families, 2, timeout_s=240)
    for name in first:
        limit = NORMS_FLOAT32 if name.startswith("deepseek") else FAMILY_FLOAT64
        assert error(second[name], first[name]) <= limit, name
