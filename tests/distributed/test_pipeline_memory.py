"""What a rank holds: never the whole model, never more micro-batches than 1F1B needs."""

from __future__ import annotations

import gc
import resource
import weakref

import pytest
import timm
import torch
import torch.distributed as dist

from tests.distributed.models import batches, own_micro_batches
from tests.worlds import run_world

LARGE = {"img_size": 32, "patch_size": 16, "num_classes": 10}  # vit_large: 302 M parameters, 1.21 GB in fp32


def large_vit() -> torch.nn.Module:
    with torch.device("meta"):
        return timm.create_model("vit_large_patch16_224", **LARGE)


def train_cut_in_four(pp: int, tp: int) -> dict[str, float]:
    """Fine-tune with MLPs and qkv frozen; return bytes and losses of this rank.

    AdamW alone holds 16 bytes for each trained parameter, so a quarter of a model that trains as a whole needs as much
    as the whole weights; frozen parameters cost their slice and nothing else.
    """
    import vit_tp

    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    model = large_vit()
    full_bytes = sum(p.numel() * 4 for p in model.parameters())
    for name, param in model.named_parameters():
        param.requires_grad_(".mlp." not in name and ".qkv." not in name)
    pipe = vit_tp.pipeline(model, vit_tp.Topology(pp=pp, dp=1, tp=tp), torch.nn.functional.cross_entropy)
    built = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    engine = vit_tp.initialize(
        pipe,
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
            "zero_optimization": {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
        },
    )
    losses = []
    for images, targets in batches(1, 4) * 3:
        own = own_micro_batches(images, targets, 0, 1, 2)
        losses.append(engine.train_batch(iter(own)).item())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"full": full_bytes, "built": built - before, "peak": peak - before, "losses": losses}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("pp", "tp"), [(2, 2), pytest.param(1, 4, marks=SLOW), pytest.param(4, 1, marks=SLOW)])
def test_a_model_larger_than_what_a_process_may_hold_trains_cut_in_four(pp, tp):
    """The limit is the whole model's fp32 weights: no rank's peak memory, building included, comes near it."""
    for rank in run_world(train_cut_in_four, 4, pp, tp, timeout_s=300):
        assert rank["built"] < 0.5 * rank["full"], f"building took {rank['built'] / 1e9:.2f} GB"
        assert rank["peak"] < rank["full"], (
            f"{rank['peak'] / 1e9:.2f} GB against {rank['full'] / 1e9:.2f} GB of weights"
        )
        assert rank["losses"][-1] < rank["losses"][0]


WATCHED = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 8, "num_heads": 4, "num_classes": 10}


def live_bytes(schedule: str) -> dict[str, int]:
    """Train one step on pp=4; return the peak of saved activation bytes and of micro-batches alive on this rank."""
    import vit_tp

    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", **WATCHED)
    topology, loss_fn = vit_tp.Topology(pp=4, dp=1, tp=1), torch.nn.functional.cross_entropy
    pipe = vit_tp.pipeline(model, topology, loss_fn, schedule=schedule)
    engine = vit_tp.initialize(
        pipe,
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    )
    weights = {p.untyped_storage().data_ptr() for p in pipe.parameters()}
    alive: dict[int, int] = {}
    peak, most = 0, 0
    micro_batches_alive = 0

    def pack(tensor: torch.Tensor):
        nonlocal peak
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in weights and key not in alive:
            alive[key] = storage.nbytes()
            weakref.finalize(storage, alive.pop, key, None)
        peak = max(peak, sum(alive.values()))
        return tensor

    forward, backward = engine._exec_forward_pass.__func__, engine._exec_backward_pass.__func__
    instructions = dict(engine._INSTRUCTION_MAP)

    def watched_forward(self, buffer_id, **phase):
        nonlocal micro_batches_alive, most
        micro_batches_alive += 1
        most = max(most, micro_batches_alive)
        return forward(self, buffer_id, **phase)

    def watched_backward(self, buffer_id, **phase):
        nonlocal micro_batches_alive
        micro_batches_alive -= 1
        return backward(self, buffer_id, **phase)

    for instruction, function in instructions.items():
        if function is forward:
            instructions[instruction] = watched_forward
        if function is backward:
            instructions[instruction] = watched_backward
    engine._INSTRUCTION_MAP = instructions
    ((images, targets),) = batches(1, 32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.train_batch(iter(own_micro_batches(images, targets, 0, 1, 8)))
    return {"bytes": peak, "micro_batches": most}


@pytest.mark.parametrize(
    ("schedule", "alive"),
    [("1f1b", [[4], [3], [2], [1]]), pytest.param("dualpipev", [[8, 1], [7, 2], [6, 3], [5, 4]], marks=SLOW)],
)
def test_stages_hold_what_the_plan_says(schedule, alive):
    """P20: micro-batches of each chunk, and their bytes within 20 % of the count on meta."""
    from vit_tp.models.costs import stage_bounds
    from vit_tp.plan.stages import plan_ranks, plan_stages

    found = run_world(live_bytes, 4, schedule)
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", **WATCHED)
    bounds = stage_bounds(model, 4, schedule=schedule)
    planned = plan_ranks(plan_stages(model, 4, 1, torch.float32), bounds, 8, schedule)
    assert [plan.micro_batches for plan in planned] == alive
    assert [rank["micro_batches"] for rank in found] == [sum(chunks) for chunks in alive]
    assert [rank["bytes"] for rank in found] == pytest.approx([plan.activation_bytes for plan in planned], rel=0.2)


def test_counted_bytes_of_a_block_are_those_of_the_literature():
    """arXiv 2205.05198 without dropout and scores: (8 + 24 / t) N B C bytes in bf16 with fused attention."""
    from vit_tp.plan.stages import plan_stages

    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
    for tp in (1, 2, 4):
        block = plan_stages(model, 8, tp, torch.bfloat16)[1].activation_bytes
        assert block / (8 * 197 * 768) == pytest.approx(8 + 24 / tp, rel=0.01)


def messages() -> list[tuple[tuple[int, ...], bool, bool]]:
    """P13: count what crosses a stage boundary in one step of pp=2 x tp=2, with a class token and registers."""
    import deepspeed.runtime.pipe.engine as pipe_engine

    import vit_tp
    from tests.distributed.models import RICH, small_vit

    pipe = vit_tp.pipeline(
        small_vit("meta", **RICH), vit_tp.Topology(pp=2, dp=1, tp=2), torch.nn.functional.cross_entropy
    )
    engine = vit_tp.initialize(
        pipe,
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 3,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    )
    sent = []
    send = pipe_engine.p2p.send

    def counted(tensor, stage, *args):
        if tensor.is_floating_point():  # the first message of a shape announces it in integers
            sent.append((tuple(tensor.shape), tensor.is_contiguous(), tensor.dtype == torch.float32))
        return send(tensor, stage, *args)

    pipe_engine.p2p.send = counted
    images, targets = batches(1, 12)[0]
    engine.train_batch(iter(own_micro_batches(images, targets, 0, 1, 3)))
    assert dist.is_initialized()
    return sent


def test_one_contiguous_tensor_crosses_a_boundary():
    num_tokens = 16 + 1 + 2
    for rank in run_world(messages, 4):
        assert rank == [((4, num_tokens, 32), True, True)] * 3  # activations from stage 0, gradients from stage 1


def bad_loss(kind: str) -> str:
    import vit_tp
    from tests.distributed.models import small_vit

    losses = {
        "vector": lambda y, t: torch.nn.functional.cross_entropy(y, t, reduction="none"),
        "tuple": lambda y, t: (torch.nn.functional.cross_entropy(y, t), y),
    }
    pipe = vit_tp.pipeline(small_vit("meta"), vit_tp.Topology(), losses[kind])
    engine = vit_tp.initialize(
        pipe, {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    )
    try:
        engine.train_batch(iter(batches(1, 4)))
    except vit_tp.errors.ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["vector", "tuple"])
def test_a_loss_that_is_no_scalar_is_refused(kind):
    """P04."""
    assert "Return a scalar tensor" in run_world(bad_loss, 1, kind)[0]
