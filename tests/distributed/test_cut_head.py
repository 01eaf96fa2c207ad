"""Models whose classes are cut, no multiple of tp, against stock timm: gradients, training, evaluation, files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from timm.data.mixup import mixup_target
from torch.nn import functional as F

from tests.distributed.models import (
    LR,
    RICH,
    WEIGHT_DECAY,
    batches,
    own_micro_batches,
    randomise_,
    small_vit,
    stock_training,
)
from tests.distributed.parity import error
from tests.distributed.runs import DIGITS_VIT, eval_digits, train_digits
from tests.distributed.test_pretrained import DIGITS, VIT, assembled, saved
from tests.distributed.test_runs import MIXED, stock_figures
from tests.distributed.test_training_parity import merged
from tests.distributed.tiny import image_size, tiny
from tests.tolerances import FAMILY_FLOAT64, LOSS_FLOAT32, NORM_FLOAT32, WEIGHT_STEPS
from tests.worlds import run_world

CLASSES = 11
FAMILIES = [
    "vit_base_patch16_224", "deit_base_distilled_patch16_224", "eva02_base_patch14_224", "beit_base_patch16_224",
    "vit_relpos_base_patch16_224", "naflexvit_base_patch16_gap", "deepseek_vit_412m", "qwen3_vit_88m",
    "gemma4_vit_167m", "cait_s24_224", "xcit_small_12_p16_224", "convit_base", "gmlp_s16_224", "tnt_s_patch16_224",
]  # fmt: skip
"""One name for each model class whose rule has a classifier to cut."""


def gradients_of_families(names: list[str]) -> dict[str, dict[str, float]]:
    """Return by model how far loss, every gradient, norm and merged state lie from stock timm's."""
    import vit_tp
    from vit_tp.sharding.classifier import ColumnLinear
    from vit_tp.sharding.placement import placement_of

    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        whole = randomise_(tiny(name, num_classes=CLASSES)).eval()
        cut = vit_tp.shard_(copy.deepcopy(whole), dist.group.WORLD, gather_logits=False)
        assert type(cut.head) is ColumnLinear
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 3, *image_size(name), generator=generator)
        targets = torch.tensor([0, CLASSES - 1])
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        wanted = F.cross_entropy(whole(inputs[0]), targets, label_smoothing=0.1)
        loss = vit_tp.ShardedCrossEntropy(dist.group.WORLD, CLASSES, 0.1)(cut(inputs[1]), targets)
        wanted.backward(), loss.backward()
        references = dict(whole.named_parameters())
        used = [n for n, p in references.items() if p.grad is not None]
        floor = 1e-3 * max(references[n].grad.abs().max().item() for n in used)
        norm = torch.stack([references[n].grad.square().sum() for n in used]).sum().sqrt()
        errors = {
            "loss": error(loss.detach(), wanted.detach()),
            "input": error(inputs[1].grad, inputs[0].grad),
            "norm": error(vit_tp.finish_gradients_(cut), norm),
        }
        params = dict(cut.named_parameters())
        for n in used:
            share = placement_of(params[n]).cut(references[n].grad, dist.get_world_size(), dist.get_rank())
            errors[n] = error(params[n].grad, share, floor)
        state = vit_tp.full_state_dict(cut, dist.group.WORLD)
        errors["state"] = max(error(full, whole.state_dict()[n]) for n, full in state.items())
        found[name] = errors
    return found


def test_every_family_gives_its_columns():
    """What timm does behind the classifier, such as the mean of two heads, must act on each class alone."""
    for found in run_world(gradients_of_families, 2, FAMILIES):
        for name, errors in found.items():
            wrong = {n: e for n, e in errors.items() if not e <= FAMILY_FLOAT64}
            assert not wrong, f"{name}: {wrong}"


def test_no_rule_with_a_classifier_is_left_out():
    from vit_tp.sharding.rules import RULES

    ours = {type(tiny(name, "meta")) for name in FAMILIES}
    assert ours == {kind for kind, rule in RULES.items() if rule.wide and kind.__module__.startswith("timm.")}


def with_another_classifier(gather_logits: bool) -> dict[str, float]:
    """Reset the classifier of a cut model to fewer classes than ranks, and to none."""
    import vit_tp

    torch.set_default_dtype(torch.float64)
    whole, found = randomise_(small_vit(num_classes=CLASSES)), {}
    group = dist.group.WORLD
    cut = vit_tp.shard_(copy.deepcopy(whole), group, cut_head_from=2, gather_logits=gather_logits)
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(dist.get_rank())
    for num_classes in (3, 7):
        for model in (whole, cut):
            model.reset_classifier(num_classes)
        whole.load_state_dict(vit_tp.full_state_dict(cut, group), strict=True)
        assert len(cut.head.weight) == -(-num_classes // 4)
        loss_fn = F.cross_entropy if gather_logits else vit_tp.ShardedCrossEntropy(group, num_classes)
        targets = torch.arange(4) % num_classes
        wanted, loss = F.cross_entropy(whole(x), targets), loss_fn(cut(x), targets)
        whole.zero_grad(), cut.zero_grad()
        wanted.backward(), loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in whole.parameters()]).sum().sqrt()
        found[f"loss {num_classes}"] = error(loss.detach(), wanted.detach())
        found[f"norm {num_classes}"] = error(vit_tp.finish_gradients_(cut), norm)
    for model in (whole, cut):
        model.reset_classifier(0)
    found["features"] = error(cut(x).detach(), whole(x).detach())
    return found


@pytest.mark.parametrize("gather_logits", [True, False])
def test_a_cut_model_takes_another_number_of_classes(gather_logits: bool):
    for found in run_world(with_another_classifier, 4, gather_logits):
        assert max(found.values()) <= FAMILY_FLOAT64, found


# -- training ---------------------------------------------------------------------------------------------------------

STEPS, BATCH, CLIP = 8, 16, 0.5
ODD: dict[str, Any] = {**RICH, "num_classes": CLASSES}


def data_of(kind: str) -> list:
    data = batches(STEPS, BATCH, num_classes=CLASSES)
    if kind != "mixed":
        return data
    return [(images, mixup_target(targets, CLASSES, lam=0.7, smoothing=0.1)) for images, targets in data]


def train_odd(
    pp: int, dp: int, tp: int, kind: str, gather_logits: bool, region: str = "exact", dtype: str = "fp32"
) -> dict[str, Any]:
    """Train on this rank; return losses, norms, whole weights first and last, and the largest number in the padding."""
    import vit_tp
    from vit_tp.sharding.placement import Sharded, placement_of
    from vit_tp.sharding.state import full_tensor

    topology = vit_tp.Topology(pp=pp, dp=dp, tp=tp)
    groups = vit_tp.build_groups(topology)
    smoothing = 0.1 if kind == "smoothed" else 0.0
    if gather_logits:
        loss_fn = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)
    else:
        loss_fn = vit_tp.ShardedCrossEntropy(groups.tp_group, CLASSES, smoothing)
    model = small_vit("meta", **ODD)
    pipe = vit_tp.pipeline(
        model, topology, loss_fn, region=region, cut_head_from=2, gather_logits=gather_logits, seed=7, groups=groups
    )
    settings = {
        "train_micro_batch_size_per_gpu": BATCH // dp // 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "gradient_clipping": CLIP,
        "bf16": {"enabled": dtype == "bf16"},
    }

    def whole() -> dict:
        return {n: full_tensor(p, p, groups.tp_group).clone() for n, p in pipe.named_timm_parameters()}

    first = whole()
    engine = vit_tp.initialize(pipe, settings)
    losses, norms = [], []
    for images, targets in data_of(kind):
        own = own_micro_batches(images, targets, groups.place.dp, dp, 2)
        losses.append(engine.train_batch(iter(own)).item())
        norms.append(float(engine.get_global_grad_norm()))
    padding = 0.0
    for name, param in pipe.named_timm_parameters():
        if name.startswith("head."):
            held = -(-CLASSES // tp)
            own_rows = min(max(CLASSES - groups.place.tp * held, 0), held)
            assert len(param) == held and isinstance(placement_of(param), Sharded)
            padding = max(padding, param[own_rows:].abs().sum().item())
    return {"losses": losses, "norms": norms, "first": first, "last": whole(), "padding": padding}


@pytest.fixture(scope="module")
def first_weights() -> dict[str, torch.Tensor]:
    return merged(run_world(train_odd, 1, 1, 1, 1, "hard", True), "first")


@pytest.mark.parametrize(
    ("grid", "kind", "gather_logits", "region"),
    [
        ((2, 1, 2), "hard", True, "exact"),
        ((2, 1, 2), "smoothed", False, "sequence"),
        ((2, 1, 2), "mixed", False, "exact"),
        ((1, 1, 4), "smoothed", False, "exact"),
        pytest.param((1, 1, 4), "hard", True, "sequence", marks=pytest.mark.slow),
        pytest.param((2, 1, 2), "hard", False, "exact", marks=pytest.mark.slow),
        pytest.param((1, 2, 2), "mixed", False, "exact", marks=pytest.mark.slow),
    ],
)
def test_training_equals_stock_timm(grid, kind, gather_logits, region, first_weights):
    pp, dp, tp = grid
    results = run_world(train_odd, pp * dp * tp, pp, dp, tp, kind, gather_logits, region)
    first = merged(results, "first")
    assert all(torch.equal(first[name], first_weights[name]) for name in first_weights)
    smoothing = 0.1 if kind == "smoothed" else 0.0
    losses, norms, weights = stock_training(
        first_weights, data_of(kind), ODD, clip=CLIP, loss_fn=torch.nn.CrossEntropyLoss(label_smoothing=smoothing)
    )
    assert min(norms) > CLIP
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=LOSS_FLOAT32)
        assert result["norms"] == pytest.approx(norms, rel=NORM_FLOAT32)
        assert result["losses"] == results[0]["losses"]
        assert result["padding"] == 0.0
    for name, tensor in merged(results, "last").items():
        limit = 2 * LR * STEPS if name.endswith("k_norm.bias") else WEIGHT_STEPS * LR  # see test_training_parity.py
        assert (tensor - weights[name]).abs().max() <= limit, name


@pytest.mark.slow
def test_bf16_logits_give_the_loss_of_gathered_ones():
    """The first loss: the columns are the same bits, and each is widened before anything is summed."""
    cut, gathered = (run_world(train_odd, 4, 2, 1, 2, "smoothed", gather, dtype="bf16") for gather in (False, True))
    assert cut[0]["losses"][0] == pytest.approx(gathered[0]["losses"][0], rel=1e-6)
    assert all(rank["losses"] == cut[0]["losses"] and rank["padding"] == 0.0 for rank in cut)


# -- through the command's own assembly: ten digits over four ranks have two rows of padding --------------------------

CUT = {"parallel__cut_head_from": 2}
SMOOTHED = {"recipe__smoothing": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "tp", "recipe"), [(1, 4, MIXED), (2, 2, SMOOTHED)], ids=["mixed", "pp2"])
def test_runs_with_a_cut_classifier_are_those_without(pp: int, tp: int, recipe: dict[str, Any], tmp_path: Path):
    """Losses, figures and exported weights; then `vit-tp eval` of them on four ranks, and stock timm."""
    recipe = {"compute__micro_batch_size": 8, "compute__eval_micro_batch_size": 50, **recipe}
    one = run_world(train_digits, 1, 1, 1, 1, str(tmp_path / "one"), recipe)[0]
    ranks = run_world(train_digits, pp * tp, pp, 1, tp, str(tmp_path / "cut"), {**recipe, **CUT}, export=True)
    assert ranks[0]["losses"] == pytest.approx(one["losses"], rel=LOSS_FLOAT32)
    figures = ranks[0]["figures"]
    for name in ("eval/count", "eval/top1", "eval/top5"):
        assert figures[name] == one["figures"][name]
    assert figures["eval/loss"] == pytest.approx(one["figures"]["eval/loss"], rel=LOSS_FLOAT32)

    stock = timm.create_model(VIT, img_size=8, num_classes=10, in_chans=1, **DIGITS_VIT).eval()
    stock.load_state_dict(load_file(tmp_path / "cut" / "export" / "model.safetensors"), strict=True)
    assert stock_figures(stock)["eval/loss"] == pytest.approx(figures["eval/loss"], rel=LOSS_FLOAT32)
    found = run_world(eval_digits, 4, 1, 1, 4, str(tmp_path / "cut"), {**recipe, **CUT})[0]
    assert found["eval/top1"] == figures["eval/top1"]
    assert found["eval/loss"] == pytest.approx(figures["eval/loss"], rel=LOSS_FLOAT32)


def test_a_cut_classifier_starts_from_a_checkpoint(tmp_path: Path):
    path = saved(randomise_(timm.create_model(VIT, **DIGITS)), tmp_path / "vit.safetensors")
    ranks = run_world(assembled, 4, 1, 4, {"model__pretrained": path, **CUT})
    found, wanted = merged(ranks, "weights"), load_file(path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    stock = timm.create_model(VIT, **DIGITS).eval()
    stock.load_state_dict(wanted)
    assert ranks[0]["figures"]["eval/loss"] == pytest.approx(stock_figures(stock)["eval/loss"], rel=LOSS_FLOAT32)
