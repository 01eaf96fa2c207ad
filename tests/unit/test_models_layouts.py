"""Every family of timm in stages: the model's numbers, its names, its first weights."""

import copy
import math
import re

import pytest
import torch
from timm.layers import PatchDropoutWithIndices
from torch import nn

from tests.distributed.models import randomise_
from tests.distributed.tiny import FAMILIES, FAMILY_OF, builds, image_size, tiny
from tests.tolerances import BLOCK_FLOAT64
from vit_tp.errors import ConfigError
from vit_tp.models.build import input_shape
from vit_tp.models.costs import stage_bounds, stage_flops
from vit_tp.models.dtypes import cast_buffers_, require_castable
from vit_tp.models.layouts import LAYOUTS
from vit_tp.models.stages import TABLES, build_stage, num_blocks, stage_names
from vit_tp.models.video import FactorisedVisionTransformer, VideoEva, VideoVisionTransformer
from vit_tp.models.weights import FirstWeights, materialise, record
from vit_tp.parallel.rng import Clock

BUILDS = sorted(set(builds().values()))
IN_ONE_STAGE = [name for name in BUILDS if FAMILY_OF[name] in ("tnt", "crossvit")]
ROTARY = [
    "eva02_base_patch14_224", "vit_base_patch16_dinov3", "vit_pe_core_base_patch16_224", "gemma4_vit_167m",
    "vit_small_patch16_rope_mixed_224", "qwen3_vit_88m", "deepseek_vit_412m", "naflexvit_base_patch16_gap",
]  # fmt: skip
BEIT_SHARED = {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}
VARIANTS = [
    *((name, {}) for name in BUILDS if name not in IN_ONE_STAGE),
    *((name, {"img_size": size}) for name in ROTARY for size in ((32, 64), (64, 32))),
    ("beit_base_patch16_224", BEIT_SHARED),
    ("vit_base_patch16_dinov3", {"dynamic_img_size": False}),
    ("vit_relpos_base_patch16_224", {"rel_pos_type": "bias"}),
    *((f"{name}_vit_{size}", {"encoder_pool": pool}) for name, size, pool in [
        ("qwen3", "88m", "merge"), ("deepseek", "412m", "align"), ("gemma4", "167m", "soft"),
    ]),
]  # fmt: skip


def grown(name: str, **kwargs) -> tuple[nn.Module, torch.Tensor]:
    """A small model with no zero in it, in float64, and images of its size."""
    model = randomise_(tiny(name, **kwargs)).double().eval()
    size = kwargs.get("img_size", image_size(name))
    return model, torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def run(model: nn.Module, x: torch.Tensor, clock: Clock | None = None, training: bool = False) -> torch.Tensor:
    """Run the stages one after another."""
    tables = build_stage(model, TABLES, clock) if stage_names(model) != ["model"] else None
    for name in stage_names(model):
        x = build_stage(model, name, clock, tables).train(training)(x)
        assert isinstance(x, torch.Tensor) and x.is_floating_point()
    return x


def gradients(model: nn.Module, x: torch.Tensor, forward) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    given = x.clone().requires_grad_()
    model.zero_grad()
    y = forward(given)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return y.detach(), {"input": given.grad, **grads}


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (found - wanted).abs().max() <= BLOCK_FLOAT64 * wanted.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize(("name", "kwargs"), VARIANTS, ids=lambda value: re.sub(r"[{}' ]", "", str(value)))
def test_stages_have_the_numbers_of_the_model(name, kwargs):  # P77, P79
    model, x = grown(name, **kwargs)
    # A stage hands on contiguous tokens; norms that timm takes in float32 would round strided ones otherwise.
    first = next(m for n, m in model.named_modules() if n in ("blocks.0", "encoder.blocks.0"))
    hook = first.register_forward_pre_hook(lambda module, args: (args[0].contiguous(), *args[1:]))
    whole, wanted = gradients(model, x, model)
    hook.remove()
    staged, found = gradients(model, x, lambda given: run(model, given))
    assert len(stage_names(model)) == num_blocks(model) + 2 > 2
    assert staged.shape == whole.shape and close(staged, whole)
    assert found.keys() == wanted.keys()
    assert all(close(found[n], wanted[n]) for n in wanted), [n for n in wanted if not close(found[n], wanted[n])]


@pytest.mark.parametrize("name", IN_ONE_STAGE)
def test_models_of_two_streams_are_one_stage(name):
    model, x = grown(name)
    assert torch.equal(run(model, x), model(x))
    with pytest.raises(ConfigError, match=r"two streams.*Use parallel\.pp=1"):
        stage_bounds(model, 2)


def test_every_family_has_a_layout_or_one_stage():
    kinds = {type(tiny(name, "meta")) for name in BUILDS}
    assert {kind.__name__ for kind in kinds - LAYOUTS.keys()} == {"TNT", "CrossVit"}
    of_clips = {FactorisedVisionTransformer, VideoEva, VideoVisionTransformer}  # tests/unit/test_models_video.py
    assert kinds | of_clips == {*LAYOUTS} | (kinds - LAYOUTS.keys()) and not kinds & of_clips


@pytest.mark.parametrize("name", BUILDS)
def test_stages_share_out_every_tensor_under_its_timm_name(name):
    model = tiny(name, "meta")
    parts = [*([TABLES] if stage_names(model) != ["model"] else []), *stage_names(model)]
    named = [item for part in parts for item in build_stage(model, part).named_timm_tensors()]
    assert {name: id(t) for name, t in named} == {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    assert len(named) == len(model.state_dict())


@pytest.mark.parametrize("name", [n for n in BUILDS if FAMILY_OF[n] != "mlp_mixer" and n != "crossvit_18_240"])
def test_first_weights_are_distributed_as_timms_and_tables_are_the_same(name):
    stock, meta, fill = tiny(name), tiny(name, "meta"), FirstWeights(seed=0)
    parts = [*([TABLES] if stage_names(meta) != ["model"] else []), *stage_names(meta)]
    made = [materialise(meta, part, fill).inner for part in parts]
    params = {n: p for shell in made for n, p in shell.named_parameters()}
    assert params.keys() == dict(stock.named_parameters()).keys()
    for n, theirs in stock.named_parameters():
        ours, size = params[n].detach(), theirs.numel()
        if theirs.min() == theirs.max():
            assert torch.equal(ours, theirs), n
        elif size > 60:  # five times the sampling error of a mean and of a spread
            spread = theirs.std().item()
            assert abs(ours.mean() - theirs.mean()) < 5 * spread * math.sqrt(2 / size), n
            assert abs(ours.std() / spread - 1) < 5 / math.sqrt(size), n
    buffers = {n: b for shell in made for n, b in shell.named_buffers()}
    for n, theirs in stock.named_buffers():
        assert torch.equal(buffers[n], theirs), n


def test_weights_do_not_depend_on_the_stages_they_are_in():
    """A class of its own has one stage, a class with a layout many: the same name and seed, the same bits."""
    meta = tiny("cait_s24_224", "meta")
    tape = record(meta)
    for part in stage_names(meta):
        for name, tensor in materialise(meta, part, FirstWeights(3)).named_timm_parameters():
            assert torch.equal(tensor, tape.replay(name, 3, name))


def test_a_model_that_timm_did_not_make_is_refused_on_meta():
    with torch.device("meta"):
        own = type(tiny("vit_base_patch16_224", "meta"))(depth=1, embed_dim=16, num_heads=2)
    with pytest.raises(ConfigError, match="was not made by timm.create_model"):
        materialise(own, "embed", FirstWeights(0))
    changed = tiny("vit_base_patch16_224", "meta")
    changed.reset_classifier(3)
    with pytest.raises(ConfigError, match=r"head.bias, head.weight of this VisionTransformer on meta are not as"):
        materialise(changed, "head", FirstWeights(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_and_costs_are_counted_on_meta(family):
    name = next(n for n in BUILDS if FAMILY_OF[n] == family)
    model = tiny(name, "meta")
    assert input_shape(model, 2) == (2, 3, *image_size(name))
    flops = stage_flops(model)
    assert all(number > 0 for number in flops[1:-1] or flops)


AUGMENTED = {"rope_shift_coords": 0.3, "rope_jitter_coords": 1.5, "rope_rescale_coords": 2.0}


def test_augmented_rotary_tables_are_drawn_once_for_all_blocks():
    """As timm draws them: two blocks in two stages, and the whole model given the same draw."""
    model, x = grown("vit_base_patch16_dinov3", **AUGMENTED)
    clock = Clock(seed=1)
    staged = run(model, x, clock, training=True)
    assert torch.equal(staged, run(model, x, clock, training=True))
    draw = model.train().rope.get_embed

    def drawn(**kwargs):
        with clock.randomness(x.device, TABLES):
            return draw(**kwargs)

    model.rope.get_embed = drawn
    assert close(staged.detach(), model(x).detach())
    clock.next_micro_batch()
    assert not close(staged.detach(), run(model, x, clock, training=True).detach())


@pytest.mark.parametrize(
    "name", ["vit_base_patch16_dinov3", "vit_small_patch16_rope_mixed_224", "naflexvit_base_patch16_gap"]
)
def test_patches_are_dropped_alike_in_embedding_and_tables(name):
    model, x = grown(name, patch_drop_rate=0.5)
    clock = Clock(seed=1)
    staged = run(model, x, clock, training=True)
    assert isinstance(model.patch_drop, PatchDropoutWithIndices)
    whole, drop = copy.deepcopy(model).train(), model.patch_drop.train()

    def drawn(tokens):
        with clock.randomness(tokens.device, "patch_drop"):
            return drop(tokens)

    whole.patch_drop.forward = drawn
    assert close(staged.detach(), whole(x).detach())


@pytest.mark.parametrize("name", BUILDS)
def test_every_family_runs_in_bf16(name):
    """As DeepSpeed has it: weights cast, and buffers where they meet weights."""
    model, x = grown(name)
    model, x = model.float(), x.float()
    wanted = run(model, x).detach()
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        with pytest.raises(ConfigError, match=r"compute\.dtype=bf16 does not go with the .* BatchNorm"):
            require_castable(model, torch.bfloat16)
        return
    for param in model.parameters():
        param.data = param.data.bfloat16()
    cast_buffers_(model, torch.bfloat16)
    found = run(model, x)
    found.sum().backward()
    assert found.dtype == torch.float32 or FAMILY_OF[name] in ("tnt", "crossvit")
    assert (found.detach() - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_an_image_of_another_size_is_refused_where_tables_would_not_fit():
    model, _ = grown("vit_base_patch16_dinov3")
    with pytest.raises(ConfigError, match="images are 48 x 32 and the stages were laid out for 32 x 32"):
        build_stage(model, "embed")(torch.zeros(1, 3, 48, 32))
