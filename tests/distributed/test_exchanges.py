"""What a block keeps and what it exchanges, counted: bytes of unique storages, collectives and their bytes.

The formulas are those of docs/parallelism.md, in units of N B C elements.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.worlds import run_world

B, N, C = 2, 192, 768
BASE: dict[str, Any] = {"img_size": (128, 96), "patch_size": 8, "embed_dim": C, "depth": 1, "num_heads": 12,
                        "num_classes": 10, "class_token": False, "global_pool": "avg"}  # fmt: skip
PARALLEL = {**BASE, "block_fn": ParallelScalingBlock}
FUSED = {**BASE, "block_fn": partial(ParallelScalingBlock, fuse_out_proj=True)}


class Living(TorchDispatchMode):
    """Every storage that operations make, while it lives.

    Args:
        known: Tensors that are not counted: views of them are made too.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.bytes and key not in self.known:
            self.bytes[key] = storage.nbytes()
            weakref.finalize(storage, self.bytes.pop, key, None)


def build_block(kwargs: dict[str, Any], region: str, recompute: str, fraction: float = 1.0):
    """Return a cut block stage on this rank and its region, as a pipeline would make it."""
    from vit_tp.models.stages import build_stage
    from vit_tp.sharding.cutting import Cutting
    from vit_tp.sharding.stages import cut_stage_

    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", **kwargs)
    cutting = Cutting(region, fraction, recompute)
    exchange = cutting.build_region(dist.group.WORLD)
    return cut_stage_(build_stage(model, "blocks.0"), exchange, cutting), exchange


def kept_units(kwargs: dict[str, Any], region: str, recompute: str) -> float:
    """Return what a bf16 block holds between forward and backward, its input counted and its output not, over N B C."""
    stage, exchange = build_block(kwargs, region, recompute)
    stage = stage.to(torch.bfloat16).train()
    exchange.resume(N)
    length = N // dist.get_world_size() if exchange.divides_tokens else N
    x = torch.randn(B, length, C, dtype=torch.bfloat16).requires_grad_()
    with Living([x, *stage.parameters()]) as living:
        out = stage(x)
    time.sleep(0.2)  # gloo's thread lets go of what it has summed a moment after the sum is there
    own = out.untyped_storage().nbytes()
    return (sum(living.bytes.values()) - own + x.untyped_storage().nbytes()) / (B * N * C)


KEPT = [
    (BASE, "exact", "none", lambda t: 8 + 24 / t),
    (BASE, "sequence", "none", lambda t: 32 / t),
    (BASE, "exact", "norm_act", lambda t: 4 + 16 / t),
    (BASE, "sequence", "norm_act", lambda t: 20 / t),
    (BASE, "exact", "block", lambda t: 2),
    (BASE, "sequence", "block", lambda t: 2 / t),
    (PARALLEL, "sequence", "none", lambda t: 28 / t),
    (PARALLEL, "sequence", "norm_act", lambda t: 18 / t),
    (FUSED, "sequence", "none", lambda t: 30 / t),  # what is joined before its one projection is kept once more
    (FUSED, "sequence", "norm_act", lambda t: 28 / t),
    (PARALLEL, "sequence", "block", lambda t: 2 / t),
    (FUSED, "sequence", "block", lambda t: 2 / t),
    (BASE, "partial", "none", lambda t: 8 + 24 / t),
    (BASE, "partial", "block", lambda t: 2),
    (BASE, "partial", "norm_act", lambda t: 4 + 16 / t),
]  # fmt: skip


def all_kept() -> list[float]:
    return [kept_units(kwargs, region, recompute) for kwargs, region, recompute, _ in KEPT]


@pytest.mark.parametrize("tp_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_block_keeps_the_bytes_of_the_formula(tp_size: int):
    for rank in run_world(all_kept, tp_size, timeout_s=240):
        for (_, region, recompute, formula), found in zip(KEPT, rank, strict=True):
            assert found == pytest.approx(formula(tp_size), rel=0.01), (region, recompute)


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """Note each collective of this process and the elements of the whole that it moves."""
    from vit_tp.parallel import collectives

    calls: list[tuple[str, int]] = []
    originals = dist.all_reduce, collectives._all_gather_single, collectives._reduce_scatter_single

    def all_reduce(x, *args, **kwargs):
        calls.append(("all_reduce", x.numel()))
        return originals[0](x, *args, **kwargs)

    def all_gather(out, x, **kwargs):
        calls.append(("gather", out.numel()))
        return originals[1](out, x, **kwargs)

    def reduce_scatter(out, x, **kwargs):
        calls.append(("scatter", x.numel()))
        return originals[2](out, x, **kwargs)

    dist.all_reduce, collectives._all_gather_single, collectives._reduce_scatter_single = (
        all_reduce, all_gather, reduce_scatter,
    )  # fmt: skip
    try:
        yield calls
    finally:
        dist.all_reduce, collectives._all_gather_single, collectives._reduce_scatter_single = originals


def exchanges(kwargs: dict[str, Any], region: str, recompute: str, fraction: float = 1.0) -> tuple[list, list]:
    """Return the collectives of a block's forward and of its backward, elements in units of N B C."""
    stage, exchange = build_block(kwargs, region, recompute, fraction)
    stage.train()
    exchange.resume(N)
    length = N // dist.get_world_size() if exchange.divides_tokens else N
    x = torch.randn(B, length, C).requires_grad_()
    with counted() as calls:
        out = stage(x)
        forward, calls[:] = list(calls), []
        out.sum().backward()
    return tuple([(name, numel / (B * N * C)) for name, numel in part] for part in (forward, calls))


R, G, S = ("all_reduce", 1.0), ("gather", 1.0), ("scatter", 1.0)
SCALED = {**BASE, "init_values": 0.1}
EXCHANGES = [
    (BASE, "exact", "none", 1.0, [R, R], [R, R]),
    (BASE, "exact", "norm_act", 1.0, [R, R], [R, R]),
    # the first sum is needed for the second norm; the second is not, unless LayerScale multiplies it
    (BASE, "exact", "block", 1.0, [R, R], [R, R, R]),
    (SCALED, "exact", "block", 1.0, [R, R], [R, R, R, R]),
    # backward: tokens of the MLP's gradient, its entrance again for the weights' gradient, the sum to tokens
    (BASE, "sequence", "none", 1.0, [G, S, G, S], [G, G, S, G, G, S]),
    (BASE, "sequence", "norm_act", 1.0, [G, S, G, S], [G, G, S, G, G, S]),
    # run once more: attention's entrance and exit, the MLP's entrance; nothing is gathered a third time
    (BASE, "sequence", "block", 1.0, [G, S, G, S], [G, G, S, G, S, G, S]),
    (SCALED, "sequence", "block", 1.0, [G, S, G, S], [G, G, S, G, S, G, S, S]),
    (PARALLEL, "exact", "none", 1.0, [R], [R]),
    (PARALLEL, "exact", "block", 1.0, [R], [R]),
    (PARALLEL, "sequence", "block", 1.0, [G, S], [G, G, S]),
    (PARALLEL, "sequence", "none", 1.0, [G, S], [G, G, S]),
    (FUSED, "exact", "none", 1.0, [R], [R]),
    (BASE, "partial", "none", 0.5, [("all_reduce", 0.5)] * 2, [("all_reduce", 0.5)] * 2),
    (BASE, "partial", "none", 0.25, [("all_reduce", 0.25)] * 2, [("all_reduce", 0.25)] * 2),
    (BASE, "partial", "block", 0.25, [("all_reduce", 0.25)] * 2, [("all_reduce", 0.25)] * 3),
    (SCALED, "partial", "block", 0.25, [("all_reduce", 0.25)] * 2, [("all_reduce", 0.25)] * 4),
    (BASE, "partial", "none", 0.0, [], []),
    (PARALLEL, "partial", "none", 0.5, [("all_reduce", 0.5)], [("all_reduce", 0.5)]),
]


def all_exchanges() -> list[tuple[list, list]]:
    return [exchanges(kwargs, region, recompute, p) for kwargs, region, recompute, p, *_ in EXCHANGES]


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_block_exchanges_what_the_formula_says(tp_size: int):
    for rank in run_world(all_exchanges, tp_size, timeout_s=240):
        for (_, region, recompute, p, *wanted), found in zip(EXCHANGES, rank, strict=True):
            forward, backward = found
            kinds = (sorted(forward), sorted(backward))
            assert kinds == tuple(map(sorted, wanted)), (region, recompute, p, forward, backward)


def whole_model(region: str, fraction: float) -> tuple[list, list]:
    """The collectives of the whole model beyond those of its one block."""
    import vit_tp

    model = timm.create_model("vit_base_patch16_224", **BASE)
    vit_tp.shard_(model, dist.group.WORLD, region, fraction=fraction)
    with counted() as calls:
        out = model(torch.randn(B, 3, 128, 96))
        forward, calls[:] = list(calls), []
        out.sum().backward()
    return tuple([(name, numel / (B * N * C)) for name, numel in part] for part in (forward, calls))


@pytest.mark.parametrize(
    ("region", "fraction", "ends"),
    [
        ("exact", 1.0, ([], [])),
        ("sequence", 1.0, ([G], [G])),  # united before the head; the embedding's gradient gathered
        ("partial", 0.25, ([R], [R])),  # the mean of the streams; the embedding's gradient
    ],
)
def test_the_ends_of_the_stream_exchange_once(region: str, fraction: float, ends: tuple[list, list]):
    for found in run_world(whole_model, 2, region, fraction):
        inside = next(e[4:] for e in EXCHANGES if e[0] is BASE and e[1:4] == (region, "none", fraction))
        wanted = tuple(sorted(block + end) for block, end in zip(inside, ends))
        assert tuple(map(sorted, found)) == wanted
