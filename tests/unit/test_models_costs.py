"""What a stage costs: exact parameters, FLOPs by the closed formula, boundaries from either."""

import pytest
import torch

from vit_tp.config import ModelConfig
from vit_tp.errors import ConfigError
from vit_tp.models.build import build_model
from vit_tp.models.costs import stage_bounds, stage_flops, stage_parameters
from vit_tp.models.stages import stage_names
from vit_tp.models.weights import record

C, L, K, P, N = 48, 4, 11, 8, 16  # width, depth, classes, patch side, patches


def model(**kwargs):
    small = {"embed_dim": C, "depth": L, "num_heads": 3, "patch_size": P, "class_token": False, "global_pool": "avg"}
    return build_model(ModelConfig("vit_tiny_patch16_224", {**small, **kwargs}, img_size=32), K, in_chans=3)


def test_parameters_are_exact():
    block = 12 * C * C + 13 * C
    embed = P * P * 3 * C + C + N * C
    head = 2 * C + C * K + K
    assert stage_parameters(model()) == [embed, *[block] * L, head]
    rich = model(class_token=True, reg_tokens=2, qk_norm=True, init_values=0.1, global_pool="map")
    assert sum(stage_parameters(rich)) == sum(p.numel() for p in rich.parameters())


def test_flops_are_those_of_the_closed_formula():
    embed, *blocks, head = stage_flops(model())
    assert blocks == [24 * N * C**2 + 4 * N**2 * C] * L
    assert embed == 2 * N * C * 3 * P**2
    assert head == 2 * C * K


def test_prefix_tokens_count_in_blocks_and_not_in_the_embedding():
    embed, *blocks, _ = stage_flops(model(class_token=True, reg_tokens=3))
    n = N + 4
    assert embed == 2 * N * C * 3 * P**2 and blocks == [24 * n * C**2 + 4 * n**2 * C] * L


@pytest.mark.parametrize("by", ["parameters", "flops"])
def test_boundaries_balance_what_is_asked(by):
    whole = model()
    assert stage_bounds(whole, 2, by) == [0, 3, 6]
    assert stage_bounds(whole, 4, by) == [0, 2, 3, 4, 6]


def test_a_weight_moves_blocks_away_from_its_end():
    assert stage_bounds(model(), 2, "flops", embed_weight=2.0, head_weight=0.0) == [0, 2, 6]
    assert stage_bounds(model(), 2, "flops", embed_weight=0.0, head_weight=2.0) == [0, 4, 6]


def test_a_list_lays_out_blocks_as_it_says():
    assert stage_bounds(model(), 2, [0, 3]) == [0, 4, 6]
    assert stage_names(model())[4:] == ["blocks.3", "head"]


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ConfigError, match="Use parallel.pp=4 or less"):
        stage_bounds(model(), 5)
    with pytest.raises(ConfigError, match="those of Linear are not one list of them"):
        stage_bounds(torch.nn.Linear(2, 2), 2)


def test_counting_leaves_the_model_as_it_was():
    """ConVit's forward replaces a buffer; first weights of the larger one would be zeros, and its positions lost."""
    convit = build_model(ModelConfig("convit_tiny", {"depth": 2, "local_up_to_layer": 1}, img_size=32), K, in_chans=3)
    before = {name: buffer for name, buffer in convit.named_buffers()}
    stage_flops(convit)
    assert before and all(buffer is before[name] for name, buffer in convit.named_buffers())


def test_a_model_that_has_run_on_meta_has_no_first_weights():
    convit = build_model(ModelConfig("convit_tiny", {"depth": 2, "local_up_to_layer": 1}, img_size=32), K, in_chans=3)
    convit(torch.empty(1, 3, 32, 32, device="meta"))
    with pytest.raises(ConfigError, match=r"blocks\.0\.attn\.rel_indices of this ConVit on meta are not as"):
        record(convit)
