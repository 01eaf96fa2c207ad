"""Where in space and time is a token? A fixed table of three axes, and timm's rotary tables turned in time.

Does not know: which model asks, prefix tokens, learnt tables (video.py).
"""

from __future__ import annotations

import torch
from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed
from timm.layers.pos_embed_sincos import RotaryEmbeddingMRope
from torch import Tensor, nn

TEMPERATURE = 10000.0
TIME_TEMPERATURE = 100.0
TURNING_EVERY = 3


def sincos_table(times: int, rows: int, columns: int, width: int, like: Tensor) -> Tensor:
    """Return the fixed position table (T, rows, columns, C).

    Each axis has a third of the channels, 2 ceil(C/6), in the order time, rows, columns, and the last one is cut short
    where three of them are more than C; within an axis all sines come before all cosines.

    Args:
        times: Tubelets, T.
        rows: Of patches.
        columns: Of patches.
        width: Channels, C; even.
        like: A tensor of the type and device wanted.

    Source: facebookresearch/jepa, src/models/utils/pos_embs.py, get_3d_sincos_pos_embed with uniform_power=True.
    """
    third = 2 * -(-width // 6)
    along = [_sincos(length, third, like) for length in (times, rows, columns)]
    shape = (times, rows, columns, third)
    parts = [
        axis.view(*(-1 if dim == own else 1 for dim in range(3)), third).expand(shape) for own, axis in enumerate(along)
    ]
    return torch.cat(parts, dim=-1)[..., :width]


def _sincos(length: int, width: int, like: Tensor) -> Tensor:
    """(length, width): sines, then cosines."""
    wide = {"dtype": torch.float64, "device": "cpu" if like.device.type == "mps" else like.device}
    bands = TEMPERATURE ** -(torch.arange(width // 2, **wide) / (width // 2))
    angles = torch.outer(torch.arange(length, **wide), bands)
    return torch.cat((angles.sin(), angles.cos()), dim=1).to(like)


class _InTime(nn.Module):
    """A rotary table of timm for every frame of a clip: (..., T S, 2D) in place of (..., S, 2D).

    A pair of channels that timm turns by an angle for the place is turned further by one for the time, if it is one of
    every third; scores then depend on distances in time, rows and columns. At time 0, and so for a clip of one
    tubelet, the table is the image model's own to the last bit.

    Attributes:
        num_times: Tubelets, T.
        turns_in_time: Whether time turns anything; else all frames have the image's table.

    Source: angles of several axes added up in a pair, as in RoPE-mixed of arXiv 2403.13298, section 3.2; pairs of time
    spread among those of space, as in timm's RotaryEmbeddingMRope.
    """

    num_times: int
    turns_in_time: bool

    def get_embed(self, shape: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return [sin, cos] for every token of a clip, (T S, 2D), or with learnt frequencies (depth, H, T S, 2D)."""
        table = super().get_embed(shape) if shape is not None else super().get_embed()
        table = turn_in_time(table, self.num_times, self._is_half()) if self.turns_in_time else self._repeat(table)
        return table if dtype is None else table.to(dtype)

    def _is_half(self) -> bool:
        # timm's tables say it in an attribute, but for MRope, which lays halves out always and has none
        return isinstance(self, RotaryEmbeddingMRope) or getattr(self, "rotate_half", False)

    def _repeat(self, table: Tensor) -> Tensor:
        return table.repeat(*(1,) * (table.ndim - 2), self.num_times, 1)


class VideoRopeCat(_InTime, RotaryEmbeddingCat):
    """timm's axial table, in time."""


class VideoRopeDinoV3(_InTime, RotaryEmbeddingDinoV3):
    """DINOv3's table, in time."""


class VideoRopeMRope(_InTime, RotaryEmbeddingMRope):
    """timm's interleaved table, in time."""


class VideoRopeMixed(_InTime, RotaryEmbeddingMixed):
    """timm's table with learnt frequencies of space, in time."""


IN_TIME: dict[type[nn.Module], type[nn.Module]] = {
    RotaryEmbeddingCat: VideoRopeCat,
    RotaryEmbeddingDinoV3: VideoRopeDinoV3,
    RotaryEmbeddingMRope: VideoRopeMRope,
    RotaryEmbeddingMixed: VideoRopeMixed,
}


def in_time_(rope: nn.Module, num_times: int, turns_in_time: bool) -> None:
    """Turn a rotary embedding of timm into one of clips, in place."""
    rope.__class__ = IN_TIME[type(rope)]
    rope.num_times, rope.turns_in_time = num_times, turns_in_time


def turn_in_time(table: Tensor, num_times: int, is_half: bool) -> Tensor:
    """(..., S, 2D) of one frame -> (..., T S, 2D): every third pair is turned by t TIME_TEMPERATURE^(-j/n) more.

    Pair j of n pairs of time; the first turns by a radian from one tubelet to the next.

    Args:
        table: Sines, then cosines.
        num_times: Tubelets, T.
        is_half: Whether the pairs of a head are (i, i + D/2); else (2i, 2i + 1).
    """
    sin, cos = (part.unsqueeze(-3) for part in table.chunk(2, dim=-1))  # (..., 1, S, D)
    num_pairs = sin.shape[-1] // 2
    wide = torch.promote_types(table.dtype, torch.float32)
    turning = torch.arange(0, num_pairs, TURNING_EVERY, device=table.device)
    speed = torch.zeros(num_pairs, dtype=wide, device=table.device)
    speed[turning] = TIME_TEMPERATURE ** -(torch.arange(len(turning), dtype=wide, device=table.device) / len(turning))
    angles = torch.outer(torch.arange(num_times, dtype=wide, device=table.device), speed)
    angles = torch.cat((angles, angles), dim=-1) if is_half else angles.repeat_interleave(2, dim=-1)
    turn_sin, turn_cos = (part.unsqueeze(1) for part in (angles.sin(), angles.cos()))  # (T, 1, D)
    turned = (sin * turn_cos + cos * turn_sin, cos * turn_cos - sin * turn_sin)
    return torch.cat(turned, dim=-1).flatten(-3, -2).to(table.dtype)
