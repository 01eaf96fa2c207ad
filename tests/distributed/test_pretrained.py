"""A run that starts from a timm checkpoint, cut and laid out over ranks, against stock timm with the same file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.distributed.models import RICH, batches, own_micro_batches, randomise_, small_vit
from tests.distributed.runs import DIGITS_VIT, digits_config, eval_digits, train_digits
from tests.distributed.test_runs import stock_figures
from tests.distributed.test_training_parity import merged
from tests.tolerances import LOSS_FLOAT32
from tests.worlds import RankFailed, run_world

VIT = "vit_tiny_patch16_224"


def saved(model: nn.Module, path: Path) -> str:
    save_file(model.state_dict(), path) if path.suffix == ".safetensors" else torch.save(model.state_dict(), path)
    return str(path)


def assembled(pp: int, tp: int, overrides: dict) -> dict:
    """Assemble a training as `vit-tp train` does and evaluate it before its first step; return its whole weights."""
    from vit_tp.parallel.topology import Topology
    from vit_tp.sharding.state import full_tensor
    from vit_tp.train.assemble import assemble
    from vit_tp.train.communication import start_communication
    from vit_tp.train.engine import full_precision
    from vit_tp.train.evaluate import evaluate

    config = digits_config(**overrides, parallel__pp=pp, parallel__dp=1, parallel__tp=tp)
    run = assemble(config, Topology(pp, 1, tp), start_communication())
    pipe, masters = run.engine.module, full_precision(run.engine)
    weights = {n: full_tensor(p, masters(p), run.groups.tp_group).clone() for n, p in pipe.named_timm_parameters()}
    return {"weights": weights, "figures": evaluate(run)}


def loaded_by_timm(file: str, classes: int, **kwargs) -> nn.Module:
    overlay = {"file": file, "num_classes": classes}
    return timm.create_model(VIT, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)


DIGITS = {"img_size": 8, "num_classes": 10, "in_chans": 1, **DIGITS_VIT}
FILES = {
    "same.safetensors": {},
    "same.pth": {},
    "other_classes_and_4x_larger_grid.safetensors": {"num_classes": 7, "img_size": 4},
    "three_channels.pth": {"in_chans": 3},
    "other_classes_and_patches.pth": {"num_classes": 7, "patch_size": 4},
}


@pytest.mark.parametrize("file", FILES)
def test_a_cut_run_starts_where_stock_timm_would(file, tmp_path):
    """P35, P64, P76: merged weights to the bit, logits of the whole validation set, on tp=2 x pp=2."""
    there = {**DIGITS, **FILES[file]}
    path = saved(randomise_(timm.create_model(VIT, **there)), tmp_path / file)
    ranks = run_world(assembled, 4, 2, 2, {"model__pretrained": path})
    found = merged(ranks, "weights")
    stock = loaded_by_timm(path, there["num_classes"], **DIGITS)
    wanted = stock.state_dict()
    if there["num_classes"] != 10:
        drawn = merged(run_world(assembled, 1, 1, 1, {}), "weights")
        wanted = {**wanted, **{name: drawn[name] for name in ("head.weight", "head.bias")}}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    stock.load_state_dict(found, strict=True)
    figures = stock_figures(stock.eval())
    for rank in ranks:
        assert rank["figures"]["eval/loss"] == pytest.approx(figures["eval/loss"], rel=LOSS_FLOAT32)
        assert rank["figures"]["eval/top1"] == pytest.approx(figures["eval/top1"])


def test_a_finished_run_is_evaluated_by_its_own_weights(tmp_path):
    """The file that it started from may be gone."""
    path = saved(randomise_(timm.create_model(VIT, **DIGITS)), tmp_path / "vit.safetensors")
    overrides = {"model__pretrained": path, "recipe__max_steps": 3}
    trained = run_world(train_digits, 4, 2, 1, 2, str(tmp_path), overrides, export=True)[0]["figures"]
    os.unlink(path)
    found = run_world(eval_digits, 2, 2, 1, 1, str(tmp_path), overrides)[0]
    assert found["eval/loss"] == pytest.approx(trained["eval/loss"], rel=LOSS_FLOAT32)
    assert found["eval/top1"] == trained["eval/top1"]


def test_training_goes_on_from_the_file_and_not_from_masters_made_before_it(tmp_path):
    """P35, P65: after a step that moves nothing, the export is the file."""
    model = randomise_(timm.create_model(VIT, **DIGITS))
    path = saved(model, tmp_path / "vit.pth")
    still = {"model__pretrained": path, "recipe__max_steps": 1, "recipe__optimizer__lr": 1e-30}
    run_world(train_digits, 4, 2, 1, 2, str(tmp_path), still, export=True)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == model.state_dict().keys()
    assert all(torch.allclose(exported[n], t, rtol=0, atol=1e-20) for n, t in model.state_dict().items())


def step_of_zero(path: str, dtype: str) -> dict[str, Tensor]:
    """Take one step at lr=0 in a loop of one's own; return masters and weights of this rank."""
    import vit_tp
    from vit_tp.checkpoint.pretrained import start_from
    from vit_tp.config import ModelConfig
    from vit_tp.models.weights import FirstWeights
    from vit_tp.sharding.state import full_tensor
    from vit_tp.train.engine import full_precision

    model = ModelConfig(
        VIT, {key: value for key, value in RICH.items() if key not in ("img_size", "num_classes")}, 32, path
    )
    fill = start_from(model, 10, 3, FirstWeights(7))
    pipe = vit_tp.pipeline(
        small_vit("meta", **RICH), vit_tp.Topology(pp=2, dp=1, tp=1), torch.nn.functional.cross_entropy, fill=fill
    )
    engine = vit_tp.initialize(
        pipe,
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "bf16": {"enabled": dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.05}},
        },
    )
    images, targets = batches(1, 8)[0]
    engine.train_batch(iter(own_micro_batches(images, targets, 0, 1, 2)))
    masters, group = full_precision(engine), pipe.groups.tp_group
    return {
        "masters": {n: full_tensor(p, masters(p), group).clone() for n, p in pipe.named_timm_parameters()},
        "weights": {n: full_tensor(p, p, group).float().clone() for n, p in pipe.named_timm_parameters()},
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_of_zero_leaves_weights_and_masters_as_the_file_has_them(dtype, tmp_path):
    """P65, with a `fill` for `vit_tp.pipeline`."""
    model = randomise_(small_vit(**RICH))
    ranks = run_world(step_of_zero, 2, saved(model, tmp_path / "vit.safetensors"), dtype)
    for kind in ("masters", "weights"):
        found = merged(ranks, kind)
        assert found.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert torch.equal(found[name], tensor.bfloat16().float() if dtype == "bf16" else tensor), (kind, name)


def test_a_rank_refuses_a_file_that_was_changed_under_it(tmp_path):
    """Ranks check for themselves what was checked before they started."""
    state = timm.create_model(VIT, **DIGITS).state_dict()
    del state["blocks.1.norm1.bias"]
    torch.save(state, tmp_path / "vit.pth")
    with pytest.raises(RankFailed, match="1 missing: blocks.1.norm1.bias"):
        run_world(assembled, 2, 2, 1, {"model__pretrained": str(tmp_path / "vit.pth")})


WIDE = {"embed_dim": 1024, "depth": 8, "num_heads": 16}  # 102 M parameters, 0.41 GB


def bytes_to_start(path: str, pp: int, tp: int) -> dict[str, int]:
    """Lay out a large file over the world; return how much memory this rank needed for it, and holds, in bytes."""
    import gc

    import vit_tp
    from vit_tp.checkpoint.pretrained import start_from
    from vit_tp.config import ModelConfig
    from vit_tp.models.build import build_model
    from vit_tp.models.weights import FirstWeights

    config = ModelConfig(VIT, WIDE, 32, path)
    model = build_model(config, 10, 3)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory()
    fill = start_from(config, 10, 3, FirstWeights(0))
    opened = memory()
    pipe = vit_tp.pipeline(model, vit_tp.Topology(pp, 1, tp), torch.nn.functional.cross_entropy, fill=fill)
    after = memory()
    assert all((p == 0.5).all() for p in pipe.parameters())
    return {
        "opened": opened["VmRSS"] - before["VmRSS"],
        "peak": after["VmHWM"] - before["VmHWM"],
        "held": after["RssAnon"] - before["RssAnon"],
        "own": sum(p.numel() * 4 for p in pipe.parameters()),
    }


def memory() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[0][:2] in ("Vm", "Rs")}


@pytest.mark.parametrize(("pp", "tp", "suffix", "share"), [(4, 1, ".safetensors", 0.75), (2, 2, ".pth", 0.95)])
def test_no_rank_holds_the_whole_model(pp, tp, suffix, share, tmp_path):
    """Pages of the mapped file are counted in the peak, though the kernel may take them back at any time."""
    with torch.device("meta"):
        model = timm.create_model(VIT, img_size=32, num_classes=10, **WIDE)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    path = saved(model, tmp_path / f"wide{suffix}")
    del model
    whole = Path(path).stat().st_size
    for rank in run_world(bytes_to_start, 4, path, pp, tp):
        assert rank["opened"] < 0.05 * whole, rank
        assert rank["held"] < rank["own"] + 0.15 * whole < 0.5 * whole, rank
        assert rank["peak"] < share * whole, rank
