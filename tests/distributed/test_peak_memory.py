"""The estimated peak of a rank against what a rank that trains really takes."""

from __future__ import annotations

import ctypes
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import vit_tp
from tests import tolerances
from tests.worlds import run_world
from vit_tp.config import OptimizerConfig
from vit_tp.models.build import input_shape
from vit_tp.models.costs import stage_bounds
from vit_tp.models.dtypes import DTYPES
from vit_tp.plan.held import optimizer_cost
from vit_tp.plan.peak import RankPeak, plan_peaks
from vit_tp.plan.profiles import Layout, Profiler
from vit_tp.sharding.cutting import Cutting

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Case:
    """One run. `model` are arguments of timm's VisionTransformer, `video` of what makes it a model of clips."""

    model: dict[str, Any]
    micro_batch_size: int = 2
    grad_accum_steps: int = 1
    pp: int = 1
    dp: int = 1
    tp: int = 1
    region: str = "exact"
    recompute: str | int = "none"
    dtype: str = "fp32"
    freeze: tuple[str, ...] = ()
    cls: str = "vit_tiny_patch16_224"
    video: dict[str, Any] | None = None

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def build(self) -> torch.nn.Module:
        with torch.device("meta"):
            model = timm.create_model(self.cls, **self.model)
        return model if self.video is None else vit_tp.video_model(model, **self.video)


def estimate(case: Case, counts_untouched: bool) -> list[RankPeak]:
    model, dtype = case.build(), DTYPES[case.dtype]
    bounds = stage_bounds(model, case.pp)
    layout = Layout(case.micro_batch_size, case.tp, dtype, Cutting(case.region, recompute=case.recompute))
    profiles = Profiler(model, case.freeze).profile(layout, bounds[:-1])
    cost = optimizer_cost(OptimizerConfig())
    return plan_peaks(profiles, bounds, case.grad_accum_steps, case.dp, dtype, cost, counts_untouched)


WARM = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}


def trainer(case: Case) -> Callable[[], None]:
    """Build this rank's engine; return what trains it one step."""
    from vit_tp.recipe.optimizer import is_frozen

    model = case.build()
    for name, param in model.named_parameters():
        param.requires_grad_(not is_frozen(name, case.freeze))
    topology = vit_tp.Topology(pp=case.pp, dp=case.dp, tp=case.tp)
    loss = torch.nn.functional.cross_entropy
    pipe = vit_tp.pipeline(model, topology, loss, region=case.region, recompute=case.recompute)
    engine = vit_tp.initialize(
        pipe,
        {
            "train_micro_batch_size_per_gpu": case.micro_batch_size,
            "gradient_accumulation_steps": case.grad_accum_steps,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": case.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
    )

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        shape, is_first = input_shape(model, case.micro_batch_size), topology.coordinates(dist.get_rank()).pp == 0
        for _ in range(case.grad_accum_steps):
            images = torch.rand(shape) if is_first else torch.empty(0)
            yield images, torch.zeros(case.micro_batch_size, dtype=torch.long)

    return lambda: engine.train_batch(batches())


def measured_by_the_kernel(case: Case) -> int:
    """Train two steps on this rank; return by how many bytes its pages grew at most in the second.

    glibc is told to map each tensor by itself and to give it back as it is freed. Left alone it would raise the size
    from which it does so with each tensor that is freed, and keep what is smaller: pages of nobody. A small model is
    trained first, so that the libraries' own pages are there before.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024) and libc.mallopt(M_TRIM_THRESHOLD, 64 * 1024)
    warm = trainer(replace(case, model=WARM))
    warm()
    del warm
    before = _resident(libc)
    train = trainer(case)
    train()  # the optimizer makes its state, the engine its buffers
    _resident(libc)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    train()
    return _status_bytes("VmHWM") - before


def _resident(libc: ctypes.CDLL) -> int:
    gc.collect()
    libc.malloc_trim(0)
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


class Seen(TorchDispatchMode):
    """Adds up what operations of a real run return until it is freed: another count than the plan's, by address."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self.alive:
            self.alive[address] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, address, None)
            self.peak = max(self.peak, sum(self.alive.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        torch.utils._pytree.tree_map_only(torch.Tensor, self.note, out)
        return out

    def note_all(self) -> int:
        """Add what there is already; return the bytes of all that is alive."""
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a module of torch warns when it is asked for its type
            for found in [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]:
                self.note(found)
        return sum(self.alive.values())


def seen_by_a_tracker(cases: list[Case]) -> list[int]:
    """Train two steps of each case on this rank; return the most bytes of tensors alive in the second."""
    peaks = []
    for case in cases:
        before = Seen().note_all()
        train = trainer(case)
        train()  # the optimizer makes its state, the engine its buffers
        seen = Seen()
        seen.note_all()
        with seen:
            train()
        peaks.append(seen.peak - before)
        del train, seen
    return peaks


SHAPES = {
    "1024 tokens": Case(
        {"img_size": 512, "embed_dim": 96, "depth": 3, "num_heads": 4, "num_classes": 10, "class_token": False}
        | {"global_pool": "avg"}
    ),
    "1000 classes": Case(
        {"img_size": 224, "embed_dim": 192, "depth": 3, "num_heads": 4, "num_classes": 1000, "qk_norm": True}
        | {"init_values": 0.1, "reg_tokens": 4, "drop_path_rate": 0.2},
        micro_batch_size=8,
    ),
    "rotary, gated": Case(
        {"img_size": 224, "patch_size": 14, "embed_dim": 96, "depth": 4, "num_heads": 4, "num_classes": 100},
        cls="eva02_tiny_patch14_224",
        micro_batch_size=4,
    ),
}
CLIPS = {
    "clips, divided": Case(
        {"img_size": 128, "embed_dim": 192, "depth": 3, "num_heads": 4, "num_classes": 100, "drop_path_rate": 0.2},
        video={"num_frames": 16, "attention": "divided"},
    ),
    "clips, factorised": Case(
        {"img_size": 128, "embed_dim": 192, "depth": 3, "num_heads": 4, "num_classes": 100},
        video={"num_frames": 16, "attention": "factorised", "position": "sincos"},
    ),
}
VARIANTS = {
    "one rank": {},
    "tp=2": {"tp": 2},
    "sequence": {"tp": 2, "region": "sequence"},
    "recompute=block": {"recompute": "block"},
    "recompute=norm_act": {"recompute": "norm_act", "tp": 2, "region": "sequence"},
    "1F1B": {"pp": 2, "grad_accum_steps": 3},
    "accumulation, ZeRO-1": {"grad_accum_steps": 3, "dp": 2},
    "bf16, ZeRO-1": {"grad_accum_steps": 2, "dp": 2, "dtype": "bf16"},
    "frozen": {"freeze": ("patch_embed.*", "*.qkv.*", "blocks.0.*"), "grad_accum_steps": 2},
}


OFTEN = ("one rank", "sequence")
SLOW = pytest.mark.slow


@pytest.mark.parametrize("variant", [*OFTEN, *(pytest.param(v, marks=SLOW) for v in VARIANTS if v not in OFTEN)])
def test_the_estimate_is_what_lives_in_a_real_step(variant):
    """Three shapes: forward, backward, averaging and update, with the engine's own buffers."""
    cases = [replace(case, **VARIANTS[variant]) for case in SHAPES.values()]
    found = run_world(seen_by_a_tracker, cases[0].world_size, cases)
    for index, case in enumerate(cases):
        for stage, peak in enumerate(estimate(case, counts_untouched=True)):
            seen = found[stage * case.dp * case.tp][index]
            assert peak.peak_bytes == pytest.approx(seen, rel=tolerances.PEAK_TENSORS), (list(SHAPES)[index], stage)


@pytest.mark.parametrize(
    "variant", ["one rank", pytest.param("recompute=norm_act", marks=SLOW), pytest.param("sequence", marks=SLOW)]
)
def test_the_estimate_of_clips_is_no_less_than_what_lives(variant):
    """Where tokens are folded, the plan counts copies that a real step has let go of already."""
    cases = [replace(case, **VARIANTS[variant]) for case in CLIPS.values()]
    found = run_world(seen_by_a_tracker, cases[0].world_size, cases)
    for index, case in enumerate(cases):
        for stage, peak in enumerate(estimate(case, counts_untouched=True)):
            share = peak.peak_bytes / found[stage * case.dp * case.tp][index]
            assert 1 - tolerances.PEAK_TENSORS <= share <= 1 + tolerances.PEAK_CLIPS, (list(CLIPS)[index], stage)


LONG = {"img_size": 512, "embed_dim": 384, "depth": 4, "num_heads": 6, "num_classes": 10, "class_token": False}
LONG |= {"global_pool": "avg"}  # 1024 tokens
WIDE = {"img_size": 224, "embed_dim": 768, "depth": 3, "num_heads": 12, "num_classes": 1000}
LARGE = {
    "1024 tokens": Case(LONG | {"depth": 2}, micro_batch_size=4),
    "1024 tokens, four blocks": Case(LONG, micro_batch_size=4),
    "1024 tokens, tp=2": Case(LONG, micro_batch_size=4, tp=2),
    "1024 tokens, sequence": Case(LONG, micro_batch_size=4, tp=2, region="sequence"),
    "1024 tokens, recompute=block": Case(LONG, micro_batch_size=4, recompute="block"),
    "ViT-B blocks": Case(WIDE, micro_batch_size=16),
    "ViT-B blocks, one sample": Case(WIDE, micro_batch_size=1),
    "ViT-B blocks, bf16": Case(WIDE, micro_batch_size=16, dtype="bf16"),
    "ViT-B blocks, 1F1B": Case(WIDE, micro_batch_size=16, pp=2, grad_accum_steps=4),
    "2304 tokens": Case(LONG | {"img_size": 768, "depth": 3}, micro_batch_size=2),
}


@pytest.mark.parametrize(
    "name", [name if not index else pytest.param(name, marks=SLOW) for index, name in enumerate(LARGE)]
)
def test_the_estimate_is_what_the_kernel_counts(name):
    """Pages of a process in a real world, of shapes large enough that tensors are most of them."""
    case = LARGE[name]
    found = run_world(measured_by_the_kernel, case.world_size, case, timeout_s=300)
    for stage, peak in enumerate(estimate(case, counts_untouched=False)):
        pages = found[stage * case.dp * case.tp]
        print(f"{name} stage {stage}: {peak.peak_bytes / 1e6:.0f} MB, seen {pages / 1e6:.0f} MB, {peak.moment}")
        assert peak.peak_bytes == pytest.approx(pages, rel=tolerances.PEAK_PAGES)
