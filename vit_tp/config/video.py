"""Do the choices about clips make sense together, whatever the model?

Does not know: names and ranges (limits.py), models (vit_tp/models/video.py refuses what a model cannot).
"""

from __future__ import annotations

from collections.abc import Iterator

from vit_tp.config.limits import NAMES
from vit_tp.config.schema import VideoConfig

ATTENTIONS, POSITIONS, INFLATIONS = (
    NAMES[f"model.video.{name}"] for name in ("attention", "position", "inflation")
)  # fmt: skip


def video_complaints(video: VideoConfig, knob: str = "model.video.") -> Iterator[str]:
    """Yield a sentence for each combination that cannot be.

    Args:
        video: The choices; the numbers are in range.
        knob: How a field is typed: "model.video." on a command line, "" in a call of `vit_tp.video_model`.
    """
    frames, tubelet = video.num_frames, video.tubelet_size
    if frames is None or frames < 1 or tubelet < 1:  # said elsewhere
        return
    if frames % tubelet:
        fewer, more = frames // tubelet * tubelet, -(-frames // tubelet) * tubelet
        either = f"{knob}num_frames={more}" + (f", {knob}num_frames={fewer}" if fewer else "")
        yield (
            f"{knob}num_frames={frames} is not a multiple of {knob}tubelet_size={tubelet}; the last token of a clip "
            f"would lack frames. Use {either} or {knob}tubelet_size=1."
        )
    if video.position == "rope" and video.attention != "joint":
        yield (
            f"{knob}position=rope does not go with {knob}attention={video.attention}; rotary tables turn the tokens of "
            f"a whole clip, and there each frame attends for itself. "
            f"Use {knob}attention=joint, or {knob}position=learned."
        )
