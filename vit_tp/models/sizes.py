"""What changes in stages that exist when their input has another size?

Rows and columns of patches, from which blocks make rotary tables, and the number of tokens. Parameters do not: a learnt
position table keeps its size and is resampled in forward (timm's dynamic_img_size).

Does not know: when the size changes, ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from vit_tp.errors import ConfigError
from vit_tp.models.build import input_shape
from vit_tp.models.families import Grid
from vit_tp.models.layouts import layout_of
from vit_tp.models.stages import BlockStage, EmbedStage, HeadStage, Stage, count_tokens


@dataclass(frozen=True)
class Arrangement:
    """What stages must know of an input size.

    Args:
        input_size: Height and width in pixels; of clips, the number of frames before them.
        grid: Rows and columns of patches; None where nothing depends on them.
        num_tokens: {is training: N} between blocks.
    """

    input_size: tuple[int, ...]
    grid: Grid | None
    num_tokens: dict[bool, int]

    def apply_(self, stage: Stage) -> None:
        """Arrange a stage for this size, in place."""
        if isinstance(stage, EmbedStage) and stage.img_size is not None:
            stage.img_size = self.input_size
        if isinstance(stage, (BlockStage, HeadStage)):
            stage.grid = self.grid


UNARRANGED = Arrangement((), None, {})
"""Of stages whose input has one size, over a stream that is whole on each rank."""


def arrange(model: nn.Module, img_size: tuple[int, int]) -> Arrangement:
    """Return what a model's stages must know of an input size.

    Args:
        model: The whole model.
        img_size: Height and width in pixels.

    Raises:
        ConfigError: The model does not take that size.
    """
    layout = layout_of(model)
    _, _, *own = input_shape(model, 1)
    input_size = (*own[:-2], *img_size)
    try:
        num_tokens = count_tokens(model, input_size)
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).partition(". Use ")[0].rstrip(".")  # timm's, or that of a refusal with advice of its own
        raise ConfigError(
            f"images of {' x '.join(map(str, img_size))} pixels do not fit the model: {reason}. Use multiples of its "
            f"patch size in recipe.resolution_schedule."
        ) from error
    grid = layout.grid(model.get_submodule(layout.owner), input_size) if layout and layout.grid else None
    return Arrangement(input_size, grid, num_tokens)
