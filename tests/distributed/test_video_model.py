"""Video models over tp, pp and both, against the same model whole in one process, in float64.

What the whole model computes is compared with stock timm and with plain attention in tests/unit/test_models_video.py.
"""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.distributed import lanes
from tests.distributed.models import LR, SMALL, randomise_, small_vit
from tests.distributed.parity import Comparison, compare, error
from tests.distributed.stagewise import compare_stages
from tests.distributed.tiny import tiny
from tests.tolerances import BF16_SPREAD, BLOCK_FLOAT64, LANES_FLOAT64, LOSS_FLOAT32
from tests.worlds import run_world

NUM_FRAMES = 6
RICH = {"qk_norm": True, "init_values": 0.5, "reg_tokens": 1, "scale_attn_norm": True}
# Tokens of 3 tubelets of 16 patches: 48 without prefix, 49 with a class token, 50 with a register, or 3 times 17 or 18.
MROPE = {"rope_type": "mrope", "rope_grid_indexing": "ij", "embed_dim": 128, "num_heads": 2}  # heads as wide as timm's
CASES: dict[str, tuple[dict[str, Any] | str, dict[str, Any]]] = {
    "joint": ({}, {}),
    "joint, sincos, no prefix": ({"class_token": False, "global_pool": "avg"}, {"position": "sincos"}),
    "divided": ({}, {"attention": "divided"}),
    "divided, rich": (RICH, {"attention": "divided"}),
    "factorised": ({}, {"attention": "factorised", "time_depth": 2}),
    "factorised, rich": ({**RICH, "global_pool": "avg"}, {"attention": "factorised", "time_depth": 1}),
    "rope": ("eva02_base_patch14_224", {"position": "rope"}),
    "rope of DINOv3": ("vit_small_patch16_dinov3", {"position": "rope"}),
    "rope with learnt frequencies": ("vit_small_patch16_rope_mixed_ape_224", {"position": "rope"}),
    "rope with pairs of time": ("vit_small_patch16_rope_224", {"position": "rope"}),
}
OF_NAME = {"rope with pairs of time": MROPE}
FOUR_HEADS = tuple(name for name in CASES if name not in OF_NAME)
# qkv, its bias and proj, fc1, its bias and fc2 in each block; of Eva's at least five
NUM_CUT = {"joint": 4 * 6, "divided": 4 * 9, "divided, rich": 4 * 9, "factorised": 6 * 6, "factorised, rich": 5 * 6}
FAST = ("joint", "divided, rich", "factorised", "rope")
WAYS = [("exact", "none"), ("exact", "norm_act"), ("sequence", "none"), ("sequence", "norm_act")]


def build(name: str, **kwargs: Any) -> nn.Module:
    """Return a small video model whose every parameter is random, new ones too."""
    import vit_tp

    model, video = CASES[name]
    kwargs = {**OF_NAME.get(name, {}), **kwargs}
    image = tiny(model, **kwargs) if isinstance(model, str) else small_vit(**model, **kwargs)
    return randomise_(vit_tp.video_model(image, NUM_FRAMES, **video).double()).eval()


def clips(number: int = 3) -> Tensor:
    return torch.randn(number, 3, NUM_FRAMES, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def compare_all(names: tuple[str, ...]) -> dict[tuple[str, str, str], Comparison]:
    import vit_tp

    torch.set_default_dtype(torch.float64)
    found = {}
    for name, (region, recompute) in itertools.product(names, WAYS):
        whole = build(name)

        def shard_(model: nn.Module, region: str = region, recompute: str = recompute) -> None:
            vit_tp.shard_(model, dist.group.WORLD, region, recompute=recompute)

        found[name, region, recompute] = compare(whole, copy.deepcopy(whole), clips(), shard_)
    return found


@pytest.mark.parametrize(
    ("tp_size", "names"),
    [
        (2, FAST),
        pytest.param(2, tuple(CASES), marks=pytest.mark.slow),
        pytest.param(4, FOUR_HEADS, marks=pytest.mark.slow),
    ],
    ids=["tp2", "tp2-all", "tp4-all"],
)
def test_cut_video_models_have_the_numbers_of_whole_ones(tp_size: int, names: tuple[str, ...]):
    for rank in run_world(compare_all, tp_size, names, timeout_s=400):
        assert len(rank) == len(names) * len(WAYS)
        for (name, region, recompute), result in rank.items():
            wrong = {what: far for what, far in result.errors.items() if not far <= BLOCK_FLOAT64}
            assert not wrong, (name, region, recompute, wrong)
            assert result.cut >= NUM_CUT.get(name, 2 * 5)
            if region == "sequence":
                assert max(result.partial.values()) > 1e-3, "left unsummed they must be wrong, or nothing is divided"


def compare_piped(pp: int, tp: int, names: tuple[str, ...], ways: list[tuple[str, Any]]) -> dict:
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, (region, recompute) in itertools.product(names, ways):
        found[name, region, recompute] = compare_stages(
            build(name), clips(), pp, tp, region=region, recompute=recompute
        )
    return found


FEW = [("exact", "block"), ("sequence", "norm_act")]
SOME = [("exact", "norm_act"), ("sequence", "none"), ("sequence", "block")]
MANY = list(itertools.product(["exact", "sequence"], ["none", "norm_act", "block", 2]))


@pytest.mark.parametrize(
    ("pp", "tp", "names", "ways"),
    [
        (2, 2, FAST, FEW),
        *(pytest.param(pp, tp, tuple(CASES), MANY, marks=pytest.mark.slow) for pp, tp in [(1, 2), (2, 1)]),
        pytest.param(2, 2, tuple(CASES), SOME, marks=pytest.mark.slow),
    ],
    ids=["few-2x2", "1x2", "2x1", "2x2"],
)
def test_stages_of_video_models_have_the_numbers_of_whole_ones(pp: int, tp: int, names: tuple[str, ...], ways: list):
    for rank in run_world(compare_piped, pp * tp, pp, tp, names, ways, timeout_s=400):
        assert len(rank) == len(names) * len(ways)
        for case, errors in rank.items():
            for what, far in errors.items():
                assert far <= BLOCK_FLOAT64, (case, what)


def train(
    name: str, pp: int, tp: int, schedule: str, region: str = "exact", dtype: str = "fp32", fraction: float = 1.0
) -> list[float]:
    """Train with DeepSpeed for four steps of four micro-batches; return the losses."""
    import vit_tp

    model = build(name, depth=4, drop_path_rate=0.2).float()
    topology = vit_tp.Topology(pp=pp, dp=1, tp=tp)
    pipe = vit_tp.pipeline(model, topology, F.cross_entropy, schedule=schedule, region=region, fraction=fraction)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "bf16": {"enabled": dtype == "bf16"},
    }
    engine, x = vit_tp.initialize(pipe, config), clips(8).float()
    targets = torch.arange(8) % 10
    return [engine.train_batch(iter(list(zip(x.split(2), targets.split(2))))).item() for _ in range(4)]


FAST_TRAININGS = [("divided", "1f1b", "sequence"), ("factorised", "1f1b", "exact")]
TRAININGS = itertools.product(("divided", "factorised", "joint", "rope"), ("1f1b", "dualpipev"), ("exact", "sequence"))


@pytest.mark.parametrize(
    ("name", "schedule", "region"),
    [
        *FAST_TRAININGS,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in TRAININGS if case not in FAST_TRAININGS),
    ],
)
def test_a_grid_trains_a_video_model_like_one_process(name: str, schedule: str, region: str):
    """Drop path falls on whole clips, so it is the same on any grid."""
    [one] = run_world(train, 1, name, 1, 1, "1f1b")
    assert one[-1] < one[0] and len(set(one)) == 4
    for losses in run_world(train, 4, name, 2, 2, schedule, region):
        assert losses == pytest.approx(one, rel=LOSS_FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["joint", "divided", "factorised"])
def test_in_bf16_a_grid_is_as_near_to_fp32_as_one_process(name: str):
    [wanted], [one] = (run_world(train, 1, name, 1, 1, "1f1b", "exact", dtype) for dtype in ("fp32", "bf16"))
    spread = max(abs(a - b) for a, b in zip(one, wanted, strict=True))
    assert 0 < spread < 0.1 and one[-1] < one[0]
    for losses in run_world(train, 4, name, 2, 2, "1f1b", "sequence", "bf16"):
        assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) <= BF16_SPREAD * spread


# -- partial sums, modules kept whole, dropout ------------------------------------------------------------------------

LANES = {
    "joint": ({}, {}),
    "divided": ({"class_token": False, "global_pool": "avg", "init_values": 0.5}, {"attention": "divided"}),
    "factorised": ({"reg_tokens": 1}, {"attention": "factorised", "time_depth": 2}),
}


def against_lanes() -> dict[tuple[str, float], dict[str, float]]:
    """Return this rank's distances of models whose sums are partial, by model and share of the channels."""
    import vit_tp
    from vit_tp.sharding.placement import placement_of

    torch.set_default_dtype(torch.float64)
    found, (rank, size) = {}, (dist.get_rank(), dist.get_world_size())
    for (name, (kwargs, video)), fraction in itertools.product(LANES.items(), (1.0, 0.5, 0.0)):
        whole = randomise_(vit_tp.video_model(small_vit(**kwargs, drop_path_rate=0.4), NUM_FRAMES, **video)).train()
        cut, logits = copy.deepcopy(whole), []
        vit_tp.shard_(cut, dist.group.WORLD, "partial", fraction=fraction)
        for forward in (lambda x, m=whole, p=fraction: lanes.forward(m, x, size, p), cut):
            torch.manual_seed(5)
            logits.append(forward(clips()))
            F.cross_entropy(logits[-1], torch.arange(3)).backward()
        vit_tp.finish_gradients_(cut)
        wanted = {n: p.grad for n, p in whole.named_parameters()}
        floor = 1e-3 * max(grad.abs().max().item() for grad in wanted.values())
        errors = {
            n: error(p.grad, placement_of(p).cut(wanted[n], size, rank), floor) for n, p in cut.named_parameters()
        }
        errors["logits"] = error(logits[1].detach(), logits[0].detach())
        if fraction == 1:
            torch.manual_seed(5)
            errors["all summed"] = error(whole(clips()).detach(), logits[0].detach())
        found[name, fraction] = errors
    return found


def test_partial_sums_equal_lanes_in_one_process():
    """With all channels summed the lanes are the whole model, which proves the oracle."""
    for rank in run_world(against_lanes, 2, timeout_s=240):
        assert len(rank) == 3 * len(LANES)
        for case, errors in rank.items():
            for what, far in errors.items():
                assert far <= LANES_FLOAT64, (case, what)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["joint", "divided", "factorised"])
def test_a_grid_trains_with_partial_sums(name: str):
    ranks = run_world(train, 4, name, 2, 2, "1f1b", "partial", fraction=0.5)
    assert all(losses == ranks[0] and losses[-1] < losses[0] for losses in ranks)


THREE_HEADS = {"embed_dim": 48, "num_heads": 3}


def compare_kept(names: tuple[str, ...]) -> dict[str, Comparison]:
    import vit_tp

    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        whole = build(name, **THREE_HEADS)
        found[name] = compare(
            whole, copy.deepcopy(whole), clips(),
            lambda model: vit_tp.shard_(model, dist.group.WORLD, indivisible="mlp_only"),
        )  # fmt: skip
    return found


def test_heads_that_tp_does_not_divide_are_kept_whole():
    names = ("joint", "divided, rich", "factorised", "rope with learnt frequencies")
    for rank in run_world(compare_kept, 2, names):
        for name, result in rank.items():
            wrong = {what: far for what, far in result.errors.items() if not far <= BLOCK_FLOAT64}
            assert not wrong, (name, wrong)
            assert not any("attn" in what for what in result.partial), "a whole gradient is not summed"
        cut = {name: result.cut for name, result in rank.items() if name in NUM_CUT}
        assert cut == {"joint": 4 * 3, "divided, rich": 4 * 3, "factorised": 6 * 3}, "fc1, its bias and fc2"


DROPS = {"attn_drop_rate": 0.2, "proj_drop_rate": 0.2}  # proj_drop_rate is also the rate inside the MLP
DROPPING = {
    "joint": {"blocks.1.attn": "attn", "blocks.1.mlp": "mlp"},
    "divided": {"blocks.1.attn_time": "attn", "blocks.1.attn": "attn", "blocks.1.mlp": "mlp"},
    "factorised": {"blocks.1.attn": "attn", "time_blocks.0.attn": "attn", "time_blocks.1.mlp": "mlp"},
}


def masks(name: str, is_fused: bool) -> dict[str, list[Tensor]]:
    """Train two steps on tp=2; return where dropouts put zeros, and the losses."""
    import vit_tp

    pipe = vit_tp.pipeline(build(name, **DROPS).float(), vit_tp.Topology(pp=1, dp=1, tp=2), F.cross_entropy)
    modules = {path: part for stage in pipe.stages for path, part in stage.inner.named_modules()}
    seen: dict[str, list[Tensor]] = {}
    for path, kind in DROPPING[name].items():
        if kind == "attn":
            modules[path].fused_attn = is_fused
        for own in ("attn_drop", "proj_drop") if kind == "attn" else ("drop1", "drop2"):
            kept = seen.setdefault(f"{path}.{own}", [])
            modules[path].get_submodule(own).register_forward_hook(
                lambda m, args, out, kept=kept: kept.append(out.detach() == 0)
            )
    engine = vit_tp.initialize(
        pipe, {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": LR}}}
    )
    batch = (clips(2).float(), torch.arange(2))
    seen["losses"] = [engine.train_batch(iter([batch])).detach() for _ in range(2)]
    return seen


@pytest.mark.parametrize(
    "name", ["divided", *(pytest.param(n, marks=pytest.mark.slow) for n in ("joint", "factorised"))]
)
def test_dropout_differs_between_ranks_only_where_activations_are_cut(name: str):
    first, second = run_world(masks, 2, name, False)
    for path, own in first.items():
        assert len(own) == 2 and not torch.equal(own[0], own[1]), f"{path} repeats"
        is_cut = path.endswith(("attn_drop", "drop1"))
        assert any(map(torch.equal, own, second[path])) != is_cut, path
    for rank in run_world(masks, 2, name, True):
        assert all(loss.isfinite() for loss in rank["losses"])
        assert not any(kept for path, kept in rank.items() if path.endswith("attn_drop")), "drawn in the fused kernel"


VIDEO = {"attention": "factorised", "time_depth": 2}


def exported(folder: str) -> dict[str, Tensor]:
    """Write a video model's weights from four ranks; return the whole model's that this rank holds."""
    import vit_tp
    from vit_tp.checkpoint.export import save_weights
    from vit_tp.models.stages import stage_names

    whole = vit_tp.video_model(small_vit(), NUM_FRAMES, **VIDEO)
    pipe = vit_tp.pipeline(randomise_(whole), vit_tp.Topology(2, 1, 2), F.cross_entropy)
    save_weights(Path(folder), pipe.saved_stages, stage_names(whole), pipe.groups, lambda p: p)
    return whole.state_dict()


def test_an_export_says_what_it_is_and_is_read_as_it_was_written(tmp_path):
    from safetensors import safe_open

    from vit_tp.checkpoint.export import VIDEO as KEY
    from vit_tp.checkpoint.export import fill_from
    from vit_tp.checkpoint.pretrained import open_pretrained
    from vit_tp.config import ModelConfig
    from vit_tp.config.schema import VideoConfig
    from vit_tp.errors import CheckpointError
    from vit_tp.models.build import build_model
    from vit_tp.models.stages import stage_names
    from vit_tp.models.weights import FirstWeights, materialise

    wanted = run_world(exported, 4, str(tmp_path))[0]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        video = VideoConfig(**json.loads(file.metadata()[KEY]))
        assert set(file.keys()) == wanted.keys()
    assert video == VideoConfig(NUM_FRAMES, **VIDEO)
    kwargs = {key: value for key, value in SMALL.items() if key not in ("img_size", "num_classes")}
    model = build_model(ModelConfig("vit_tiny_patch16_224", kwargs, 32, video=video), 10, 3)
    fill = fill_from(tmp_path, FirstWeights(0))
    stages = [materialise(model, name, fill) for name in stage_names(model)]
    found = {name: tensor for stage in stages for name, tensor in stage.named_timm_tensors()}
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    for start in (lambda config: open_pretrained(config, 10, 3), lambda config: materialise(model, "head", fill)):
        config = ModelConfig("vit_tiny_patch16_224", kwargs, 32, str(tmp_path / "model.safetensors"), video)
        start(config)
        model.video.position = config.video.position = "sincos"
        with pytest.raises(CheckpointError, match=r"with position=learned, .* Use model\.video\.position=learned"):
            start(config)
        model.video.position = config.video.position = "learned"


def started(pp: int, tp: int, video: dict[str, Any], file: str | None) -> dict[str, Tensor]:
    """Return the whole weights of this rank's stages, as a run starts."""
    import vit_tp
    from vit_tp.checkpoint.pretrained import start_from
    from vit_tp.config import ModelConfig
    from vit_tp.config.schema import VideoConfig
    from vit_tp.models.build import build_model
    from vit_tp.models.weights import FirstWeights
    from vit_tp.sharding.state import full_tensor

    kwargs = {key: value for key, value in SMALL.items() if key not in ("img_size", "num_classes")}
    config = ModelConfig("vit_tiny_patch16_224", kwargs, 32, file, VideoConfig(NUM_FRAMES, **video))
    pipe = vit_tp.pipeline(
        build_model(config, 10, 3), vit_tp.Topology(pp, 1, tp), F.cross_entropy,
        fill=start_from(config, 10, 3, FirstWeights(0)),
    )  # fmt: skip
    return {name: full_tensor(p, p, pipe.groups.tp_group).clone() for name, p in pipe.named_timm_parameters()}


@pytest.mark.parametrize(
    "attention", ["divided", *(pytest.param(name, marks=pytest.mark.slow) for name in ("joint", "factorised"))]
)
def test_an_image_models_weights_are_the_same_on_any_grid(attention: str, tmp_path):
    import vit_tp

    image, file = randomise_(small_vit()), str(tmp_path / "image.safetensors")
    save_file(image.state_dict(), file)
    [first], [one] = (run_world(started, 1, 1, 1, {"attention": attention}, start) for start in (None, file))
    for start, wanted in ((None, first), (file, one)):
        found: dict[str, Tensor] = {}
        for rank in run_world(started, 4, 2, 2, {"attention": attention}, start):
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in rank.items())
            found |= rank
        assert found.keys() == wanted.keys()

    oracle = vit_tp.video_model(copy.deepcopy(image), NUM_FRAMES, attention=attention)
    oracle.load_state_dict(one)  # strictly
    still = torch.randn(2, 3, 1, 32, 32).expand(-1, -1, NUM_FRAMES, -1, -1)
    assert torch.allclose(oracle.eval()(still), image.eval()(still[:, :, 0]), atol=1e-5)
    own = vit_tp.video_model(copy.deepcopy(image), NUM_FRAMES, attention=attention).state_dict()
    assert all(torch.equal(one[name], own[name]) for name in own), "as in a loop of one's own"
    assert torch.equal(one["blocks.0.attn.qkv.weight"], image.blocks[0].attn.qkv.weight)
