"""What a rule covers is cut and marked; what it does not cover is refused by name, and nothing was touched."""

import pytest
import timm
import torch
import torch.distributed as dist
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

import vit_tp
from vit_tp.errors import ConfigError, ShardRuleError, TopologyError
from vit_tp.parallel.groups import StandIn
from vit_tp.parallel.regions import ExactRegion
from vit_tp.sharding.classifier import ColumnLinear, GatheredLinear, is_classifier_cut, require_classifier
from vit_tp.sharding.convert import cut_
from vit_tp.sharding.cutting import Cutting
from vit_tp.sharding.edits import edit_
from vit_tp.sharding.layers import RowLinear
from vit_tp.sharding.matches import legal_tp_sizes, plan_cut
from vit_tp.sharding.placement import Replicated, Sharded, placement_of
from vit_tp.sharding.rule import Edit, ShardRule, require_covered
from vit_tp.sharding.rules import REPLICABLE, RULES, register_rule

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 6, "num_classes": 10}
NAMES = [
    "vit_tiny_patch16_224", "vit_giant_patch14_224", "vit_base_patch16_clip_224", "vit_base_patch16_siglip_224",
    "vit_small_patch14_reg4_dinov2", "vit_medium_patch16_gap_240", "deit3_small_patch16_224",
]  # fmt: skip


def Alone(tp_size: int, tp_rank: int = 0) -> ExactRegion:
    """Return the region of one rank of many that exchanges nothing: enough to cut and to look."""
    return ExactRegion(StandIn(tp_size, tp_rank))


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
    matches = plan_cut(model, 1)
    found = [type(match.module) for match in matches]
    assert (found.count(Attention), found.count(Mlp), found.count(Block)) == (len(model.blocks),) * 3
    for match in matches:
        held = [child for child, _ in match.module.named_children()]
        held += [own for own, p in match.module.named_parameters(recurse=False)]
        if type(match.module) in RULES:
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
    cut_(model, Alone(tp_size), Cutting(cut_head_from=10_000))
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


@pytest.mark.parametrize(("num_classes", "is_cut", "held"), [(24, True, 12), (23, False, 23), (25, True, 13)])
@pytest.mark.parametrize("gather_logits", [True, False])
def test_a_wide_classifier_is_cut_whatever_tp(num_classes, is_cut, held, gather_logits):
    model = build(num_classes=num_classes)
    assert is_classifier_cut(plan_cut(model, 2), 2, 24) == is_cut
    assert not is_classifier_cut(plan_cut(model, 1), 1, 24)
    cut_(model, Alone(2, tp_rank=1), Cutting(cut_head_from=24, gather_logits=gather_logits))
    if not gather_logits:  # whoever takes columns gets them, however few classes there are
        is_cut, held = True, -(-num_classes // 2)
    assert (type(model.head) is (GatheredLinear if gather_logits else ColumnLinear)) == is_cut
    assert isinstance(placement_of(model.head.weight), Sharded) == is_cut
    assert model.head.out_features == len(model.head.weight) == len(model.head.bias) == held
    assert model.num_classes == num_classes


@pytest.mark.parametrize("name", ["samvit_base_patch16", "crossvit_9_240", "vit_tiny_patch16_224"])
def test_logits_that_no_rule_cuts_cannot_be_left_ungathered(name):
    with torch.device("meta"):
        model = timm.create_model(name, **({"num_classes": 0} if name.startswith("vit_") else {}))
    with pytest.raises(ShardRuleError, match="gather_logits=False, but .* has no linear classifier"):
        require_classifier(model, plan_cut(model, 1))


class MyAttention(Attention):
    """A subclass, which may hold anything."""


class MyBlock(Block):
    """A subclass, which may hold anything."""


class MyMlp(Mlp):
    """A subclass, which may hold anything."""


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"mlp_layer": MyMlp}, r"MyMlp \(blocks\.0\.mlp\)"),
        ({"attn_layer": MyAttention}, r"MyAttention \(blocks\.0\.attn\)"),
        ({"block_fn": MyBlock}, r"MyBlock \(blocks\.0\)"),
    ],
    ids=["mlp", "attention", "block"],
)
def test_a_class_without_a_rule_is_refused_with_what_is_not_covered(kwargs, named):
    model = build(**kwargs)
    before = snapshot(model)
    with pytest.raises(ShardRuleError, match=named) as caught:
        cut_(model, Alone(2))
    text = str(caught.value)
    assert (
        "has no sharding rule, so " in text
        and ".weight" in text
        and "vit_tp.register_rule" in text
        and snapshot(model) == before
    )


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny_patch4_window7_224", "maxvit_tiny_tf_224", "mobilevit_xs"])
def test_models_of_other_kinds_are_refused_in_one_sentence(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    reason = "cannot be cut: it is (hierarchical|a hybrid|a convolutional network).* `vit-tp doctor --models` lists"
    with pytest.raises(ShardRuleError, match=f"{type(model).__name__} {reason}"):
        plan_cut(model, 1)


def test_a_model_of_an_outside_class_is_refused_in_one_sentence():
    class Mine(nn.Module): ...

    with pytest.raises(ShardRuleError, match="Mine is not a transformer that vit_tp can cut: .* vit_tp.register_rule"):
        plan_cut(Mine(), 1)


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


class MyNorm(nn.LayerNorm):
    """A subclass, whose statistics may be others."""


@pytest.mark.parametrize("where", ["attn", "mlp"])
def test_a_norm_over_the_cut_axis_of_an_unknown_class_is_refused(where):
    model = build(**{f"scale_{where}_norm": True})
    block = model.blocks[0]
    getattr(block, where).norm = MyNorm(48 if where == "attn" else 192, device="meta")
    with pytest.raises(ShardRuleError, match=rf"norm of .* \(blocks\.0\.{where}\) is a MyNorm over a cut axis"):
        cut_(model, Alone(2))


def test_a_layer_that_is_not_plainly_linear_is_refused():
    class Quantised(nn.Linear): ...

    model = build()
    model.blocks[0].mlp.fc1 = Quantised(48, 192, device="meta")
    with pytest.raises(
        ShardRuleError, match=r"fc1 of .* \(blocks\.0\.mlp\) is a Quantised, and only torch\.nn\.Linear"
    ):
        cut_(model, Alone(2))


def test_another_text_of_timm_is_refused_and_not_guessed_at():
    attention = build().blocks[0].attn
    with pytest.raises(
        ShardRuleError, match=r"Attention\.forward has 'reshape\(B, N, C\)' 0 times and not 1; this timm"
    ):
        edit_(attention, (Edit("reshape(B, N, C)", "reshape(B, N, -1)"),))


def test_an_edit_changes_one_module_and_keeps_its_class():
    edited, other = (build().blocks[0].attn for _ in range(2))
    edit_(edited, (Edit("B, N, C = x.shape", "B, N, C = x.shape; 1 / 0"),))
    assert type(edited) is type(other) is Attention
    with pytest.raises(ZeroDivisionError) as caught:
        edited(torch.empty(1, 4, 48, device="meta"))
    assert caught.traceback[-1].path.name == "attention.py" and "1 / 0" not in str(
        caught.traceback[-1].path.read_text()
    )
    assert other(torch.empty(1, 4, 48, device="meta")).shape == (1, 4, 48)


def test_a_rule_is_registered_once_and_for_its_class_alone():
    rule = ShardRule(column={"fc1": 1}, row={"fc2": 1}, divides={"MLP width": "fc2.in_features"})
    try:
        register_rule(MyMlp, rule)
        register_rule(MyMlp, ShardRule(**vars(rule)))  # an imported module may be imported again
        with pytest.raises(ShardRuleError, match="MyMlp has a place in the table already"):
            register_rule(MyMlp, ShardRule())
        with pytest.raises(ShardRuleError, match="does not name act, drop1, norm, drop2 exactly once"):
            cut_(build(mlp_layer=MyMlp), Alone(2))
    finally:
        RULES.pop(MyMlp)


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
    mlp_only = ", or parallel.indivisible=mlp_only"
    assert f"Use parallel.tp=1, 2, 3, 6{mlp_only if 192 % tp_size == 0 else '.'}" in text and snapshot(model) == before
    assert legal_tp_sizes(plan_cut(model, 6)) == [1, 2, 3, 6]


@pytest.mark.parametrize("module", [nn.Linear(4, 4), nn.Identity()])
def test_a_bare_layer_is_not_cut_by_guess(module):
    with pytest.raises(ShardRuleError, match="has no sharding rule"):
        plan_cut(module, 2)


def test_mlp_only_keeps_heads_whole_and_cuts_the_rest():
    model = build()
    matches = cut_(model, Alone(4), Cutting(indivisible="mlp_only"))
    kept = [match for match in matches if match.kept_whole]
    assert [match.name for match in kept] == ["blocks.0.attn", "blocks.1.attn"]
    assert kept[0].kept_whole == (("num_heads", 6),)
    assert model.blocks[0].attn.qkv.weight.shape == (144, 48) and model.blocks[0].mlp.fc1.weight.shape == (48, 48)
    assert placement_of(model.blocks[0].attn.qkv.weight) == Replicated()
    with pytest.raises(ConfigError, match="indivisible='pad' is not known. it says .* Use one of refuse, mlp_only"):
        cut_(build(), Alone(4), Cutting(indivisible="pad"))


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
        assert kind.__module__.startswith(("timm.", "vit_tp.models.video")) and kind not in REPLICABLE
        assert len(set(rule.names)) == len(rule.names)
        assert rule.cuts == bool(rule.divides)
        assert not rule.row or rule.column or rule.cut


@pytest.mark.parametrize("first", [None, ShardRule()], ids=["replicated first", "a rule first"])
def test_a_class_has_one_place_in_the_table(first):
    try:
        register_rule(MyMlp, first)
        with pytest.raises(ShardRuleError, match="MyMlp has a place in the table already"):
            register_rule(MyMlp, None if first is not None else ShardRule())
    finally:
        RULES.pop(MyMlp, None)
        REPLICABLE.discard(MyMlp)


def test_a_rule_that_cuts_says_what_tp_must_divide():
    with pytest.raises(ShardRuleError, match="cuts but does not say what tp must divide"):
        register_rule(MyMlp, ShardRule(column={"fc1": 1}, row={"fc2": 1}))


def test_a_misspelt_name_is_pointed_at():
    with pytest.raises(
        ShardRuleError, match=r"does not name fc2 exactly once.* It names fcc2, which the module does not"
    ):
        require_covered(
            ShardRule(column={"fc1": 1}, row={"fcc2": 1}),
            nn.ModuleDict({"fc1": nn.Linear(2, 2), "fc2": nn.Linear(2, 2)}),
            "it",
        )


def test_a_saved_buffer_is_not_cut():
    """Only parameters are merged again, so a checkpoint would hold a slice of it."""
    rule = ShardRule(cut={"table": 0}, divides={"width": "table.shape[0]"})
    module = nn.Module()
    module.register_buffer("table", torch.zeros(4))
    with pytest.raises(ShardRuleError, match=r"cuts table, buffers that are saved.*persistent=False"):
        require_covered(rule, module, "a module")
    module.register_buffer("table", torch.zeros(4), persistent=False)
    require_covered(rule, module, "a module")
