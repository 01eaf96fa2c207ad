"""The library verbs as a user would write them, against stock timm in a loop of its own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import RICH, batches, own_micro_batches, randomise_, small_vit
from tests.tolerances import BLOCK_FLOAT64
from tests.worlds import RankFailed, run_world

STEPS, CLIP = 5, 0.5


def loop(cut: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train in float64, clipped, cut over the world or whole; return losses, norms and the whole weights."""
    import vit_tp

    torch.set_default_dtype(torch.float64)
    model = randomise_(small_vit(**RICH))
    if cut:
        vit_tp.shard_(model, dist.group.WORLD, region="exact")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, norms = [], []
    for images, targets in batches(STEPS, 8):
        loss = torch.nn.functional.cross_entropy(model(images.double()), targets)
        loss.backward()
        if cut:
            norms.append(vit_tp.finish_gradients_(model, max_norm=CLIP).item())
        else:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = vit_tp.full_state_dict(model, dist.group.WORLD) if cut else model.state_dict()
    small_vit(**RICH).load_state_dict(state, strict=True)
    return losses, norms, state


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_loop_of_ones_own_has_the_numbers_of_stock_timm(tp_size):
    """P29: one factor on all ranks, equal to that of the stock call on the whole model."""
    losses, norms, state = run_world(loop, 1, cut=False)[0]
    assert min(norms) > CLIP
    for rank in run_world(loop, tp_size, cut=True):
        assert rank[0] == pytest.approx(losses, rel=BLOCK_FLOAT64)
        assert rank[1] == pytest.approx(norms, rel=BLOCK_FLOAT64)
        assert rank[2].keys() == state.keys()
        assert all(torch.allclose(rank[2][name], state[name], rtol=1e-9, atol=1e-11) for name in state)


def pipeline_of_real_weights(pp: int, tp: int) -> dict:
    """Lay out a model that has weights already; return one step's loss and whether the user's own model changed."""
    import vit_tp

    model = randomise_(small_vit(**RICH))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pipe = vit_tp.pipeline(model, vit_tp.Topology(pp=pp, dp=1, tp=tp), torch.nn.functional.cross_entropy)
    engine = vit_tp.initialize(
        pipe,
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        },
    )
    images, targets = batches(1, 8)[0]
    loss = engine.train_batch(iter(own_micro_batches(images, targets, 0, 1, 2))).item()
    return {"loss": loss, "kept": all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())}


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_real_model_keeps_its_weights_and_is_not_touched(pp, tp):
    images, targets = batches(1, 8)[0]
    wanted = torch.nn.functional.cross_entropy(randomise_(small_vit(**RICH))(images), targets).item()
    for rank in run_world(pipeline_of_real_weights, pp * tp, pp, tp):
        assert rank["loss"] == pytest.approx(wanted, rel=1e-5)
        assert rank["kept"]


def misused(how: str) -> str:
    import vit_tp

    model = small_vit()
    try:
        if how == "finish an uncut model":
            vit_tp.finish_gradients_(model)
        elif how == "unknown region":
            vit_tp.shard_(model, dist.group.WORLD, region="sequance")
        elif how == "cut twice":
            vit_tp.shard_(vit_tp.shard_(model, dist.group.WORLD), dist.group.WORLD)
        elif how == "nothing to cut":
            vit_tp.shard_(torch.nn.Sequential(torch.nn.ReLU()), dist.group.WORLD)
        elif how == "ZeRO-2":
            pipe = vit_tp.pipeline(model, vit_tp.Topology(tp=2), torch.nn.functional.cross_entropy)
            wrong = {
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                "wall_clock_breakdown": True,
            }
            vit_tp.initialize(
                pipe, {**wrong, "pipeline": {"activation_checkpoint_interval": 1, "pipe_partitioned": True}}
            )
        elif how == "fp16 with fp32 sums":
            pipe = vit_tp.pipeline(model, vit_tp.Topology(tp=2), torch.nn.functional.cross_entropy)
            vit_tp.initialize(pipe, {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}})
        elif how == "unknown optimizer argument":
            pipe = vit_tp.pipeline(model, vit_tp.Topology(tp=2), torch.nn.functional.cross_entropy)
            vit_tp.initialize(pipe, {"train_micro_batch_size_per_gpu": 1, "optimizer": {"params": {"lr": 1}}})
        elif how == "no optimizer":
            pipe = vit_tp.pipeline(model, vit_tp.Topology(tp=2), torch.nn.functional.cross_entropy)
            vit_tp.initialize(pipe, {"train_micro_batch_size_per_gpu": 1})
        elif how == "another world":
            vit_tp.pipeline(model, vit_tp.Topology(pp=4), torch.nn.functional.cross_entropy)
    except vit_tp.errors.VitTpError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("finish an uncut model", ["ShardRuleError", "not cut", "vit_tp.shard_"]),
        ("unknown region", ["ConfigError", "sequance", "exact"]),
        ("cut twice", ["ShardRuleError", "cut already"]),
        ("nothing to cut", ["ShardRuleError"]),
        (
            "ZeRO-2",
            [
                "zero_optimization.stage=2",
                "offload_optimizer",
                "wall_clock_breakdown",
                "interval=1",
                "pipe_partitioned=True",
            ],
        ),
        ("fp16 with fp32 sums", ["data_types.grad_accum_dtype=fp32"]),
        ("unknown optimizer argument", ['"type": "AdamW"']),
        ("no optimizer", ["no optimizer", "AdamW"]),
        ("another world", ["TopologyError", "2 processes", "Start 4 processes"]),
    ],
)
def test_misuse_is_refused_with_a_sentence(how, words):
    for said in run_world(misused, 2, how):
        assert all(word in said for word in words), said


def short_feed() -> None:
    from vit_tp.data.digits import SPEC
    from vit_tp.data.loader import Batch
    from vit_tp.parallel.groups import build_groups
    from vit_tp.parallel.topology import Topology
    from vit_tp.train.feed import Feed
    from vit_tp.train.prepare import Normalise, Preparation

    feed = Feed(build_groups(Topology(pp=2)), torch.device("cpu"), loss_rank=1)
    whole = torch.ones(2, dtype=torch.long)
    batches = iter([Batch(torch.ones(2, 1, 8, 8, dtype=torch.uint8), whole, whole)]) if feed.is_reader else None
    for _ in feed.step(batches, 2, Preparation(Normalise(SPEC, feed.device))):
        pass


def test_a_loader_that_runs_out_is_named():
    """P10."""
    with pytest.raises(RankFailed, match="the loader of rank 0 ran out at micro-batch 1 of 2"):
        run_world(short_feed, 2)
