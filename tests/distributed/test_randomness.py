"""Dropout, drop path and patch drop: alike where activations are whole, apart where they are cut (P46, P47)."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import RICH, batches, own_micro_batches, small_vit
from tests.distributed.test_training_parity import train_grid
from tests.distributed.tiny import tiny
from tests.worlds import run_world

WHOLE = {"drop_path_rate": 0.3, "pos_drop_rate": 0.1, "patch_drop_rate": 0.25, "drop_rate": 0.1}
CUT = {"attn_drop_rate": 0.2, "proj_drop_rate": 0.2}  # proj_drop_rate is also the rate inside the MLP
STEPS = 4


@pytest.mark.parametrize(
    "grid",
    [
        (2, 1, 2),
        (1, 2, 2),
        *(pytest.param(grid, marks=pytest.mark.slow) for grid in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1))),
    ],
)
def test_masks_on_whole_activations_are_the_same_on_any_grid(grid):
    """The micro-batch size is kept, for what is random about a sample depends on its micro-batch."""
    pp, dp, tp = grid
    kwargs = {**RICH, **WHOLE, **({} if tp > 1 else CUT)}
    one = run_world(train_grid, 1, 1, 1, 1, 4, kwargs, STEPS, {})[0]
    many = run_world(train_grid, pp * dp * tp, pp, dp, tp, 4 // dp, kwargs, STEPS, {})
    for rank in many:
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-5)
    without = run_world(train_grid, 1, 1, 1, 1, 4, RICH, STEPS, {})[0]
    assert without["losses"] != pytest.approx(one["losses"], rel=1e-3), "the rates must matter"


def masks() -> dict[str, list[torch.Tensor]]:
    """Train two steps on tp=2 x dp=2 and return where each dropout of block 1 put zeros, micro-batch by micro-batch."""
    import vit_tp

    topology = vit_tp.Topology(pp=1, dp=2, tp=2)
    model = small_vit("meta", **{**RICH, **WHOLE, **CUT, "drop_path_rate": 0.9})
    pipe = vit_tp.pipeline(model, topology, torch.nn.functional.cross_entropy)
    block = pipe.stages[2].block
    block.attn.fused_attn = False  # so that attention dropout is a module
    seen: dict[str, list[torch.Tensor]] = {"rng": []}
    for name in ("attn.attn_drop", "mlp.drop1", "attn.proj_drop", "mlp.drop2", "drop_path1", "drop_path2"):
        kept = seen.setdefault(name, [])
        block.get_submodule(name).register_forward_hook(lambda m, args, out, kept=kept: kept.append(out.detach() == 0))
    engine = vit_tp.initialize(
        pipe,
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    )
    for images, targets in batches(2, 16):
        engine.train_batch(iter(own_micro_batches(images, targets, topology.coordinates(dist.get_rank()).dp, 2, 2)))
        seen["rng"].append(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest())
    return seen


def test_masks_differ_only_where_activations_are_cut():
    ranks = run_world(masks, 4)  # (dp, tp) = (0, 0), (0, 1), (1, 0), (1, 1)
    for first, second in [(0, 1), (2, 3)]:
        for name in ("attn.proj_drop", "mlp.drop2", "drop_path1", "drop_path2"):
            assert all(map(torch.equal, ranks[first][name], ranks[second][name])), f"{name} differs between tp ranks"
        for name in ("attn.attn_drop", "mlp.drop1"):
            assert not any(map(torch.equal, ranks[first][name], ranks[second][name])), f"{name} repeats on tp ranks"
        assert ranks[first]["rng"] == ranks[second]["rng"], "the shared stream drifted inside the tp group"
    for name in ("attn.attn_drop", "mlp.drop1", "attn.proj_drop", "drop_path1"):
        assert not all(map(torch.equal, ranks[0][name], ranks[2][name])), f"{name} repeats on dp ranks"
        own = ranks[0][name]
        assert any(not torch.equal(own[0], other) for other in own[1:]), f"{name} repeats in every micro-batch"
    assert any(mask.any() for mask in ranks[0]["drop_path1"])


def own_loop() -> list[torch.Tensor]:
    """A user's loop without a pipeline: two forwards of a model with dropout on cut activations alone."""
    import vit_tp

    torch.manual_seed(0)
    model = small_vit(**{**RICH, "attn_drop_rate": 0.5})
    vit_tp.shard_(model, dist.group.WORLD)
    seen = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda m, args, out: seen.append(out.detach() == 0))
    for _ in range(2):
        model(torch.ones(2, 3, 32, 32))
    return seen


def test_own_loop_never_repeats_a_mask():
    found = [mask for rank in run_world(own_loop, 2) for mask in rank]
    assert len(found) == 2 * 2 * RICH["depth"]
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


def position_masks() -> dict[str, list[torch.Tensor]]:
    """Where a relative-position MLP, whole on every rank, and the cut attention around it put zeros."""
    import vit_tp

    torch.manual_seed(0)
    model = tiny("vit_relpos_base_patch16_224", attn_drop_rate=0.5)  # timm drops 1/8 of the position MLP's hidden
    vit_tp.shard_(model, dist.group.WORLD)
    seen: dict[str, list[torch.Tensor]] = {"attn_drop": [], "rel_pos.mlp.drop1": []}
    for block in model.blocks:
        block.attn.fused_attn = False
        for name, kept in seen.items():
            drop = block.attn.get_submodule(name)
            drop.register_forward_hook(lambda m, args, out, kept=kept: kept.append(out.detach() == 0))
    for _ in range(2):
        model(torch.ones(2, 3, 32, 32))
    seen["rng"] = [torch.get_rng_state()]
    return seen


def test_a_whole_mlp_inside_a_cut_region_draws_alike_on_every_rank():
    first, second = run_world(position_masks, 2)
    assert all(map(torch.equal, first["rel_pos.mlp.drop1"], second["rel_pos.mlp.drop1"]))
    assert not any(map(torch.equal, first["attn_drop"], second["attn_drop"]))
    assert torch.equal(first["rng"][0], second["rng"][0])
    for found in (first["rel_pos.mlp.drop1"], first["attn_drop"]):
        assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


def replicas_after_training() -> dict[str, torch.Tensor]:
    """P31: fifty steps with drop path; every whole parameter and its optimizer state."""
    import vit_tp
    from vit_tp.sharding.placement import Replicated, placement_of
    from vit_tp.train.replicas import require_equal_replicas

    topology = vit_tp.Topology(pp=1, dp=1, tp=2)
    pipe = vit_tp.pipeline(
        small_vit("meta", **{**RICH, "drop_path_rate": 0.2}), topology, torch.nn.functional.cross_entropy
    )
    engine = vit_tp.initialize(
        pipe, {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    )
    for images, targets in batches(50, 8):
        engine.train_batch(iter([(images, targets)]))
    require_equal_replicas(pipe, 50)
    kept = {n: p.detach().clone() for n, p in pipe.named_timm_parameters() if isinstance(placement_of(p), Replicated)}
    params = dict(pipe.named_timm_parameters())
    if dist.get_rank() == 1:
        params["blocks.2.norm1.weight"].data[3] += 1e-7
    try:
        require_equal_replicas(pipe, 51)
        kept["caught"] = ""
    except RuntimeError as error:
        kept["caught"] = str(error)
    return kept


def test_replicas_stay_equal_to_the_bit_and_drift_is_named():
    first, second = run_world(replicas_after_training, 2)
    assert "blocks.2.norm1.weight" in first.pop("caught")
    assert "blocks.2.norm1.weight" in second.pop("caught")
    assert len(first) > 20
    assert all(torch.equal(first[name], second[name]) for name in first)
