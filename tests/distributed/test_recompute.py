"""What is made again is what was there: masks, calls and messages (P19, P43, P47, P49)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.distributed.models import RICH, batches, own_micro_batches, randomise_, small_vit
from tests.distributed.test_randomness import CUT, WHOLE
from tests.distributed.test_training_parity import train_grid
from tests.distributed.tiny import tiny
from tests.worlds import run_world

ALL_RATES = {**RICH, **WHOLE, **CUT}
ADAM = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize("region", ["exact", "sequence", "partial"])
@pytest.mark.parametrize("grid", [(1, 1, 2), pytest.param((2, 1, 2), marks=pytest.mark.slow)])
def test_every_mask_is_drawn_again_alike(grid: tuple[int, int, int], region: str):
    """P49: with every dropout that timm has, recompute changes no loss and no norm."""
    pp, dp, tp = grid
    without, plain, *others = run_world(train_all_kinds, pp * dp * tp, pp, dp, tp, region, timeout_s=240)[0]
    for other in others:
        assert other["losses"] == pytest.approx(plain["losses"], rel=1e-6)
        assert other["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    assert without["losses"] != pytest.approx(plain["losses"], rel=1e-3), "the rates must matter"


def train_all_kinds(pp: int, dp: int, tp: int, region: str) -> list[dict]:
    cut: dict[str, Any] = {"region": region, "fraction": 0.5}
    kinds = [(RICH, "none"), *((ALL_RATES, recompute) for recompute in ("none", "norm_act", "block", 2))]
    return [train_grid(pp, dp, tp, 4, rates, 3, {}, **cut, recompute=recompute) for rates, recompute in kinds]


def own_loop(name: str, rates: dict[str, float], checkpointing: bool) -> list[float]:
    """Gradients of a loop of one's own with dropout, with and without timm's checkpointing."""
    import vit_tp

    model = randomise_(tiny(name, **rates))
    vit_tp.shard_(model, dist.group.WORLD, "sequence")
    model.train().set_grad_checkpointing(checkpointing)
    torch.manual_seed(3)
    model(batches(1, 4)[0][0]).square().mean().backward()
    after = torch.rand(1).item()
    state = torch.get_rng_state()
    model.eval()
    model(batches(1, 4)[0][0])
    assert torch.equal(state, torch.get_rng_state()), "an evaluation draws nothing and sets nothing back"
    return [after, *(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["vit_base_patch16_224", "vit_base_patch16_xp_224"])
@pytest.mark.parametrize(
    "rates",
    [
        {"attn_drop_rate": 0.2, "proj_drop_rate": 0.2, "drop_path_rate": 0.3},
        {"proj_drop_rate": 0.2},  # a recompute then stops inside a dropout
    ],
    ids=["all", "proj_drop"],
)
def test_timms_own_checkpointing_draws_alike(name: str, rates: dict[str, float]):
    for plain, checkpointed in zip(*(run_world(own_loop, 2, name, rates, flag) for flag in (False, True))):
        assert checkpointed == pytest.approx(plain, rel=1e-5)


def masks(region: str, recompute: str | int) -> dict[str, list[torch.Tensor]]:
    """Where each dropout of block 1 put zeros in one step, every pass of it."""
    import vit_tp

    model = small_vit("meta", **{**RICH, **CUT, "drop_path_rate": 0.9})
    topology = vit_tp.Topology(pp=1, dp=1, tp=2)
    pipe = vit_tp.pipeline(model, topology, F.cross_entropy, region=region, recompute=recompute)
    block = pipe.stages[2].block
    block.attn.fused_attn = False
    seen: dict[str, list[torch.Tensor]] = {}
    for name in ("attn.attn_drop", "mlp.drop1", "attn.proj_drop", "mlp.drop2", "drop_path1", "drop_path2"):
        kept = seen.setdefault(name, [])
        block.get_submodule(name).register_forward_hook(lambda m, args, out, kept=kept: kept.append(out.detach() == 0))
    engine = vit_tp.initialize(pipe, {**ADAM, "gradient_accumulation_steps": 2})
    images, targets = batches(1, 8)[0]
    engine.train_batch(iter(own_micro_batches(images, targets, 0, 1, 2)))
    return seen


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_divided_tokens_draw_apart_and_samples_alike(recompute: str):
    """P47: dropout on divided tokens differs over tp as that on heads and columns does; drop path does not."""
    first, second = run_world(masks, 2, "sequence", recompute)
    for name in ("attn.proj_drop", "mlp.drop2", "attn.attn_drop", "mlp.drop1"):
        assert not any(map(torch.equal, first[name], second[name])), f"{name} repeats on tp ranks"
    for name in ("drop_path1", "drop_path2"):
        samples = [[mask.all(2).all(1) for mask in rank[name]] for rank in (first, second)]
        assert all(map(torch.equal, *samples)), f"{name} differs between tp ranks"
    if recompute == "block":
        for name in ("attn.proj_drop", "attn.attn_drop", "mlp.drop1", "drop_path1"):
            passes = first[name]  # two micro-batches, each forward and again in backward; 1F1B on one stage
            assert len(passes) == 4
            assert torch.equal(passes[0], passes[1]) and torch.equal(passes[2], passes[3])
            assert not torch.equal(passes[0], passes[2])


def calls(recompute: str | int) -> list[int]:
    """How often each block's forward is begun in one step of two micro-batches."""
    import vit_tp

    topology = vit_tp.Topology(pp=1, dp=1, tp=1)
    pipe = vit_tp.pipeline(small_vit("meta", depth=5), topology, F.cross_entropy, recompute=recompute)
    counts = [0] * 5
    for index, stage in enumerate(pipe.stages[1:-1]):

        def count(block, args, kwargs, index=index):
            counts[index] += 1

        stage.block.register_forward_pre_hook(count, with_kwargs=True)
    engine = vit_tp.initialize(pipe, {**ADAM, "gradient_accumulation_steps": 2})
    images, targets = batches(1, 8)[0]
    engine.train_batch(iter(own_micro_batches(images, targets, 0, 1, 2)))
    engine.eval_batch(iter(own_micro_batches(images, targets, 0, 1, 2)))
    return [count - 2 for count in counts]  # evaluation recomputes nothing


@pytest.mark.parametrize(
    ("recompute", "wanted"),
    [
        ("none", [2] * 5),
        (0, [2] * 5),
        ("norm_act", [2] * 5),
        ("block", [4] * 5),
        (1, [4] * 5),
        (2, [4, 2, 4, 2, 4]),
        (3, [4, 2, 2, 4, 2]),
    ],
)
def test_blocks_run_as_often_as_configured(recompute: str | int, wanted: list[int]):
    """P19."""
    assert run_world(calls, 1, recompute)[0] == wanted


def messages(region: str) -> tuple[list[tuple[int, ...]], list[str]]:
    """P43: what crosses the boundary of pp=2 x tp=2, and a digest of it."""
    import deepspeed.runtime.pipe.engine as pipe_engine

    import vit_tp
    from vit_tp.train.replicas import digest

    topology = vit_tp.Topology(pp=2, dp=1, tp=2)
    pipe = vit_tp.pipeline(small_vit("meta", **RICH), topology, F.cross_entropy, region=region, fraction=0.5)
    engine = vit_tp.initialize(pipe, {**ADAM, "gradient_accumulation_steps": 2})
    shapes, digests = [], []
    originals = pipe_engine.p2p.send, pipe_engine.p2p.recv

    def watched(original):
        def exchange(tensor, stage, *args):
            out = original(tensor, stage, *args)
            if tensor.is_floating_point():
                shapes.append(tuple(tensor.shape))
                digests.append(digest(tensor).item())
            return out

        return exchange

    pipe_engine.p2p.send, pipe_engine.p2p.recv = map(watched, originals)
    images, targets = batches(1, 8)[0]
    engine.train_batch(iter(own_micro_batches(images, targets, 0, 1, 2)))
    return shapes, sorted(digests)


@pytest.mark.parametrize(("region", "num_tokens"), [("exact", 19), ("sequence", 10), ("partial", 19)])
def test_each_rank_sends_its_own_stream_to_its_peer(region: str, num_tokens: int):
    """P43: unmixed, and under sequence parallelism 1/tp of it."""
    ranks = run_world(messages, 4, region)  # (pp, tp) = (0, 0), (0, 1), (1, 0), (1, 1)
    for shapes, _ in ranks:
        assert set(shapes) == {(4, num_tokens, RICH["embed_dim"])}
    for tp in (0, 1):
        assert ranks[tp][1] == ranks[2 + tp][1], "what arrives is what was sent"
    assert (ranks[0][1] == ranks[1][1]) == (region == "exact"), "streams differ between tp ranks unless they are whole"


def compiled(region: str, recompute: str) -> float:
    """How far a model of compiled blocks with dropout is from itself without recompute: loss and gradients."""
    import vit_tp

    found = []
    for kind in ("none", recompute):
        model = randomise_(small_vit(**{**RICH, "proj_drop_rate": 0.2, "drop_path_rate": 0.3})).train()
        vit_tp.shard_(model, dist.group.WORLD, region, recompute="none" if kind == "timm" else kind)
        torch.manual_seed(3)
        model.set_grad_checkpointing(kind == "timm")
        for block in model.blocks:
            block.compile(backend="aot_eager")
        loss = model(batches(1, 2)[0][0]).square().mean()
        loss.backward()
        found.append(torch.stack([loss.detach(), *(p.grad.norm() for p in model.parameters())]))
    return ((found[0] - found[1]).abs() / found[0].abs().clamp(min=1e-6)).max().item()


@pytest.mark.slow
@pytest.mark.parametrize(("region", "recompute"), [("exact", "timm"), ("sequence", "norm_act"), ("sequence", "timm")])
def test_compiled_blocks_recompute_the_same(region: str, recompute: str):
    """P50, in a loop of one's own; vit-tp has no knob for it."""
    assert max(run_world(compiled, 2, region, recompute, timeout_s=200)) < 1e-4


def refusals() -> list[str]:
    """What is refused by name: models without a stream, features of divided tokens, kinds that do not exist."""
    import vit_tp

    said = []

    def ask(what) -> None:
        try:
            what()
        except vit_tp.errors.VitTpError as error:
            said.append(str(error))
        else:
            said.append("")

    group = dist.group.WORLD
    for name in ("samvit_base_patch16", "xcit_tiny_12_p8_224", "mixer_s16_224", "convit_tiny", "tnt_s_patch16_224"):
        ask(lambda name=name: vit_tp.shard_(tiny(name), group, "sequence"))
    ask(lambda: vit_tp.shard_(tiny("crossvit_9_240"), group, recompute="norm_act"))
    cut = vit_tp.shard_(small_vit(), group, "sequence")
    ask(lambda: cut.forward_intermediates(torch.zeros(1, 3, 32, 32)))
    ask(lambda: cut.prune_intermediate_layers([0]))
    ask(lambda: vit_tp.shard_(small_vit(), group, recompute="block"))
    ask(lambda: vit_tp.shard_(small_vit(), group, recompute=2))
    ask(lambda: vit_tp.shard_(small_vit(), group, recompute="all"))
    ask(lambda: vit_tp.shard_(small_vit(), group, "ring"))
    ask(lambda: vit_tp.shard_(small_vit(), group, "partial", fraction=1.5))
    ask(lambda: vit_tp.shard_(small_vit(num_heads=1), group, "sequence", indivisible="mlp_only"))
    apart = vit_tp.shard_(small_vit(), group, "partial", fraction=0.5)
    ask(lambda: vit_tp.full_state_dict(apart, group))
    return said


def test_what_cannot_be_is_refused_by_name():
    for said in run_world(refusals, 2):
        for text in said[:5]:
            assert "parallel.sequence=true is made for those alone. Use parallel.sequence=false" in text
        rest = [
            *("compute.recompute=norm_act", "region='exact'", "take away the block"),
            *(
                "set_grad_checkpointing",
                "set_grad_checkpointing",
                "Use 'none' or 'norm_act'",
                "exact, sequence, partial",
            ),
            *("from 0 to 1", "kept whole on every rank", "another model"),
        ]
        for text, words in zip(said[5:], rest, strict=True):
            assert words in text, text
