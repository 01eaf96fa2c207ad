"""What a rule covers is cut and marked; what it does not cover is refused by name, and nothing was touched."""

from dataclasses import dataclass

import pytest
import timm
import torch
import torch.distributed as dist
from timm.layers import Attention, Mlp, SwiGLUPacked
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

import vit_tp
from vit_tp.errors import ConfigError, ShardRuleError, TopologyError
from vit_tp.sharding.convert import cut_, find_matches, require_divisible
from vit_tp.sharding.layers import GatheredLinear, RowLinear
from vit_tp.sharding.placement import Replicated, Sharded, placement_of
from vit_tp.sharding.rules import REPLICABLE, RULES, rule_for

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 6, "num_classes": 10}
NAMES = [
    "vit_tiny_patch16_224", "vit_giant_patch14_224", "vit_base_patch16_clip_224", "vit_base_patch16_siglip_224",
    "vit_small_patch14_reg4_dinov2", "vit_medium_patch16_gap_240", "deit3_small_patch16_224",
]  # fmt: skip


@dataclass
class Alone:
    """A region of one rank of many that exchanges nothing: enough to cut and to look."""

    tp_size: int
    tp_rank: int = 0
    tp_group: None = None

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor) -> Tensor:
        return x


def build(**kwargs) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model("vit_tiny_patch16_224", **{**SMALL, **kwargs})


def snapshot(model: nn.Module) -> list:
    return [(name, id(p), p.shape, hasattr(p, "placement")) for name, p in model.named_parameters()]


@pytest.fixture(scope="module")
def group_of_one(tmp_path_factory):
    """A gloo world of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_rules_name_every_child_of_timms_models_once(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert type(model) is VisionTransformer
    matches = list(find_matches(model))
    found = [type(match.module) for match in matches]
    assert (found.count(Attention), found.count(Mlp), found.count(Block)) == (len(model.blocks),) * 3
    for match in matches:
        held = [child for child, _ in match.module.named_children()]
        held += [own for own, p in match.module.named_parameters(recurse=False)]
        if type(match.module) is not nn.Sequential:
            assert all(match.rule.names.count(child) == 1 for child in held), match.name
            assert len(set(match.rule.names)) == len(match.rule.names)
    placed = cut_(model, Alone(1))
    assert len(placed) == len(matches)
    assert all(hasattr(parameter, "placement") for parameter in model.parameters())


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"qk_norm": True, "init_values": 0.1, "reg_tokens": 2}, {"global_pool": "map"}, {"act_layer": "prelu"}],
    ids=["plain", "dinov2-like", "siglip-like", "prelu"],
)
@pytest.mark.parametrize("tp_size", [2, 3, 6])
def test_cut_parameters_and_no_others_carry_deepspeeds_flags(kwargs, tp_size):  # P28
    model = build(**kwargs)
    full = {name: p.shape for name, p in model.named_parameters()}
    cut_(model, Alone(tp_size), cut_head_from=10_000)
    cut = ("attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight")
    partial = ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias", "act.weight")
    assert dict(model.named_parameters()).keys() == full.keys()
    for name, parameter in model.named_parameters():
        in_block = name.startswith("blocks.")
        is_cut = in_block and name.endswith(cut)
        assert hasattr(parameter, "model_parallel") == hasattr(parameter, "tensor_model_parallel") == is_cut, name
        assert parameter.numel() == full[name].numel() // (tp_size if is_cut else 1), name
        if not is_cut:
            assert placement_of(parameter) == Replicated(grad_sum=in_block and name.endswith(partial)), name


def test_a_cut_block_has_local_attributes_and_stays_timms():
    model = build()
    cut_(model, Alone(3, tp_rank=1))
    block = model.blocks[0]
    assert type(block.attn) is Attention and type(block.mlp) is Mlp
    assert (block.attn.num_heads, block.attn.head_dim, block.attn.attn_dim) == (2, 8, 16)
    assert isinstance(block.attn.proj, RowLinear) and isinstance(block.mlp.fc2, RowLinear)
    assert (block.attn.qkv.out_features, block.attn.proj.in_features) == (48, 16)
    assert (block.mlp.fc1.out_features, block.mlp.fc2.in_features) == (64, 64)


def test_one_rank_changes_no_module():
    model, stock = build(), build()
    cut_(model, Alone(1))
    assert str(model) == str(stock)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("num_classes", "is_cut"), [(24, True), (23, False), (25, False)])
def test_a_wide_classifier_is_cut_where_tp_divides_it(num_classes, is_cut):
    model = build(num_classes=num_classes)
    cut_(model, Alone(2), cut_head_from=24)
    assert isinstance(model.head, GatheredLinear) == is_cut
    assert isinstance(placement_of(model.head.weight), Sharded) == is_cut


class MyAttention(Attention):
    """A subclass, which may hold anything."""


class MyBlock(Block):
    """A subclass, which may hold anything."""


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"mlp_layer": SwiGLUPacked}, r"GluMlp \(blocks\.0\.mlp\)"),
        ({"attn_layer": MyAttention}, r"MyAttention \(blocks\.0\.attn\)"),
        ({"block_fn": MyBlock}, r"MyBlock \(blocks\.0\)"),
        ({"attn_layer": "diff"}, r"DiffAttention \(blocks\.0\.attn\)"),
    ],
    ids=["swiglu", "subclass of attention", "subclass of block", "diff"],
)
def test_a_class_without_a_rule_is_refused_by_name(kwargs, named):
    model = build(**kwargs)
    before = snapshot(model)
    with pytest.raises(ShardRuleError, match=named) as caught:
        cut_(model, Alone(2))
    text = str(caught.value)
    assert "has no sharding rule" in text and "Attention, Block, Mlp, VisionTransformer" in text
    assert "Use parallel.tp=1" in text and snapshot(model) == before


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("vit_giant_patch14_dinov2", r"GluMlp \(blocks\.0\.mlp\)"),
        ("vit_base_patch16_rpn_224", r"ResPostBlock \(blocks\.0\)"),
        ("deit_tiny_distilled_patch16_224", r"VisionTransformerDistilled \(the model\)"),
        ("eva02_tiny_patch14_224", r"Eva \(the model\)"),
        ("resnet18", r"ResNet \(the model\)"),
    ],
)
def test_registered_models_without_a_rule_are_refused_by_name(name, named):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ShardRuleError, match=named):
        list(find_matches(model))


def add_child(attention: nn.Module) -> None:
    attention.relative_bias = nn.Linear(2, 2)


def add_buffer(attention: nn.Module) -> None:
    attention.register_buffer("mask", torch.zeros(3))


def add_parameter(attention: nn.Module) -> None:
    attention.temperature = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("extend", "name"), [(add_child, "relative_bias"), (add_buffer, "mask"), (add_parameter, "temperature")]
)
def test_what_a_rule_does_not_name_is_refused_by_name(extend, name):
    model = build()
    extend(model.blocks[1].attn)
    before = snapshot(model)
    with pytest.raises(ShardRuleError, match=rf"Attention \(blocks\.1\.attn\) does not name {name} exactly once"):
        cut_(model, Alone(2))
    assert snapshot(model) == before  # blocks.0 was fine, and is not cut either


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [({"scale_attn_norm": True}, "blocks.0.attn.norm"), ({"scale_mlp_norm": True}, "blocks.0.mlp.norm")],
)
def test_a_norm_over_the_cut_axis_is_refused_with_the_reason(kwargs, named):
    with pytest.raises(ShardRuleError) as caught:
        cut_(build(**kwargs), Alone(2))
    text = str(caught.value)
    assert text.startswith(f"{named} (LayerNorm) cannot be cut: its mean and variance span the cut axis")
    assert "Use parallel.tp=1" in text


def test_a_replicated_child_of_an_unknown_class_is_refused():
    model = build()
    model.norm = nn.BatchNorm1d(48, device="meta")
    with pytest.raises(ShardRuleError, match="norm is a BatchNorm1d, which is not known to be replicable"):
        cut_(model, Alone(2))


@pytest.mark.parametrize("tp_size", [4, 5, 12])
def test_a_tp_that_does_not_divide_names_the_numbers_and_the_legal_sizes(tp_size):
    model = build()
    before = snapshot(model)
    with pytest.raises(TopologyError) as caught:
        cut_(model, Alone(tp_size))
    text = str(caught.value)
    assert f"parallel.tp={tp_size} does not divide" in text and "num_heads=6" in text
    assert ("MLP width=192" in text) == bool(192 % tp_size)
    assert text.endswith("Use parallel.tp=1, 2, 3, 6.") and snapshot(model) == before
    require_divisible(list(find_matches(model)), 6)


@pytest.mark.parametrize("module", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Identity()])
def test_a_bare_layer_is_not_cut_by_guess(module):
    with pytest.raises(ShardRuleError, match="has no sharding rule"):
        rule = next(find_matches(module)).rule
        [rule_for(getattr(module, child), child) for child in rule.walk]


@pytest.mark.parametrize("build_empty", [lambda: nn.Sequential(), lambda: build(depth=0)], ids=["empty", "no blocks"])
def test_a_model_with_nothing_to_cut_is_refused(build_empty, group_of_one):  # P41
    with pytest.raises(ShardRuleError, match="can be cut; tensor parallelism would only copy it"):
        vit_tp.shard_(build_empty(), group_of_one)


def test_shard_refuses_a_second_cut_and_an_unknown_region(group_of_one):
    model = build()
    with pytest.raises(ConfigError, match="region='fast' is not known. Use one of exact"):
        vit_tp.shard_(model, group_of_one, "fast")
    assert vit_tp.shard_(model, group_of_one) is model
    with pytest.raises(ShardRuleError, match="cut already"):
        vit_tp.shard_(model, group_of_one)


def test_the_table_holds_whole_classes_of_timm():
    for kind, rule in RULES.items():
        assert kind.__module__.startswith("timm.") and kind not in REPLICABLE
        assert len(set(rule.names)) == len(rule.names)
        assert bool(rule.row) == bool(rule.divides) == bool(rule.column)
