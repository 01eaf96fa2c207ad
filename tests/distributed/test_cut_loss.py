"""The loss of cut logits against torch's on whole ones in float64, and what it keeps, makes and sends, counted."""

from __future__ import annotations

import contextlib
import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.models import SMALL, batches, small_vit
from tests.tolerances import CUT_LOSS_FLOAT64
from tests.worlds import run_world

B = 6
WIDTHS = [1, 3, 4, 5, 11, 12, 24]  # fewer classes than ranks, so that some hold padding only; divisible and not
KINDS = ["hard", "smoothed", "soft", "soft and smoothed", "ignored", "first class", "last class"]


def case(kind: str, num_classes: int) -> tuple[Tensor, float]:
    """Targets and smoothing."""
    generator = torch.Generator().manual_seed(num_classes)
    targets = torch.randint(num_classes, (B,), generator=generator)
    if kind == "ignored":
        targets[::2] = -100
    elif kind.endswith("class"):
        targets[:] = 0 if kind.startswith("first") else num_classes - 1
    elif kind.startswith("soft"):
        targets = torch.rand(B, num_classes, generator=generator, dtype=torch.float64)  # need not add up to one
    return targets, 0.1 if kind.endswith("smoothed") else 0.0


def logits_of(num_classes: int, scale: float) -> Tensor:
    return scale * torch.randn(B, num_classes, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def own_columns(full: Tensor) -> Tensor:
    """Cut as the classifier does, but with padding that would win every maximum."""
    size, rank = dist.get_world_size(), dist.get_rank()
    held = -(-full.shape[1] // size)
    padded = F.pad(full, (0, held * size - full.shape[1]), value=6e4)
    return padded[:, rank * held : (rank + 1) * held].clone()


def far(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    distance = ((found - wanted).abs() / wanted.abs().clamp(min=1)).max().item() if wanted.numel() else 0.0
    return math.inf if math.isnan(distance) else distance


def against_torch(kinds: list[str]) -> dict[str, tuple[float, float, float]]:
    """Return by case the distance of losses and of this rank's gradient, and the largest gradient of padding."""
    from vit_tp.parallel.columns import Columns
    from vit_tp.parallel.cross_entropy import cross_entropy

    found = {}
    for num_classes, kind, scale, reduction in product(WIDTHS, kinds, (1.0, 1e4), ("mean", "none")):
        targets, smoothing = case(kind, num_classes)
        whole = logits_of(num_classes, scale).requires_grad_()
        local = own_columns(whole.detach()).requires_grad_()
        columns = Columns.over(dist.group.WORLD, num_classes)
        wanted = F.cross_entropy(whole, targets, label_smoothing=smoothing, reduction=reduction)
        loss = cross_entropy(local, targets, columns, smoothing, reduction)
        weights = torch.arange(1.0, B + 1, dtype=torch.float64) if reduction == "none" else torch.ones(())
        (wanted * weights).sum().backward(), (loss * weights).sum().backward()
        assert local.grad.shape == local.shape
        padding = local.grad[:, columns.own :]
        found[f"{num_classes} {kind} {scale} {reduction}"] = (
            far(loss.detach(), wanted.detach()),
            far(local.grad[:, : columns.own], own_columns(whole.grad)[:, : columns.own]),
            padding.abs().max().item() if padding.numel() else 0.0,
        )
    return found


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_losses_and_gradients_are_torchs_on_whole_logits(tp_size: int):
    for rank, found in enumerate(run_world(against_torch, tp_size, KINDS)):
        wrong = {name: e for name, e in found.items() if not max(e[:2]) <= CUT_LOSS_FLOAT64 or e[2] != 0}
        assert not wrong, f"rank {rank}: {wrong}"


def of_type(dtype: torch.dtype) -> dict[str, Any]:
    """Return the loss and how far it lies from torch's of the same logits, widened."""
    import vit_tp

    loss_fn = vit_tp.ShardedCrossEntropy(dist.group.WORLD, 11, 0.1)
    whole = logits_of(11, 3.0).to(dtype)
    targets, _ = case("hard", 11)
    local = own_columns(whole).requires_grad_()
    loss = loss_fn(local, targets)
    loss.backward()
    wanted = F.cross_entropy(whole.float(), targets, label_smoothing=0.1)
    return {"loss": loss.detach(), "far": far(loss.detach(), wanted), "grad": local.grad.dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loss_is_float32_and_the_same_bits_on_every_rank(dtype):
    ranks = run_world(of_type, 3, dtype)
    for rank in ranks:
        assert rank["far"] <= 1e-6 and rank["grad"] == dtype
        assert torch.equal(rank["loss"], ranks[0]["loss"])


def special() -> dict[str, Any]:
    """What torch's own loss makes of infinities, of NaN and of targets that are no class."""
    import vit_tp

    loss_fn = vit_tp.ShardedCrossEntropy(dist.group.WORLD, 5)
    found = {}
    for name, value in (("-inf", -torch.inf), ("inf", torch.inf), ("nan", torch.nan)):
        whole = logits_of(5, 1.0)
        whole[:, 4] = value  # on the last rank that has any
        targets = torch.zeros(B, dtype=torch.int64)
        found[name] = loss_fn(own_columns(whole), targets).item(), F.cross_entropy(whole, targets).item()
    for target in (5, 6, -1):
        local = own_columns(logits_of(5, 1.0)).requires_grad_()
        loss_fn(local, torch.tensor([0, 1, 2, 3, 4, target])).backward()
        found[f"target {target}"] = local.grad[:, : loss_fn.columns.own].isnan().any(1).tolist()
    found["refused"] = []
    for logits, targets in (
        (torch.zeros(B, 5), torch.zeros(B, dtype=torch.int64)),
        (torch.zeros(B, 2), torch.zeros(B, 2)),
        (torch.zeros(B, 2), torch.zeros(B, 1, dtype=torch.int64)),
    ):
        try:
            loss_fn(logits, targets)
        except vit_tp.errors.ConfigError as error:
            found["refused"].append(str(error))
    return found


def test_numbers_that_are_none_stay_loud():
    for rank, found in enumerate(run_world(special, 4)):
        assert found["-inf"][0] == pytest.approx(found["-inf"][1], rel=1e-12)
        assert all(math.isnan(number) for name in ("inf", "nan") for number in found[name])
        if rank < 3:  # the fourth rank has padding only
            assert all(found[f"target {target}"] == [False] * 5 + [True] for target in (5, 6, -1))
        whole, narrow, column = found["refused"]
        assert "(6, 5)" in whole and "2 columns of 5 classes" in whole and "gather_logits=False" in whole
        assert "(6, 2)" in narrow and "(6, 5)" in narrow and "(6, 1)" in column


# -- counted ----------------------------------------------------------------------------------------------------------

ROWS, CLASSES = 4, 1001


class Shapes(TorchDispatchMode):
    """Notes the largest dim of every tensor that an operator returns, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [size for t in tree_leaves(made) if isinstance(t, Tensor) for size in t.shape]
        self.largest = max([self.largest, *sizes])
        return made


@contextlib.contextmanager
def exchanges():
    """Yield a list of (collective, bytes that this rank gives) of all that is sent meanwhile."""
    from vit_tp.parallel import collectives

    sent: list[tuple[str, int]] = []
    names = ("all_reduce", "all_gather", "all_gather_single", "all_gather_into_tensor", "broadcast", "reduce_scatter")
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    held = [  # wherever our code has it from
        (module, key, name)
        for module in (dist, collectives)
        for key, value in vars(module).items()
        for name, original in originals.items()
        if value is original
    ]

    def counting(name: str):
        def counted(*args, **kwargs):
            given = args[1] if name.startswith("all_gather") else args[0]
            is_max = kwargs.get("op") == dist.ReduceOp.MAX
            kind = "gather" if name.startswith("all_gather") else "max" if is_max else name.replace("all_reduce", "sum")
            sent.append((kind, given.numel() * given.element_size()))
            return originals[name](*args, **kwargs)

        return counted

    for module, key, name in held:
        setattr(module, key, counting(name))
    try:
        yield sent
    finally:
        for module, key, name in held:
            setattr(module, key, originals[name])


def counted(kind: str, gather_logits: bool) -> dict[str, Any]:
    """Run a cut classifier and its loss forward and backward."""
    import vit_tp
    from vit_tp.parallel.regions import ExactRegion
    from vit_tp.sharding.classifier import cut_classifier_

    width, size = 16, dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, CLASSES))
    cut_classifier_(model, "0", ExactRegion(dist.group.WORLD), 2, gather_logits)
    targets = torch.arange(ROWS) * 300
    if kind.startswith("soft"):
        targets = F.one_hot(targets, CLASSES).float() * 0.9 + 0.1 / CLASSES
    smoothing = 0.1 if kind.endswith("smoothed") else 0.0
    cut_loss = vit_tp.ShardedCrossEntropy(dist.group.WORLD, CLASSES, smoothing)
    loss_fn = F.cross_entropy if gather_logits else cut_loss
    weights = {p.untyped_storage() for p in model.parameters()}
    saved: dict[torch.UntypedStorage, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage() not in weights:
            saved[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(ROWS, width, requires_grad=True)
    with Shapes() as shapes, exchanges() as sent:
        with saved_tensors_hooks(note, lambda tensor: tensor):
            loss = loss_fn(model(x), targets)
        forward = list(sent)
        loss.backward()
    own = cut_loss.columns.own
    return {
        "saved": sum(saved.values()) - x.numel() * 4,
        "logits": ROWS * own * 4,
        "held": ROWS * -(-CLASSES // size) * 4,
        "largest": shapes.largest,
        "forward": forward,
        "backward": sent[len(forward) :],
        "input": x.numel() * 4,
    }


SUMS = {"hard": 2, "smoothed": 3, "soft": 3, "soft and smoothed": 4}


@pytest.mark.parametrize("tp_size", [2, 4])
def test_only_columns_of_this_rank_are_kept_made_and_sent(tp_size: int):
    """docs/parallelism-head.md has the formulas."""
    held = -(-CLASSES // tp_size)
    for kind, sums in SUMS.items():
        for rank in run_world(counted, tp_size, kind, False):
            assert rank["logits"] <= rank["saved"] <= rank["logits"] + 16 * ROWS, (
                "one tensor of (B, K/tp) and a few of (B,)"
            )
            assert rank["largest"] == held
            assert rank["forward"] == [("max", 4 * ROWS), ("sum", 4 * ROWS * sums)]
            assert rank["backward"] == [("sum", rank["input"])]


def test_gathering_keeps_makes_and_sends_whole_logits():
    """The same measure of the other way, or the test above could not fail."""
    for rank in run_world(counted, 2, "hard", True):
        assert rank["saved"] >= ROWS * CLASSES * 4
        assert rank["largest"] >= CLASSES
        assert rank["forward"] == [("gather", rank["held"])]
        assert rank["backward"] == [("sum", rank["input"])]


def whole_model() -> dict[str, Any]:
    """A step and an evaluation of a cut model by the task of the command line."""
    import vit_tp
    from vit_tp.tasks.classification import Classification

    model = vit_tp.shard_(small_vit(num_classes=CLASSES), dist.group.WORLD, gather_logits=False)
    task = Classification(CLASSES, 0.1, dist.group.WORLD)
    images, targets = batches(1, ROWS, num_classes=CLASSES)[0]
    with Shapes() as shapes:
        task(model(images), targets).backward()
        vit_tp.finish_gradients_(model)
        with exchanges() as sent:
            task.eval()(model.eval()(images), targets)
    heads = [(kind, n) for kind, n in sent if kind == "max" or n <= 16 * ROWS]
    return {"largest": shapes.largest, "evaluation": heads, "blocks": len(sent) - len(heads)}


def test_no_rank_of_a_model_ever_makes_a_tensor_of_all_classes():
    for rank in run_world(whole_model, 2):
        assert rank["largest"] == 501
        # the largest logit; two sums of the loss; the target's logit; how many stand before it (int64)
        assert rank["evaluation"] == [("max", 4 * ROWS), ("sum", 8 * ROWS), ("sum", 4 * ROWS), ("sum", 8 * ROWS)]
        assert rank["blocks"] == 2 * SMALL["depth"]


def figures(logits: Tensor, targets: Tensor) -> tuple[list[float], list[float]]:
    """Sums of the task over cut logits, and over whole ones."""
    from vit_tp.tasks.classification import Classification

    num_classes = logits.shape[1]
    cut = Classification(num_classes, tp_group=dist.group.WORLD).eval()
    whole = Classification(num_classes).eval()
    cut(own_columns(logits), targets), whole(logits, targets)
    return cut.sums.tolist(), whole.sums.tolist()


def hard_to_judge() -> list[tuple[list[float], list[float]]]:
    """Ties within a rank and over ranks, NaN, infinities, padded rows, fewer classes than ranks."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for num_classes in (1, 3, 7, 11, 12):
        targets = torch.randint(num_classes, (64,), generator=generator)
        random = torch.randn(64, num_classes, generator=generator)
        for logits in (random, random.round(), torch.zeros(64, num_classes), random.round().bfloat16()):
            found.append(figures(logits, targets))
        broken = random.round()
        broken[::3, 0], broken[1::3, -1], broken[2::5] = torch.nan, torch.inf, torch.nan
        found.append(figures(broken, targets))
        found.append(figures(random, torch.where(torch.arange(64) % 2 == 0, targets, -100)))
    return found


@pytest.mark.parametrize("tp_size", [2, 4])
def test_cut_logits_are_judged_as_whole_ones(tp_size: int):
    for rank in run_world(hard_to_judge, tp_size):
        for cut, whole in rank:
            assert cut[0] == whole[0] and cut[2:] == whole[2:]
            assert cut[1] == pytest.approx(whole[1], rel=1e-6, nan_ok=True)
