"""NaFlex batches, patches of images of many sizes: cut by tp they give stock timm's numbers; pipelines refuse them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.distributed.models import randomise_
from tests.distributed.parity import error
from tests.distributed.tiny import tiny
from tests.tolerances import BLOCK_FLOAT64
from tests.worlds import RankFailed, run_world

NAMES = ["naflexvit_base_patch16_gap", "naflexvit_base_patch16_siglip", "naflexvit_base_patch16_radio_v3"]
GRIDS = [(4, 3), (2, 6), (3, 2)]  # of three images; the last has six patches fewer
MIXED = {"pos_embed": "none", "rope_type": "mixed", "attn_type": "rope"}


def patches() -> dict[str, torch.Tensor]:
    """What timm's NaFlex collator gives for three images of different shapes, patches of 8 x 8 pixels."""
    length = max(rows * columns for rows, columns in GRIDS)
    coords, valid = torch.zeros(len(GRIDS), length, 2, dtype=torch.long), torch.zeros(len(GRIDS), length).bool()
    for index, (rows, columns) in enumerate(GRIDS):
        grid = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        coords[index, : rows * columns] = torch.stack(grid, -1).flatten(0, 1)
        valid[index, : rows * columns] = True
    pixels = torch.randn(len(GRIDS), length, 8 * 8 * 3, generator=torch.Generator().manual_seed(1))
    return {"patches": pixels, "patch_coord": coords, "patch_valid": valid}


def compare(name: str, kwargs: dict) -> float:
    """Largest distance from stock timm of the logits and of every gradient."""
    import vit_tp
    from vit_tp.sharding.placement import placement_of

    torch.set_default_dtype(torch.float64)
    whole, cut = randomise_(tiny(name, **kwargs)).eval(), tiny(name, **kwargs).eval()
    cut.load_state_dict(whole.state_dict())
    vit_tp.shard_(cut, dist.group.WORLD)
    logits = [model(patches()) for model in (whole, cut)]
    for found in logits:
        found.square().sum().backward()
    vit_tp.finish_gradients_(cut)
    distances = [error(logits[1].detach(), logits[0].detach())]
    for theirs, ours in zip(whole.parameters(), cut.parameters(), strict=True):
        if theirs.grad is not None:
            wanted = placement_of(ours).cut(theirs.grad, dist.get_world_size(), dist.get_rank())
            distances.append(error(ours.grad, wanted, 1e-3))
    return max(distances)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kwargs", [{}, MIXED], ids=["as registered", "mixed rope"])
def test_dicts_of_patches_work_on_a_cut_model(name: str, kwargs: dict):
    assert max(run_world(compare, 2, name, kwargs)) <= BLOCK_FLOAT64


def refused(pp: int) -> None:
    """Give a pipeline a NaFlex batch."""
    import vit_tp

    pipe = vit_tp.pipeline(tiny(NAMES[0]), vit_tp.Topology(pp=pp, dp=1, tp=1), F.cross_entropy)
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine = vit_tp.initialize(pipe, config)
    engine.train_batch(iter([(patches(), torch.zeros(3, dtype=torch.long))]))


@pytest.mark.parametrize("pp", [1, 2])
def test_pipelines_refuse_dicts_by_name(pp: int):
    with pytest.raises(RankFailed, match="ConfigError: a pipeline was given a dict; .* vit_tp.shard_, which takes"):
        run_world(refused, pp, pp)


def resizing() -> list[str]:
    """Ask an engine's module for what would make new parameters; return what it says."""
    import vit_tp
    from vit_tp.errors import ConfigError

    pipe = vit_tp.pipeline(tiny("vit_base_patch16_224"), vit_tp.Topology(pp=1, dp=1, tp=1), F.cross_entropy)
    said = []
    for call in (lambda: pipe.set_input_size((48, 48)), lambda: pipe.reset_classifier(3)):
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_a_pipeline_refuses_to_be_resized():
    [[size, head]] = run_world(resizing, 1)
    assert "new position tables" in size and "before vit_tp.pipeline" in size
    assert "new head" in head and "before vit_tp.pipeline" in head
