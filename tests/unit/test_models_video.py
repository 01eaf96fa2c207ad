"""Video models against stock timm and plain attention in float64: still clips, who sees whom, positions, refusals."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.layers.pos_embed_sincos import RotaryEmbeddingMRope
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, ResPostBlock
from torch import Tensor, nn

import vit_tp
from tests.distributed.models import SMALL, randomise_, small_vit
from tests.distributed.tiny import tiny
from vit_tp.config import ModelConfig
from vit_tp.config.schema import VideoConfig
from vit_tp.errors import ConfigError
from vit_tp.models.build import build_model, input_shape
from vit_tp.models.sizes import arrange
from vit_tp.models.stages import build_stage, count_tokens, stage_names
from vit_tp.models.video_embed import inflate
from vit_tp.models.video_positions import TIME_TEMPERATURE, sincos_table, turn_in_time
from vit_tp.models.weights import FirstWeights, materialise

EXACT = 1e-10
NO_PREFIX = {"class_token": False, "global_pool": "avg"}
RICH = {"qk_norm": True, "init_values": 0.5, "reg_tokens": 2, "scale_attn_norm": True}
IMAGES: dict[str, dict[str, Any]] = {
    "class token": {},
    "no prefix": NO_PREFIX,
    "registers, norms, scales": RICH,
    "attention pooling": {"global_pool": "map", "class_token": False},
    "average, norm before": {"global_pool": "avg", "fc_norm": False},
    "CLIP-like": {"pre_norm": True, "no_embed_class": True},
    "any size": {"dynamic_img_size": True},
    "no table": {"pos_embed": "none"},
}
ROTARY = [
    "eva02_base_patch14_224", "vit_small_patch16_dinov3", "vit_pe_core_base_patch16_224", "vit_small_patch16_rope_224",
    "vit_small_patch16_rope_mixed_ape_224",
]  # fmt: skip


def image_model(**kwargs: Any) -> nn.Module:
    return randomise_(small_vit(**kwargs).double()).eval()


def video_of(image: nn.Module, num_frames: int = 6, **video: Any) -> nn.Module:
    return vit_tp.video_model(copy.deepcopy(image), num_frames, **video)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def still(images: Tensor, num_frames: int = 6) -> Tensor:
    return images.unsqueeze(2).expand(-1, -1, num_frames, -1, -1)


def distance(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape and found.isfinite().all()
    return (found - wanted).abs().max().item()


# -- a clip of equal frames -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inflation", ["mean", "central"])
@pytest.mark.parametrize("attention", ["joint", "divided", "factorised"])
@pytest.mark.parametrize("name", IMAGES)
def test_a_still_clip_has_the_image_models_logits(name: str, attention: str, inflation: str):
    image, x = image_model(**IMAGES[name]), noise(2, 3, 32, 32)
    for tubelet_size in (1, 2, 3):
        video = video_of(image, attention=attention, inflation=inflation, tubelet_size=tubelet_size)
        assert distance(video(still(x)), image(x)) <= EXACT


@pytest.mark.parametrize("block_fn", [ResPostBlock, ParallelThingsBlock])
def test_so_it_has_in_other_blocks_with_timms_attention(block_fn: type[nn.Module]):
    image, x = image_model(block_fn=block_fn, reg_tokens=2), noise(2, 3, 32, 32)
    assert distance(video_of(image)(still(x)), image(x)) <= EXACT


def test_so_it_has_in_a_rotary_model_without_prefix():
    image = tiny("eva02_base_patch14_224", class_token=False, global_pool="avg", use_rot_pos_emb=True)
    image, x = randomise_(image.double()).eval(), noise(2, 3, 32, 32)
    assert image.rope is not None and image.num_prefix_tokens == 0
    assert distance(video_of(image)(still(x)), image(x)) <= EXACT
    assert distance(video_of(image, position="rope")(still(x)), image(x)) > 1e-4, "frames have times of their own"


@pytest.mark.parametrize("name", IMAGES)
def test_one_tubelet_is_the_image_model_whatever_the_attention(name: str):
    image, x = image_model(**IMAGES[name]), noise(2, 3, 32, 32)
    for attention in ("joint", "divided", "factorised"):
        video = video_of(image, 2, attention=attention)
        assert distance(video(still(x, 2)), image(x)) <= EXACT


EXCEPTIONS = {
    "Eva with a class token": (lambda: tiny("eva02_base_patch14_224"), ["joint"]),
    "another attention": (lambda: small_vit(attn_layer="diff"), ["joint"]),
    "parallel blocks": (lambda: small_vit(block_fn=ParallelScalingBlock), ["joint"]),
    "prefix in the pool": (lambda: small_vit(global_pool="avg", pool_include_prefix=True), ["joint", "divided"]),
}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_the_exceptions_are_near_but_not_equal(name: str):
    """Every patch stands there T times and a prefix token once, so its share falls from 1/(1 + S) to 1/(1 + T S) where
    scores are equal; a factorised model pools frame by frame."""
    build, attentions = EXCEPTIONS[name]
    image, x = randomise_(build().double()).eval(), noise(2, 3, 32, 32)
    for attention in attentions:
        far = distance(video_of(image, attention=attention)(still(x)), image(x)) / image(x).abs().max().item()
        assert 1e-5 < far < 0.2, attention
    if name == "prefix in the pool":
        assert distance(video_of(image, attention="factorised")(still(x)), image(x)) <= EXACT


def test_tables_that_are_replaced_give_other_logits():
    image, x = image_model(), noise(2, 3, 32, 32)
    for attention in ("joint", "divided", "factorised"):
        assert distance(video_of(image, attention=attention, position="sincos")(still(x)), image(x)) > 1e-3


def test_other_clips_are_not_seen_frame_by_frame():
    """What is new takes part once it is not zero."""
    image, x = image_model(), noise(2, 3, 6, 32, 32)
    for attention in ("joint", "divided", "factorised"):
        video = randomise_(video_of(image, attention=attention))
        assert distance(video(x), video(x.flip(2))) > 1e-3


@pytest.mark.parametrize("inflation", ["mean", "central"])
@pytest.mark.parametrize("tubelet_size", [1, 2, 3])
def test_the_inflated_kernel_is_a_convolution_of_the_frames(inflation: str, tubelet_size: int):
    image = image_model(**NO_PREFIX)
    embed, x = video_of(image, inflation=inflation, tubelet_size=tubelet_size).patch_embed, noise(2, 3, 6, 32, 32)
    assert isinstance(embed.proj, nn.Conv3d) and embed.proj.weight.shape == (32, 3, tubelet_size, 8, 8)
    wanted = F.conv3d(x, embed.proj.weight, embed.proj.bias, stride=(tubelet_size, 8, 8)).permute(0, 2, 3, 4, 1)
    assert distance(embed(x), wanted) <= EXACT
    frames = (
        x[:, :, tubelet_size // 2 :: tubelet_size] if inflation == "central" else x.unflatten(2, (-1, tubelet_size))
    )
    frames = frames.mean(3) if inflation == "mean" else frames
    for t in range(6 // tubelet_size):
        assert distance(embed(x)[:, t].flatten(1, 2), image.patch_embed(frames[:, :, t])) <= EXACT


def test_inflation_of_a_constant():
    kernel = torch.ones(1, 1, 2, 2)
    assert inflate(kernel, 4, "mean")[0, 0, :, 0, 0].tolist() == [0.25] * 4
    assert inflate(kernel, 4, "central")[0, 0, :, 0, 0].tolist() == [0, 0, 1, 0]
    assert inflate(kernel, 3, "central")[0, 0, :, 0, 0].tolist() == [0, 1, 0]


# -- who looks at whom ------------------------------------------------------------------------------------------------


def plain(attn: Attention, x: Tensor, sees: Tensor) -> Tensor:
    """Stock timm's attention with a mask: (B, N, C), and (N, N) whether a token sees another."""
    stock = copy.deepcopy(attn)
    stock.__class__ = Attention
    return stock(x, attn_mask=sees)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("kwargs", [{}, RICH])
@pytest.mark.parametrize("masked", ["none", "bool", "added", "causal", "one for all keys"])
def test_joint_attention_is_timms_on_tokens_whose_prefix_is_repeated(kwargs: dict, is_fused: bool, masked: str):
    """As often as there are tubelets; with every mask that timm's takes."""
    video = randomise_(video_of(image_model(**kwargs)))
    attn, prefix = video.blocks[0].attn, video.num_prefix_tokens
    attn.fused_attn = is_fused
    num_patches = 3 * 16 - (5 if masked == "none" else 0)  # fewer after patch dropout
    x = noise(2, prefix + num_patches, 32)
    number = x.shape[1]
    mask = {
        "none": None, "bool": noise(2, 1, number, number) > -1, "added": noise(number, number),
        "causal": torch.ones(number, number, dtype=torch.bool).tril(), "one for all keys": noise(number, 1),
    }[masked]  # fmt: skip
    order = torch.cat((torch.arange(prefix).repeat(2), torch.arange(number)))
    stock = copy.deepcopy(attn)
    stock.__class__ = Attention
    wide = None if mask is None else mask.expand(*mask.shape[:-1], number)[..., order, :][..., order]
    wanted = stock(x[:, order], attn_mask=wide)[:, 2 * prefix :]
    found = attn(x, is_causal=True) if masked == "causal" else attn(x, attn_mask=mask)
    assert distance(found, wanted) <= EXACT


def test_what_need_not_be_repeated_stays_timms_own():
    for kwargs, num_frames in (({}, 2), (NO_PREFIX, 6)):
        assert type(video_of(image_model(**kwargs), num_frames).blocks[0].attn) is Attention


def test_backward_keeps_queries_keys_and_values_once():
    """What is repeated is small; q, k and v are views of one tensor, as in timm's."""
    attn = video_of(image_model()).blocks[0].attn.train()
    attn.fused_attn, kept = True, {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        attn(noise(2, 1 + 3 * 16, 32).requires_grad_())
    assert sum(t.untyped_storage().nbytes() == 2 * (3 + 3 * 16) * 3 * 32 * 8 for t in kept.values()) == 1
    assert not any(t.untyped_storage().nbytes() == 2 * (1 + 3 * 16) * 3 * 32 * 8 for t in kept.values())


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("kwargs", [{}, NO_PREFIX, RICH])
def test_attention_over_time_is_timms_with_a_mask(kwargs: dict, is_fused: bool):
    """A patch sees its place in all frames, a prefix token itself."""
    video = randomise_(video_of(image_model(**kwargs), attention="divided"))
    attn, prefix, x = video.blocks[0].attn_time, video.num_prefix_tokens, None
    attn.fused_attn = is_fused
    place = torch.cat((-1 - torch.arange(prefix), torch.arange(16).repeat(3)))
    x = noise(2, len(place), 32)
    assert distance(attn(x), plain(attn, x, place[:, None] == place[None])) <= EXACT


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("kwargs", [{}, NO_PREFIX, {**RICH, "scale_attn_norm": False}])
def test_attention_in_space_is_timms_on_each_frame(kwargs: dict, is_fused: bool):
    """Frame by frame with the clip's prefix before it; what the prefix gathers is averaged."""
    video = randomise_(video_of(image_model(**kwargs), attention="divided"))
    attn, prefix = video.blocks[0].attn, video.num_prefix_tokens
    attn.fused_attn = is_fused
    x = noise(2, prefix + 3 * 16, 32)
    found, stock = attn(x), copy.deepcopy(attn)
    stock.__class__ = Attention
    frames = [stock(torch.cat((x[:, :prefix], x[:, prefix + 16 * t : prefix + 16 * (t + 1)]), 1)) for t in range(3)]
    assert distance(found[:, prefix:], torch.cat([frame[:, prefix:] for frame in frames], 1)) <= EXACT
    if prefix:
        assert distance(found[:, :prefix], torch.stack([frame[:, :prefix] for frame in frames]).mean(0)) <= EXACT


def test_factorised_blocks_see_their_own_frame_only():
    video = randomise_(video_of(image_model(**RICH), attention="factorised"))
    frame = torch.arange(3).repeat_interleave(16 + 3)
    attn, x = video.blocks[0].attn, noise(2, len(frame), 32)
    assert distance(attn(x), plain(attn, x, frame[:, None] == frame[None])) <= EXACT


def test_a_divided_block_adds_time_then_space():
    video = randomise_(video_of(image_model(), attention="divided"))
    block, x = video.blocks[1], noise(2, 1 + 3 * 16, 32)
    after_time = x + block.attn_time(block.norm_time(x))
    after_space = after_time + block.attn(block.norm1(after_time))
    assert distance(block(x), after_space + block.mlp(block.norm2(after_space))) <= EXACT


def test_frames_are_encoded_by_the_image_model_and_then_looked_at_over_time():
    """The factorised encoder from stock timm's parts."""
    image, x = image_model(), noise(2, 3, 6, 32, 32)
    video = randomise_(video_of(image, attention="factorised", tubelet_size=1, time_depth=2))
    state = {name: tensor for name, tensor in video.state_dict().items() if not name.startswith("time_")}
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"][:, :, 0]
    image.load_state_dict(state)
    tokens = torch.stack(
        [image.blocks(image.norm_pre(image._pos_embed(image.patch_embed(x[:, :, t])))) for t in range(6)]
    )
    pooled = tokens[:, :, 0].transpose(0, 1) + video.time_embed
    assert distance(video(x), image.head(image.norm(video.time_blocks(pooled).mean(1)))) <= EXACT


# -- positions --------------------------------------------------------------------------------------------------------


def jepa_1d(width: int, positions: np.ndarray) -> np.ndarray:
    """facebookresearch/jepa, pos_embs.py, get_1d_sincos_pos_embed_from_grid."""
    omega = 1.0 / 10000 ** (np.arange(width // 2, dtype=float) / (width / 2.0))
    out = np.einsum("m,d->md", positions.reshape(-1), omega)
    return np.concatenate([np.sin(out), np.cos(out)], axis=1)


@pytest.mark.parametrize("width", [32, 48, 50])
def test_the_fixed_table_is_that_of_jepa(width: int):
    times, rows, columns = np.meshgrid(np.arange(3), np.arange(4), np.arange(5), indexing="ij")
    third = math.ceil(width / 6) * 2
    wanted = np.concatenate([jepa_1d(third, axis.astype(float)) for axis in (times, rows, columns)], axis=1)[:, :width]
    found = sincos_table(3, 4, 5, width, torch.zeros(1, dtype=torch.float64))
    assert distance(found.flatten(0, 2), torch.from_numpy(wanted)) <= EXACT


@pytest.mark.parametrize("kwargs", [{}, {**RICH, "dynamic_img_size": True}])
def test_every_patch_gets_its_place_and_its_time_and_the_prefix_none(kwargs: dict):
    image = image_model(**kwargs)
    x, prefix = noise(2, 3, 6, 32, 32), image.num_prefix_tokens
    for position in ("learned", "sincos"):
        video = randomise_(video_of(image, position=position))
        patches = video.patch_embed(x)
        if position == "sincos":
            assert video.pos_embed is None
            table = sincos_table(3, 4, 4, 32, x).flatten(0, 2)
        else:
            table = (video.pos_embed[0, prefix:] + video.time_embed[0, :, None]).flatten(0, 1)
        found = video._pos_embed(patches)
        assert distance(found[:, prefix:], patches.flatten(1, 3) + table) <= EXACT
        tokens = [token for token in (video.cls_token, video.reg_token) if token is not None]
        wanted = torch.cat(tokens, 1) + (0 if position == "sincos" else video.pos_embed[:, :prefix])
        assert distance(found[:, :prefix], wanted.expand(2, -1, -1)) <= EXACT


@pytest.mark.parametrize(
    ("kwargs", "video", "is_dropped"),
    [
        ({}, {}, True),
        ({}, {"position": "sincos"}, True),
        ({"pos_embed": "none"}, {}, True),
        ({"pos_embed": "none"}, {"attention": "factorised"}, False),  # times are added to pooled frames
        ({"pos_embed": "none"}, {"attention": "factorised", "position": "sincos"}, True),
    ],
)
def test_dropout_follows_tables_and_nothing_else(kwargs: dict, video: dict, is_dropped: bool):
    model = video_of(image_model(pos_drop_rate=1.0, **kwargs), **video).train()
    assert model._pos_embed(model.patch_embed(noise(2, 3, 6, 32, 32))).any() != is_dropped


@pytest.mark.parametrize("is_half", [True, False])
def test_rotation_in_time_adds_angles_to_every_third_pair(is_half: bool):
    angles = noise(5, 8)  # 5 places, 8 pairs of 16 channels
    spread = (lambda a: torch.cat((a, a), -1)) if is_half else (lambda a: a.repeat_interleave(2, -1))
    table = torch.cat((spread(angles).sin(), spread(angles).cos()), -1)
    speed = torch.zeros(8, dtype=torch.float64)
    speed[[0, 3, 6]] = torch.tensor([TIME_TEMPERATURE ** (-j / 3) for j in range(3)], dtype=torch.float64)
    wanted = torch.cat([spread(angles + t * speed) for t in range(4)])
    found = turn_in_time(table, 4, is_half)
    assert distance(found, torch.cat((wanted.sin(), wanted.cos()), -1)) <= EXACT
    assert torch.equal(found[:5], table), "time 0 is the image model's table, to the last bit"


@pytest.mark.parametrize("name", ROTARY)
def test_a_rotary_model_of_one_tubelet_is_the_image_model(name: str):
    for size in ((32, 64), (64, 32)):
        for is_dynamic in (False, True):
            image, x = (
                randomise_(tiny(name, img_size=size, dynamic_img_size=is_dynamic).double()).eval(),
                noise(2, 3, *size),
            )
            for position in ("learned", "rope"):
                assert distance(video_of(image, 2, position=position)(still(x, 2)), image(x)) <= EXACT
            turned = video_of(image, 6, position="rope").rope.get_embed(shape=(4, 8))
            assert turned.shape[-2] == 3 * 32 and not torch.equal(turned[..., :32, :], turned[..., 32:64, :])


MROPE = {"rope_type": "mrope", "rope_grid_indexing": "ij", "embed_dim": 128, "num_heads": 2}  # heads as wide as timm's


def test_the_pairs_that_timms_mrope_keeps_for_time_turn_in_time():
    for size in ((32, 64), (64, 32)):
        image = randomise_(tiny("vit_small_patch16_rope_224", img_size=size, **MROPE).double()).eval()
        assert type(image.rope) is RotaryEmbeddingMRope and image.rope.dim == 64
        still_clip = still(noise(2, 3, *size), 2)
        for position in ("learned", "rope"):
            assert distance(video_of(image, 2, position=position)(still_clip), image(still_clip[:, :, 0])) <= EXACT
        grid = (size[0] // 8, size[1] // 8)
        places = image.rope.get_embed(grid)
        table = video_of(image, 6, position="rope").rope.get_embed(shape=grid).unflatten(0, (3, -1))
        of_time = (image.rope.axis == 0).tile(4)  # of sines and cosines, each with two halves
        assert of_time.sum() == 4 * 11
        assert torch.equal(table[0], places) and torch.equal(table[2][:, ~of_time], places[:, ~of_time])
        angles = torch.outer(torch.arange(3.0), TIME_TEMPERATURE ** -(torch.arange(11.0) / 11)).repeat(1, 2)
        wanted = torch.cat((angles.sin(), angles.cos()), -1)[:, None].expand(-1, len(places), -1)
        assert distance(table[..., of_time], wanted.to(table)) <= 1e-6


def test_rotary_scores_depend_on_distances():
    """A query and a key at places a tubelet, a row and a column further give the same score."""
    from timm.layers import apply_rot_embed_cat

    rope = video_of(randomise_(tiny("vit_pe_core_base_patch16_224").double()), 6, position="rope").rope
    table = rope.get_embed().double().unflatten(0, (3, 4, 4))
    q, k = noise(2, table.shape[-1] // 2).unbind()

    def score(a: tuple[int, int, int], b: tuple[int, int, int]) -> Tensor:
        return apply_rot_embed_cat(q, table[a]) @ apply_rot_embed_cat(k, table[b])

    assert score((0, 0, 0), (1, 2, 1)).item() == pytest.approx(score((1, 1, 2), (2, 3, 3)).item(), abs=1e-5)
    assert abs(score((0, 0, 0), (1, 2, 1)) - score((0, 0, 0), (2, 2, 1))) > 1e-3


# -- sizes, stages, first weights -------------------------------------------------------------------------------------

VIDEOS: list[tuple[str | dict, dict[str, Any]]] = [
    ({}, {}),
    (RICH, {"attention": "divided", "position": "sincos"}),
    (NO_PREFIX, {"attention": "factorised", "time_depth": 2}),
    *((name, {"position": "rope"}) for name in ROTARY),
    (MROPE, {"position": "rope"}),
]


@pytest.mark.parametrize(("model", "video"), VIDEOS)
def test_stages_are_the_whole_model(model: str | dict, video: dict):
    for size in ((32, 64), (64, 32)):
        image = (
            tiny("vit_small_patch16_rope_224", **model, img_size=size) if model is MROPE
            else tiny(model, img_size=size) if isinstance(model, str) else small_vit(**model, img_size=size)
        )  # fmt: skip
        whole, x = randomise_(vit_tp.video_model(image, 6, **video).double()).eval(), noise(2, 3, 6, *size)
        wanted, tokens = whole(x), x
        assert input_shape(whole, 2) == x.shape
        for name in stage_names(whole):
            tokens = build_stage(whole, name)(tokens)
            if name == "embed":
                prefix = whole.num_prefix_tokens
                assert tokens.shape[1] == (
                    3 * (32 + prefix) if video.get("attention") == "factorised" else 3 * 32 + prefix
                )
                assert count_tokens(whole)[True] == tokens.shape[1]
        assert torch.equal(tokens, wanted)


@pytest.mark.parametrize(
    "name", ["eva02_base_patch14_224", "vit_pe_core_base_patch16_224", "vit_small_patch16_rope_224"]
)
@pytest.mark.parametrize("size", [[64, 128], [128, 64]])
def test_stages_of_images_that_are_not_square(name: str, size: list[int]):
    """P77: rotary tables with rows and columns exchanged would go unnoticed on squares."""
    kwargs = {"patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 4}
    built = build_model(ModelConfig(name, kwargs, size), 10, 3)
    assert input_shape(built, 2) == (2, 3, *size) and built.patch_embed.grid_size == (size[0] // 16, size[1] // 16)
    stock = randomise_(timm.create_model(name, **kwargs, img_size=tuple(size), num_classes=10).double()).eval()
    tokens = x = noise(2, 3, *size)
    for stage in stage_names(stock):
        tokens = build_stage(stock, stage)(tokens)
    assert torch.equal(tokens, stock(x))


@pytest.mark.parametrize("attention", ["joint", "divided", "factorised"])
def test_frames_of_any_size_where_timm_takes_them(attention: str):
    image = image_model(dynamic_img_size=True)
    video = video_of(image, attention=attention)
    for size in ((32, 32), (48, 32), (64, 64)):
        x = noise(2, 3, *size)
        assert video(still(x)).shape == (2, 10)
        assert distance(video(still(x)), image(x)) <= EXACT


@pytest.mark.parametrize("is_video", [True, False])
def test_a_size_of_a_schedule_that_patches_do_not_divide_gets_one_piece_of_advice(is_video: bool):
    image = image_model(dynamic_img_size=True)
    with pytest.raises(ConfigError) as caught:
        arrange(video_of(image) if is_video else image, (36, 32))
    text = str(caught.value)
    assert text.startswith("images of 36 x 32 pixels do not fit the model: ") and text.count("Use ") == 1
    assert text.endswith(". Use multiples of its patch size in recipe.resolution_schedule.") and ".." not in text


@pytest.mark.parametrize("attention", ["joint", "divided", "factorised"])
def test_first_weights_are_the_image_models_and_what_is_new_adds_nothing(attention: str):
    kwargs = {key: value for key, value in SMALL.items() if key not in ("img_size", "num_classes")}
    config = ModelConfig("vit_tiny_patch16_224", kwargs, 32, video=VideoConfig(6, attention=attention, time_depth=2))
    found, of_images = {}, {}
    for state, chosen in ((found, config), (of_images, ModelConfig("vit_tiny_patch16_224", kwargs, 32))):
        model, fill = build_model(chosen, 10, 3), FirstWeights(0)
        for name in stage_names(model):
            state |= {n: t.clone() for n, t in materialise(model, name, fill).named_timm_tensors()}
    for name, tensor in of_images.items():
        wanted = inflate(tensor, 2, "mean") if name == "patch_embed.proj.weight" else tensor
        assert torch.equal(found[name], wanted)
    new = found.keys() - of_images.keys()
    silent = {
        name for name in new if "attn_time.proj" in name or "time_blocks" in name and ("proj" in name or "fc2" in name)
    }
    assert new and all(not found[name].any() for name in {*silent, "time_embed"})
    image = small_vit()
    image.load_state_dict(of_images)
    own = video_of(image, attention=attention, time_depth=2).state_dict()
    assert found.keys() == own.keys() and all(torch.equal(found[name], own[name]) for name in own), (
        "as in a loop of own"
    )
    for name in new - silent - {"time_embed"}:
        origin = name.replace("attn_time", "attn").replace("norm_time", "norm1")
        origin = f"blocks.3.{name.split('.', 2)[2]}" if name.startswith("time_blocks") else origin
        assert torch.equal(found[name], of_images[origin]), name


@pytest.mark.parametrize("attention", ["joint", "divided", "factorised"])
def test_weights_drawn_again_leave_new_parts_silent(attention: str):
    video, x = video_of(image_model(), attention=attention), noise(2, 3, 6, 32, 32)
    randomise_(video).init_weights()
    logits = video(x)
    with torch.no_grad():
        for name, param in video.named_parameters():
            assert not (name == "time_embed" or "attn_time.proj" in name) or not param.any()
            if "attn_time.qkv" in name or "time_blocks" in name and "norm" in name:
                param.add_(1.0)  # not heard
    assert distance(video(x), logits) <= EXACT
    rotary = video_of(randomise_(tiny("eva02_base_patch14_224")), 4)
    randomise_(rotary).init_weights()
    assert not rotary.time_embed.any() and rotary.blocks[0].attn.proj.weight.any()


def test_timms_contracts_hold():
    video = video_of(image_model(), attention="divided")
    assert video.no_weight_decay() == {"pos_embed", "cls_token", "reg_token", "dist_token", "time_embed"}
    assert video.num_classes == 10 and video.get_classifier() is video.head
    layers = timm.models.group_parameters(video, video.group_matcher(), reverse=True)
    assert layers["time_embed"] == layers["pos_embed"] == 0
    assert layers["blocks.2.attn_time.qkv.weight"] == layers["blocks.2.attn.qkv.weight"] == 3
    factorised = video_of(image_model(), attention="factorised")
    layers = timm.models.group_parameters(factorised, factorised.group_matcher(), reverse=True)
    assert (
        layers["time_embed"] == layers["time_blocks.0.attn.qkv.weight"] == layers["head.weight"] > layers["pos_embed"]
    )
    video.set_grad_checkpointing()
    x = noise(1, 3, 6, 32, 32)
    again = video.train()(x)
    again.sum().backward()
    video.set_grad_checkpointing(False)
    assert distance(again, video(x)) <= EXACT
    rotary = video_of(randomise_(tiny("vit_small_patch16_rope_mixed_224").double()), 4, position="rope")
    assert {"rope.freqs", "time_embed"} <= rotary.no_weight_decay()
    assert len(timm.optim.param_groups_weight_decay(rotary, 0.05)) == 2


def test_another_size_of_frames_resamples_timms_table():
    image, x = image_model(), noise(2, 3, 48, 32)
    video = video_of(image, attention="divided")
    for model in (image, video):
        model.set_input_size((48, 32))
    assert input_shape(video, 2) == (2, 3, 6, 48, 32)
    assert distance(video(still(x)), image(x)) <= EXACT
    with pytest.raises(ConfigError, match="patch_size"):
        video.set_input_size(patch_size=(4, 4))


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "video", "text"),
    [
        ("vit_tiny_patch16_224", {"num_frames": 5}, "num_frames=5 is not a multiple of tubelet_size=2"),
        ("vit_tiny_patch16_224", {"num_frames": 0}, "num_frames=0 is no number of frames"),
        ("vit_tiny_patch16_224", {"attention": "space"}, "there are joint, divided, factorised"),
        ("vit_tiny_patch16_224", {"position": "rope"}, "no rotary table that could turn in time"),
        ("vit_tiny_patch16_224", {"position": "rope", "attention": "divided"}, "position=rope does not go with"),
        ("eva02_tiny_patch14_224", {"attention": "divided"}, "does not go with Eva"),
        ("beit_base_patch16_224", {}, "Beit cannot become a video model"),
        ("deit_tiny_distilled_patch16_224", {}, "VisionTransformerDistilled cannot become"),
        ("xcit_nano_12_p16_224", {}, "Xcit cannot become"),
        ("resnet18", {}, "ResNet cannot become"),
        ("vit_tiny_r_s16_p8_224", {}, "only timm's PatchEmbed"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(model: str, video: dict, text: str):
    with torch.device("meta"):
        image = timm.create_model(model)
    before = {name: tuple(p.shape) for name, p in image.named_parameters()}
    with pytest.raises(ConfigError) as caught:
        vit_tp.video_model(image, **{"num_frames": 8, **video})
    assert text in str(caught.value) and "Use " in str(caught.value)
    assert before == {name: tuple(p.shape) for name, p in image.named_parameters()}


def test_blocks_and_tokens_that_cannot_be_folded_are_refused():
    for kwargs, video, text in (
        ({"block_fn": ParallelScalingBlock}, {"attention": "divided"}, "is a ParallelScalingBlock"),
        ({"attn_layer": "diff"}, {"attention": "factorised"}, "Block with DiffAttention"),
        ({"global_pool": ""}, {"attention": "factorised"}, "global_pool=''"),
        ({"patch_drop_rate": 0.5}, {"attention": "divided"}, "patch_drop_rate=0.5"),
    ):
        with pytest.raises(ConfigError) as caught:
            vit_tp.video_model(small_vit(**kwargs), 8, **video)
        assert text in str(caught.value)
    video = video_of(image_model(), attention="divided")
    for call in (
        lambda: vit_tp.video_model(video, 6),
        lambda: video(noise(1, 3, 32, 32)),
        lambda: video(noise(1, 3, 4, 32, 32)),
        lambda: video(noise(1, 3, 6, 40, 32)),
        lambda: video(noise(1, 3, 6, 32, 32), is_causal=True),
        lambda: video.forward_intermediates(noise(1, 3, 6, 32, 32)),
    ):
        with pytest.raises(ConfigError, match=r"Use|Make"):
            call()


def test_joint_attention_takes_blocks_of_any_kind_and_patch_dropout():
    for kwargs in ({"block_fn": ParallelScalingBlock}, {"attn_layer": "diff"}, {"patch_drop_rate": 0.5}):
        video = vit_tp.video_model(small_vit(**kwargs), 6).train()
        assert video(torch.randn(2, 3, 6, 32, 32)).shape == (2, 10)


def test_a_command_line_reads_how_its_knobs_are_typed():
    with pytest.raises(ConfigError, match=r"model\.video\.num_frames=5 .* Use model\.video\.num_frames=6"):
        build_model(ModelConfig("vit_tiny_patch16_224", video=VideoConfig(5)), 10, 3)
