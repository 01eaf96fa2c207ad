"""parallel.indivisible (P37): what tp does not divide is refused with legal sizes, or kept whole with stock numbers."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import randomise_
from tests.distributed.parity import compare
from tests.distributed.runs import digits_config, train_digits
from tests.distributed.tiny import image_size, tiny
from tests.tolerances import FAMILY_FLOAT64, LOSS_FLOAT32
from tests.worlds import run_world
from vit_tp.errors import ConfigError
from vit_tp.sharding.indivisible import describe_kept
from vit_tp.sharding.matches import plan_cut
from vit_tp.train.preflight import preflight

COMMAND = str(Path(sys.executable).with_name("vit-tp"))

THREE_HEADS = {"embed_dim": 48, "num_heads": 3}
TINY_VIT = {"patch_size": 2, "embed_dim": 24, "depth": 4, "num_heads": 3, "class_token": False, "global_pool": "avg"}
# tp -> model, what makes tp indivisible, modules that are kept whole, of how many that a rule cuts
MODELS = {
    2: [
        ("vit_tiny_patch16_224", {**THREE_HEADS, "qk_norm": True}, 2, 4),
        ("vit_small_patch16_rope_mixed_224", THREE_HEADS, 3, 5),  # the table of rotary frequencies has heads too
        ("vit_small_patch16_rope_224", THREE_HEADS, 2, 4),
        ("beit_base_patch16_224", THREE_HEADS, 2, 4),
        ("vit_relpos_base_patch16_224", THREE_HEADS, 2, 6),  # attention holds its position table
        ("vit_srelpos_small_patch16_224", THREE_HEADS, 3, 5),  # one table for all blocks
        ("xcit_nano_12_p16_224", THREE_HEADS, 4, 8),
        ("tnt_s_patch16_224", {"embed_dim": 48, "num_heads_outer": 3}, 2, 8),
        ("vit_base_patch16_224", {"mlp_ratio": 1 / 32}, 2, 4),  # an MLP of one column, and heads that divide
    ],
    4: [("vit_5b_patch16_sapiens2", {}, 1, 4), ("vit_tiny_patch16_224", {"embed_dim": 36, "num_heads": 6}, 2, 4)],
}


def compare_all(tp_size: int) -> dict[str, dict]:
    """Compare each model on this rank."""
    import vit_tp

    torch.set_default_dtype(torch.float64)
    results = {}
    for name, kwargs, _, _ in MODELS[tp_size]:
        whole, cut = (tiny(name, **kwargs).eval() for _ in range(2))
        x = torch.randn(2, 3, *image_size(name), generator=torch.Generator().manual_seed(1))

        def shard_(model):
            return vit_tp.shard_(model, dist.group.WORLD, indivisible="mlp_only")

        found = compare(randomise_(whole), cut, x, shard_)
        results[name] = {"errors": found.errors, "cut": found.cut, "summed": set(found.partial)}
    return results


@cache
def found(tp_size: int) -> list[dict[str, dict]]:
    return run_world(compare_all, tp_size, tp_size)


CASES = [pytest.param(tp, *model, id=f"tp{tp}-{model[0]}") for tp, models in MODELS.items() for model in models]


@pytest.mark.parametrize(("tp_size", "name", "kwargs", "num_kept", "num_cut"), CASES)
def test_what_is_kept_whole_has_stock_numbers(tp_size: int, name: str, kwargs: dict, num_kept: int, num_cut: int):
    matches = plan_cut(tiny(name, "meta", **kwargs), tp_size, indivisible="mlp_only")
    whole = plan_cut(tiny(name, "meta", **kwargs), 1)
    assert sum(bool(match.kept_whole) for match in matches) == num_kept
    assert sum(match.rule.cuts for match in whole) == num_cut
    for rank, by_name in enumerate(found(tp_size)):
        wrong = {n: e for n, e in by_name[name]["errors"].items() if not e <= FAMILY_FLOAT64}
        assert not wrong, f"rank {rank}: {wrong}"
        assert by_name[name]["cut"] > 0, "the rest is cut all the same"
        kept = tuple(f"{match.name}." for match in matches if match.kept_whole)
        assert not any(n.startswith(kept) for n in by_name[name]["summed"]), "a whole gradient is not summed"


def test_parallel_blocks_are_whole_blocks_and_leave_nothing_to_cut():
    model = {"model__timm": "vit_pwee_patch16_reg1_gap_256", "model__img_size": 32, "model__kwargs": {
        "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3,
    }}  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        preflight(digits_config(**model, parallel__tp=2, parallel__indivisible="mlp_only"))
    assert "parallel.tp=2 divides nothing of VisionTransformer" in str(refused.value)
    assert "Use parallel.tp=1." in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=vit_tiny", "parallel.tp=2"], ["parallel.tp=2 does not divide num_heads=3;", "parallel.tp=1, 3, or"]),
        pytest.param(
            ["model=vit_base", "parallel.tp=8"],
            ["does not divide num_heads=12;", "parallel.tp=1, 2, 3, 4, 6, 12, or"],
            marks=pytest.mark.slow,
        ),
        (
            ["model=vit_tiny", "parallel.tp=7", "parallel.indivisible=mlp_only"],
            ["parallel.tp=7 divides nothing of VisionTransformer (MLP width=768, num_heads=3)", "Use parallel.tp=6."],
        ),
        (["parallel.indivisible=mlponly"], ["refuse, mlp_only", "Did you mean parallel.indivisible=mlp_only?"]),
    ],
    ids=["3 heads", "12 heads", "nothing divides", "unknown"],
)
def test_it_is_refused_where_it_is_typed(overrides: list[str], words: list[str], tmp_path: Path):
    done = subprocess.run([COMMAND, "train", *overrides], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    for word in words:
        assert word in done.stderr
    assert not list(tmp_path.iterdir()), "no rank was started"


def test_the_plan_shows_what_is_whole_and_what_it_costs():
    config = digits_config(model__kwargs=TINY_VIT, parallel__tp=2, parallel__indivisible="mlp_only")
    lines = preflight(config).lines
    [line] = [line for line in lines if line.startswith("whole")]
    assert line.startswith("whole     4 x Attention (num_heads=3): held and computed by every rank; each has ")
    assert not any(line.startswith("whole") for line in preflight(digits_config(parallel__tp=2)).lines)


def test_the_shares_of_the_plan_are_those_of_a_closed_form():
    """ViT-Ti at tp=2: 12 blocks of 148,224 parameters in attention and 295,872 in the MLP, of 5.7 M."""
    model = tiny("vit_tiny_patch16_224", "meta", img_size=224, patch_size=16, embed_dim=192, depth=12, num_heads=3)
    total = sum(p.numel() for p in model.parameters())
    matches = plan_cut(model, 2, indivisible="mlp_only")
    held = total - 12 * 2 * 768 * 192 // 2  # half of fc1 and fc2; biases are small
    text = describe_kept(matches, 2, held, total)
    attention = 12 * (3 * 192 * 192 + 3 * 192 + 192 * 192 + 192)
    assert f"each has {100 * held / total:.0f} % of the parameters" in text
    assert text.endswith(f"instead of {100 * (held - attention / 2) / total:.0f} %")


def test_it_is_how_a_run_is_run_and_not_what_it_learns():
    from vit_tp.config import Config, fingerprint

    changed = Config()
    changed.parallel.indivisible = "mlp_only"
    assert fingerprint(changed) == fingerprint(Config())


@pytest.mark.parametrize("grid", [(1, 1, 2), pytest.param((2, 1, 2), marks=pytest.mark.slow)], ids=["tp2", "pp2 tp2"])
def test_a_run_that_keeps_attention_whole_learns_as_one_process(grid: tuple[int, int, int], tmp_path: Path):
    overrides = {"model__kwargs": TINY_VIT}
    [one] = run_world(train_digits, 1, 1, 1, 1, str(tmp_path / "one"), overrides)
    pp, dp, tp = grid
    many = run_world(
        train_digits, 2 * pp, pp, dp, tp, str(tmp_path / "many"), {**overrides, "parallel__indivisible": "mlp_only"}
    )
    losses = next(rank["losses"] for rank in many if rank["losses"])
    assert losses == pytest.approx(one["losses"], rel=LOSS_FLOAT32)
