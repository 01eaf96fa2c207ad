"""Images that grow during training: stock timm with dynamic_img_size on one process gives the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist

from tests.distributed.models import LR, WEIGHT_DECAY, own_micro_batches
from tests.distributed.runs import DIGITS_VIT, eval_digits, train_digits
from tests.distributed.test_training_parity import merged
from tests.tolerances import LOSS_FLOAT32, NORM_FLOAT32, WEIGHT_STEPS
from tests.worlds import run_world

SLOW = pytest.mark.slow
VIT = ("vit_tiny_patch16_224", {"patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4})
ROPE = ("eva02_tiny_patch14_224", {"patch_size": 4, "mlp_ratio": 4, "embed_dim": 32, "depth": 4, "num_heads": 4})
# Clips of two tubelets, against the whole model that tests/unit/test_models_video.py compares with stock timm. Of a
# factorised one frame by frame: N = 2 (P + S), 10 to 34 tokens; of the others P + 2 S.
CLIPS = (*ROPE, {"num_frames": 4, "position": "rope"})
FACTORISED = (*VIT, {"num_frames": 4, "attention": "factorised", "time_depth": 2})
DIVIDED = (*VIT, {"num_frames": 4, "attention": "divided"})
# the table's own size, smaller, wide, and high; N = 17 to 37 tokens
SIZES = [(16, 16), (16, 16), (8, 8), (8, 24), (24, 8), (16, 16)]
GLOBAL_BATCH, PARTS = 8, 4


def build(device: str, family: str, kwargs: dict[str, Any], video: dict[str, Any] | None = None) -> torch.nn.Module:
    import vit_tp

    with torch.device(device):
        model = timm.create_model(family, img_size=16, num_classes=10, dynamic_img_size=True, **kwargs)
    return vit_tp.video_model(model, **video) if video else model


def growing_batches(video: dict[str, Any] | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    frames = [video["num_frames"]] if video else []
    return [
        (
            torch.randn(GLOBAL_BATCH, 3, *frames, *size, generator=generator),
            torch.randint(10, (GLOBAL_BATCH,), generator=generator),
        )
        for size in SIZES
    ]


def train_growing(pp: int, dp: int, tp: int, model: tuple, steps: int, **cut: Any) -> dict:
    import vit_tp
    from vit_tp.sharding.state import full_tensor
    from vit_tp.train.engine import full_precision

    topology = vit_tp.Topology(pp=pp, dp=dp, tp=tp)
    loss = torch.nn.functional.cross_entropy
    pipe = vit_tp.pipeline(build("meta", *model), topology, loss, seed=7, img_sizes=SIZES, **cut)
    group = pipe.groups.tp_group

    def whole(weights_of) -> dict:
        return {n: full_tensor(p, weights_of(p), group).float().clone() for n, p in pipe.named_timm_parameters()}

    first = whole(lambda p: p.detach())
    engine = vit_tp.initialize(
        pipe,
        {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dp // PARTS,
            "gradient_accumulation_steps": PARTS,
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
            "gradient_clipping": 0.5,
        },
    )
    losses, norms, changes = [], [], []
    for images, targets in growing_batches(*model[2:])[:steps]:
        changes.append(pipe.arrange_(tuple(images.shape[-2:])))
        if changes[-1]:
            engine.reset_activation_shape()
        own = own_micro_batches(images, targets, topology.coordinates(dist.get_rank()).dp, dp, PARTS)
        losses.append(engine.train_batch(iter(own)).item())
        norms.append(float(engine.get_global_grad_norm()))
    return {
        "losses": losses,
        "norms": norms,
        "changes": changes,
        "first": first,
        "last": whole(full_precision(engine)),
    }


@pytest.fixture(
    scope="module",
    params=[VIT, ROPE, FACTORISED, *(pytest.param(model, marks=SLOW) for model in (CLIPS, DIVIDED))],
    ids=["learnt", "rotary", "factorised", "clips", "divided"],
)
def stock(request) -> tuple:
    """Stock timm and torch's AdamW from the weights that one process starts from."""
    first = merged(run_world(train_growing, 1, 1, 1, 1, request.param, 0), "first")
    model = build("cpu", *request.param)
    model.load_state_dict(first, strict=False)
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and n not in model.no_weight_decay()]
    plain = [p for p in model.parameters() if not any(p is other for other in decayed)]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    losses, norms = [], []
    for images, targets in growing_batches(*request.param[2:]):
        loss = torch.nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if request.param == FACTORISED:
        assert max(far_from_frames(model)) <= 1e-5
    return request.param, losses, norms, {n: p.detach() for n, p in model.named_parameters()}


@torch.no_grad()
def far_from_frames(video: torch.nn.Module) -> list[float]:
    """Return how far a factorised model is from stock timm on each tubelet, and blocks over what it pools, by size.

    Frames of a tubelet are equal here, so that the sum of its kernels is the kernel of an image.
    """
    stock = timm.create_model(VIT[0], img_size=16, num_classes=10, dynamic_img_size=True, **VIT[1])
    state = {n: t for n, t in video.state_dict().items() if not n.startswith("time_")}
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].sum(2)
    stock.load_state_dict(state)
    far = []
    for size in SIZES:
        x = torch.randn(2, 3, 2, *size, generator=torch.Generator().manual_seed(4))
        tokens = [stock.patch_drop(stock._pos_embed(stock.patch_embed(x[:, :, t]))) for t in range(2)]
        pooled = torch.stack([stock.blocks(stock.norm_pre(frame))[:, 0] for frame in tokens], 1) + video.time_embed
        wanted = stock.head(stock.norm(video.time_blocks(pooled).mean(1)))
        far.append((video(x.repeat_interleave(2, 2)) - wanted).abs().max().item())
    return far


@pytest.mark.parametrize(
    ("grid", "cut"),
    [
        ((2, 1, 2), {"region": "sequence"}),
        ((1, 1, 1), {}),
        *(
            pytest.param(grid, cut, marks=SLOW)
            for grid, cut in [
                ((2, 2, 1), {}),
                ((1, 1, 4), {"region": "sequence", "recompute": "norm_act"}),
                ((4, 1, 1), {"recompute": "block"}),
                ((2, 1, 2), {"schedule": "dualpipev", "region": "sequence"}),
            ]
        ),
    ],
)
def test_training_at_growing_sizes_equals_stock_timm(grid, cut, stock):
    model, losses, norms, weights = stock
    pp, dp, tp = grid
    results = run_world(train_growing, pp * dp * tp, pp, dp, tp, model, len(SIZES), **cut)
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=LOSS_FLOAT32)
        assert result["norms"] == pytest.approx(norms, rel=NORM_FLOAT32)
        assert result["changes"] == [False, False, True, True, True, True]
    for name, tensor in merged(results, "last").items():
        assert (tensor - weights[name]).abs().max() <= WEIGHT_STEPS * LR, name


def test_a_run_changes_its_size_by_epoch_and_evaluates_at_the_last(tmp_path):
    """Digits at 8, 8 x 16 and 16 pixels on tp=2 x pp=2 with divided tokens, against one process, export included."""
    grown = {
        "model__img_size": 16, "model__kwargs": {**DIGITS_VIT, "patch_size": 4}, "recipe__epochs": 3,
        "recipe__resolution_schedule": [[0, 8], [1, [8, 16]], [2, 16]], "recipe__global_batch_size": 512,
        "recipe__max_steps": 6, "compute__micro_batch_size": 128, "compute__eval_micro_batch_size": 90,
    }  # fmt: skip
    one = run_world(train_digits, 1, 1, 1, 1, str(tmp_path / "one"), grown)[0]
    cut = {**grown, "parallel__sequence": True}
    ranks = run_world(train_digits, 4, 2, 1, 2, str(tmp_path / "four"), cut, export=True)
    assert ranks[0]["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert ranks[0]["figures"]["eval/loss"] == pytest.approx(one["figures"]["eval/loss"], rel=1e-5)
    assert ranks[0]["images"] == one["images"]
    alone = run_world(eval_digits, 1, 1, 1, 1, str(tmp_path / "four"), grown)[0]
    assert alone["eval/loss"] == pytest.approx(one["figures"]["eval/loss"], rel=1e-5)
