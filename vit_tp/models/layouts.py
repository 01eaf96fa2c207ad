"""How is a timm family laid out as embed, one stage per block, head?

A layout names every part of its class and the stage that holds it. Classes are matched by identity, not by
`isinstance`: a subclass may do anything in forward. A class without a layout is one stage that runs the whole model.

Does not know: ranks, groups, DeepSpeed, weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from timm.models.beit import Beit
from timm.models.cait import Cait
from timm.models.convit import ConVit
from timm.models.deepseek_vit import DeepseekVitClassifier, DeepseekVitEncoder
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.gemma4_vit import Gemma4VitClassifier, Gemma4VitEncoder
from timm.models.mlp_mixer import MlpMixer
from timm.models.naflexvit import NaFlexVit
from timm.models.qwen3_vit import Qwen3VitClassifier, Qwen3VitEncoder
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from timm.models.xcit import Xcit
from torch import Tensor, nn

from vit_tp.errors import ConfigError
from vit_tp.models import families
from vit_tp.models.families import Grid
from vit_tp.models.video import FactorisedVisionTransformer, VideoEva, VideoVisionTransformer

Arguments = Callable[[nn.Module, int, Tensor, Grid], dict[str, Tensor | int]]
"""(what stands around the blocks, index, (B, N, C), grid) -> arguments of that block, "x" where timm changes it."""

Finish = Callable[[nn.Module, Tensor, Grid], Tensor]
"""(the head's shell, (B, N, C) of the last block, grid) -> what the model returns."""


def _no_arguments(around: nn.Module, index: int, x: Tensor, grid: Grid) -> dict[str, Tensor | int]:
    return {}


@dataclass(frozen=True)
class Layout:
    """Which stage holds what of a class, and how the block loop and the head of its forward go.

    Names are paths from the model; a name that an instance lacks is skipped.

    Args:
        embed: Parts that run before the first block.
        head: Parts that run after the last block.
        finish: The end of timm's forward, after the last block.
        tables: Modules from which every block stage makes what timm hands to all blocks, such as rotary tables.
        arguments: What timm hands to one block beside the tokens.
        of_block: Parameters of the model itself that one block's stage holds -> that block's index.
        owner: Path of the module that holds `blocks`.
        grid: (owner, height and width in pixels) -> rows and columns of patches; None where nothing depends on it.
    """

    embed: tuple[str, ...]
    head: tuple[str, ...]
    finish: Finish
    tables: tuple[str, ...] = ()
    arguments: Arguments = _no_arguments
    of_block: Callable[[nn.Module], dict[str, int]] = lambda model: {}
    owner: str = ""
    grid: Callable[[nn.Module, Grid], Grid] | None = None

    @property
    def blocks(self) -> str:
        """Path of the block list."""
        return f"{self.owner}.blocks".lstrip(".")


def _names(text: str, owner: str = "") -> tuple[str, ...]:
    return tuple(f"{owner}.{name}".lstrip(".") for name in text.split())


def _encoder(embed: str, head: str, table: str, arguments: Arguments, end: Finish, grid: Callable) -> Layout:
    """Return the layout of an encoder without a classifier."""
    return Layout(
        embed=_names(f"{embed} {table}"), head=_names(head), finish=end, tables=(table,), arguments=arguments, grid=grid
    )


def _classifier(encoder: Layout) -> Layout:
    """Return the layout of the classifier that wraps an encoder."""
    return Layout(
        embed=tuple(f"encoder.{name}" for name in encoder.embed),
        head=(*(f"encoder.{name}" for name in encoder.head), *_names("norm head_drop head")),
        finish=lambda model, x, grid: model.forward_head(encoder.finish(model.encoder, x, grid)),
        tables=tuple(f"encoder.{name}" for name in encoder.tables),
        arguments=encoder.arguments,
        owner="encoder",
        grid=encoder.grid,
    )


_VIT_EMBED = "patch_embed pos_drop patch_drop norm_pre cls_token reg_token pos_embed"
_VIT_HEAD = "norm attn_pool fc_norm head_drop head"
_QWEN3 = _encoder(
    "patch_embed pos_embed", "merger", "rope", families.rope_of_grid, families.end_of_qwen3, families.patch_grid
)
_DEEPSEEK = _encoder(
    "patch_embed", "norm aligner", "rope", families.rope_of_grid, families.end_of_deepseek, families.patch_grid
)
_GEMMA4 = _encoder(
    "patch_embed", "pooler std_bias std_scale", "rotary_emb", families.cos_and_sin, families.end_of_gemma4,
    families.whole_patches,
)  # fmt: skip

LAYOUTS: dict[type[nn.Module], Layout] = {
    VisionTransformer: Layout(_names(_VIT_EMBED), _names(_VIT_HEAD), families.norm_then_head),
    VisionTransformerDistilled: Layout(
        _names(f"{_VIT_EMBED} dist_token"), _names(f"{_VIT_HEAD} head_dist"), families.norm_then_head
    ),
    Eva: Layout(
        _names(_VIT_EMBED),
        _names(_VIT_HEAD),
        families.norm_then_head,
        tables=("rope", "patch_drop"),
        arguments=families.rope_of_eva,
        grid=families.patch_grid,
    ),
    NaFlexVit: Layout(
        _names("embeds patch_drop norm_pre"),
        _names(_VIT_HEAD),
        families.norm_then_head,
        tables=("rope", "patch_drop"),
        arguments=families.rope_of_naflex,
        grid=families.naflex_grid,
    ),
    Beit: Layout(
        _names("patch_embed cls_token pos_embed pos_drop"),
        _names("norm fc_norm head_drop head"),
        families.norm_then_head,
        tables=("rel_pos_bias",),
        arguments=families.shared_bias_of_beit,
    ),
    VisionTransformerRelPos: Layout(
        _names("patch_embed cls_token"),
        _names("norm fc_norm head_drop head"),
        families.norm_then_head,
        tables=("shared_rel_pos",),
        arguments=families.shared_bias,
    ),
    # Its blocks hold the rotary tables that the model holds too.
    VisionTransformerSAM: Layout(
        _names("patch_embed pos_embed pos_drop patch_drop norm_pre rope_global rope_window"),
        _names("neck head"),
        families.neck_then_head,
    ),
    Qwen3VitEncoder: _QWEN3,
    Qwen3VitClassifier: _classifier(_QWEN3),
    DeepseekVitEncoder: _DEEPSEEK,
    DeepseekVitClassifier: _classifier(_DEEPSEEK),
    Gemma4VitEncoder: _GEMMA4,
    Gemma4VitClassifier: _classifier(_GEMMA4),
    Cait: Layout(
        _names("patch_embed pos_embed pos_drop"),
        _names("cls_token blocks_token_only norm head_drop head"),
        families.class_attention_then_head,
    ),
    Xcit: Layout(
        _names("patch_embed pos_embed pos_drop"),
        _names("cls_token cls_attn_blocks norm head_drop head"),
        families.class_attention_then_head,
        arguments=families.height_and_width,
        grid=families.halved_grid,
    ),
    MlpMixer: Layout(_names("stem"), _names("norm head_drop head"), families.norm_then_head),
    ConVit: Layout(
        _names("patch_embed pos_embed pos_drop"),
        _names("norm head_drop head"),
        families.norm_then_head,
        arguments=families.class_token_of_convit,
        of_block=lambda model: {"cls_token": min(model.local_up_to_layer, len(model.blocks) - 1)},
    ),
}


_VIT, _EVA = LAYOUTS[VisionTransformer], LAYOUTS[Eva]
LAYOUTS |= {
    VideoVisionTransformer: replace(_VIT, embed=(*_VIT.embed, "time_embed")),
    VideoEva: replace(_EVA, embed=(*_EVA.embed, "time_embed"), grid=families.frame_grid),
    FactorisedVisionTransformer: replace(
        _VIT,
        head=(*_VIT.head, "time_embed", "time_blocks"),
        finish=families.pooled_frames_then_head,
    ),
}


def layout_of(model: nn.Module) -> Layout | None:
    """Return the layout of a timm model, or None for a class that can only run whole.

    Raises:
        ConfigError: If the model has a part that the layout of its class does not name.
    """
    layout = LAYOUTS.get(type(model))
    if layout is None:
        return None
    known = {*layout.embed, *layout.head, *layout.tables, *layout.of_block(model), layout.blocks}
    unknown = [name for name in _parts(model, layout.owner) if name not in known]
    if unknown:
        raise ConfigError(
            f"the stage layout of {type(model).__name__} does not say where {', '.join(unknown)} belongs; a stage that "
            f"lacked it would give wrong numbers. Use the timm of requirements.txt, or a model as timm makes it."
        )
    return layout


def _parts(model: nn.Module, owner: str) -> list[str]:
    """Return the paths of what a model holds, with those of what the owner of its blocks holds."""
    holders = {"": model} | ({f"{owner}.": model.get_submodule(owner)} if owner else {})
    return [
        prefix + name
        for prefix, holder in holders.items()
        for kind in (holder._parameters, holder._buffers, holder._modules)
        for name, part in kind.items()
        if part is not None and prefix + name != owner
    ]
