"""Families whose blocks read shared tables, trained by DeepSpeed over tp x pp: the numbers of stock timm."""

from __future__ import annotations

import pytest
import timm.optim
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.distributed.models import LR, WEIGHT_DECAY, batches, own_micro_batches, randomise_
from tests.distributed.tiny import NUM_CLASSES, image_size, tiny
from tests.tolerances import LOSS_FLOAT32, NORM_FLOAT32, WEIGHT_STEPS
from tests.worlds import run_world

STEPS, BATCH, CLIP = 4, 8, 1.0
MIXED, SHARED = "vit_small_patch16_rope_mixed_224", "vit_srelpos_small_patch16_224"
BEIT = "beit_base_patch16_224"
KWARGS = {
    SHARED: {"rel_pos_type": "bias"},  # the MLP of its table drops an eighth of its hidden, whatever the rates
    BEIT: {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True},
}
TABLES = {MIXED: "rope.freqs", SHARED: "shared_rel_pos.relative_position_bias_table"}
TABLES[BEIT] = "rel_pos_bias.relative_position_bias_table"


def build(name: str, depth: int = 2) -> nn.Module:
    return randomise_(tiny(name, **KWARGS.get(name, {}), depth=depth))


def steps_of(name: str) -> list:
    return batches(STEPS, BATCH, num_classes=NUM_CLASSES, size=image_size(name)[0])


def without_key_bias(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Softmax does not see a bias of all keys: its gradient is rounding only, of which AdamW makes whole steps."""
    if name.endswith("qkv.bias"):
        return tensor[torch.arange(len(tensor)) // (len(tensor) // 3) != 1]
    return tensor[:0] if name.endswith(".k.bias") else tensor


def stock(name: str, depth: int = 2, parts: int = 2) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train stock timm in one process, in so many micro-batches; return losses, norms and final weights."""
    model = build(name, depth).train()
    groups = timm.optim.param_groups_weight_decay(model, WEIGHT_DECAY, no_weight_decay_list=model.no_weight_decay())
    optimizer, losses, norms = torch.optim.AdamW(groups, lr=LR), [], []
    for images, targets in steps_of(name):
        optimizer.zero_grad()
        total = 0.0
        for x, y in own_micro_batches(images, targets, 0, 1, parts):  # BatchNorm takes a micro-batch's statistics
            loss = F.cross_entropy(model(x), y) / parts
            loss.backward()
            total += loss.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(total)
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def train(
    name: str, pp: int, tp: int, dtype: str = "fp32", schedule: str = "1f1b", depth: int = 2, parts: int = 2
) -> dict:
    """Train the same over pp x tp ranks; return this rank's losses and norms, and the whole weights that it holds."""
    import vit_tp
    from vit_tp.sharding.state import full_tensor
    from vit_tp.train.engine import full_precision

    topology = vit_tp.Topology(pp=pp, dp=1, tp=tp)
    pipe = vit_tp.pipeline(build(name, depth), topology, F.cross_entropy, schedule=schedule)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // parts,
        "gradient_accumulation_steps": parts,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "bf16": {"enabled": dtype == "bf16"},
    }
    engine, found = vit_tp.initialize(pipe, config), {"losses": [], "norms": []}
    for images, targets in steps_of(name):
        loss = engine.train_batch(iter(own_micro_batches(images, targets, 0, 1, parts)))
        found["losses"].append(loss.item())
        found["norms"].append(float(engine.get_global_grad_norm()))
    weights_of, group = full_precision(engine), pipe.groups.tp_group
    found["weights"] = {n: full_tensor(p, weights_of(p), group).clone() for n, p in pipe.named_timm_parameters()}
    found["saved"] = [n for stage in pipe.saved_stages for n, _ in stage.named_timm_parameters()]
    return found


NAMES = [
    MIXED, SHARED, BEIT, "eva02_base_patch16_clip_224", "cait_s24_224", "gemma4_vit_167m", "samvit_base_patch16",
    "xcit_small_12_p16_224",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_of_four_has_the_numbers_of_stock_timm(name: str):
    require_stock_numbers(name, run_world(train, 4, name, 2, 2), stock(name))


FOLDED = [MIXED, *(pytest.param(name, marks=pytest.mark.slow) for name in (SHARED, BEIT, "xcit_small_12_p16_224"))]


@pytest.mark.parametrize("name", FOLDED)
def test_chunks_of_dualpipev_share_tables_and_have_the_numbers_of_stock_timm(name: str):
    """Four blocks in four chunks: both chunks of a rank read one table, and both ranks step their copies alike."""
    require_stock_numbers(name, run_world(train, 4, name, 2, 2, "fp32", "dualpipev", 4, 4), stock(name, 4, 4))


def require_stock_numbers(name: str, ranks: list[dict], wanted: tuple) -> None:
    losses, norms, weights = wanted
    for found in ranks:
        assert found["losses"] == pytest.approx(losses, rel=LOSS_FLOAT32)
        assert found["norms"] == pytest.approx(norms, rel=NORM_FLOAT32)
        for n, tensor in found["weights"].items():
            far = without_key_bias(n, (tensor - weights[n]).abs())
            assert not (far > WEIGHT_STEPS * LR).any(), n
    saved = [n for found in ranks[::2] for n in found["saved"]]  # tp rank 0 of each stage
    assert sorted(saved) == sorted(weights)
    if name in TABLES:
        held = [found["weights"][TABLES[name]] for found in ranks]
        assert all(torch.equal(held[0], other) for other in held[1:]), "every stage steps its copy alike"


@pytest.mark.parametrize(("schedule", "size"), [("1f1b", (2, 2)), ("dualpipev", (4, 4))])
def test_a_table_of_many_stages_counts_once_in_bf16(schedule: str, size: tuple[int, int]):
    """DeepSpeed's bf16 optimizer takes a norm of its own."""
    losses, norms, _ = stock(MIXED, *size)
    for found in run_world(train, 2, MIXED, 2, 1, "bf16", schedule, *size):
        assert found["norms"] == pytest.approx(norms, rel=2e-2)
        assert found["losses"] == pytest.approx(losses, rel=2e-2)


def statistics() -> tuple[dict, dict]:
    """Train two replicas of a model with BatchNorm; return its buffers before and after they are shared."""
    import vit_tp

    pipe = vit_tp.pipeline(build("xcit_small_12_p16_224"), vit_tp.Topology(pp=1, dp=2, tp=1), F.cross_entropy)
    config = {"train_micro_batch_size_per_gpu": BATCH // 2, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    engine = vit_tp.initialize(pipe, config)
    for images, targets in steps_of("xcit_small_12_p16_224"):
        engine.train_batch(iter(own_micro_batches(images, targets, dist.get_rank(), 2, 1)))

    def buffers() -> dict[str, torch.Tensor]:
        return {n: b.clone() for stage in pipe.stages for n, b in stage.inner.named_buffers()}

    before = buffers()
    engine.share_buffers_()
    return before, buffers()


def test_an_evaluation_takes_the_first_replicas_statistics():
    (first, first_after), (other, other_after) = run_world(statistics, 2)
    moved = [n for n in first if n.endswith("running_mean")]
    assert len(moved) == 5 and not any(torch.equal(first[n], other[n]) for n in moved)
    assert all(torch.equal(first[n], first_after[n]) and torch.equal(first[n], other_after[n]) for n in first)


ROTARY = "vit_base_patch16_dinov3"
AUGMENTED = {"rope_shift_coords": 0.3, "rope_jitter_coords": 1.5, "rope_rescale_coords": 2.0}


def drawing(pp: int, tp: int, name: str, is_drawn: bool) -> list[float]:
    """Train a model whose shared tables are drawn by chance in each micro-batch, or not; return its losses."""
    import vit_tp

    model = randomise_(tiny(name, **(AUGMENTED if name == ROTARY and is_drawn else {})))
    if name == SHARED and not is_drawn:
        model.shared_rel_pos.mlp.drop1.p = 0.0  # timm's own 1/8, whatever the rates
    with torch.no_grad():
        for block in model.blocks if name == ROTARY else []:
            block.attn.qkv.weight.mul_(10)  # sharp attention, so that positions matter
    pipe = vit_tp.pipeline(model, vit_tp.Topology(pp=pp, dp=1, tp=tp), F.cross_entropy)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
    }
    engine = vit_tp.initialize(pipe, config)
    return [
        engine.train_batch(iter(own_micro_batches(images, targets, 0, 1, 2))).item()
        for images, targets in batches(STEPS, BATCH, num_classes=NUM_CLASSES)
    ]


@pytest.mark.parametrize("name", [ROTARY, SHARED])
def test_tables_are_drawn_alike_on_every_stage_and_rank(name: str):
    [one], [other] = (run_world(drawing, 1, 1, 1, name, is_drawn) for is_drawn in (True, False))
    assert one != pytest.approx(other, rel=10 * LOSS_FLOAT32), "the draws must matter"
    for pp, tp in [(2, 1), (1, 2), (2, 2)]:
        for losses in run_world(drawing, pp * tp, pp, tp, name, True):
            assert losses == pytest.approx(one, rel=LOSS_FLOAT32)


def buffer_types() -> list[set[torch.dtype]]:
    """Types of the buffers of a bf16 training and of a bf16 evaluation, and the refusal of BatchNorm in either."""
    import vit_tp
    from vit_tp.errors import ConfigError
    from vit_tp.train.engine import evaluator

    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": LR}}
    found = []
    for start in (lambda pipe: vit_tp.initialize(pipe, config), lambda pipe: evaluator(pipe, 2, torch.bfloat16)):
        pipe = vit_tp.pipeline(build("vit_small_patch16_rope_224"), vit_tp.Topology(1, 1, 1), F.cross_entropy)
        start(pipe)
        assert {p.dtype for p in pipe.parameters()} == {torch.bfloat16}
        found.append({b.dtype for b in pipe.buffers() if b.is_floating_point()})
        with pytest.raises(ConfigError, match="compute.dtype=bf16 does not go with the 5 BatchNorm layers"):
            start(vit_tp.pipeline(build("xcit_small_12_p16_224"), vit_tp.Topology(1, 1, 1), F.cross_entropy))
    return found


def test_positions_are_as_exact_in_evaluation_as_in_training():
    [[training, evaluation]] = run_world(buffer_types, 1)
    assert training == evaluation == {torch.float32}
