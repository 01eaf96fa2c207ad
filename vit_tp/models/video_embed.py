"""From a clip to tokens: timm's patch embedding over several frames at once.

Does not know: positions, attention, checkpoints.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from torch import Tensor, nn

from vit_tp.errors import ConfigError


class TubeletEmbed(PatchEmbed):
    """(B, channels, T, Y, X) -> (B, T/t, Y/p, X/p, C): one token for t frames of a patch.

    Made from timm's own embedding of images, whose names and sizes it keeps; `proj` is a torch.nn.Conv3d whose stride
    is its kernel. Its product is computed as a linear layer of unfolded tubelets, which is the same sum: convolutions
    over time in half types are slow, and in torch 2.9 large.

    Attributes:
        tubelet_size: Frames that a token covers, t.
        num_times: Tokens of a clip along time, T/t.
    """

    tubelet_size: int
    num_times: int

    def forward(self, x: Tensor) -> Tensor:
        self._require_clip(x)
        if self.dynamic_img_pad:
            rows, columns = self.patch_size
            x = F.pad(x, (0, -x.shape[4] % columns, 0, -x.shape[3] % rows))
        for dim, side in ((2, self.tubelet_size), (4, self.patch_size[0]), (6, self.patch_size[1])):
            x = x.unflatten(dim, (-1, side))
        x = x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)  # (B, T/t, Y/p, X/p, channels * t * p * p)
        return self.norm(F.linear(x, self.proj.weight.flatten(1), self.proj.bias))

    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None
    ) -> None:
        """Take images of another size; patches keep theirs.

        Raises:
            ConfigError: If the size of patches is to change.
        """
        if patch_size is not None and tuple(patch_size) != self.patch_size:
            raise ConfigError(
                f"patch_size={patch_size} cannot be set on a video model, whose kernel is {self.proj.kernel_size}; "
                f"timm resamples kernels of images only. Set it on the image model, before it becomes a video model."
            )
        super().set_input_size(img_size)

    def _require_clip(self, x: Tensor) -> None:
        num_frames = self.num_times * self.tubelet_size
        if x.ndim != 5 or x.shape[2] != num_frames:
            raise ConfigError(
                f"a video model of {num_frames} frames was given {tuple(x.shape)}; it takes clips "
                f"(B, channels, T, Y, X) of that many frames. Use such clips, or another model.video.num_frames."
            )
        size = tuple(x.shape[3:])
        if self.strict_img_size and size != tuple(self.img_size):
            raise ConfigError(
                f"frames are {size[0]} x {size[1]} and the model was made for {self.img_size[0]} x {self.img_size[1]}; "
                f"its position table would not fit. Use frames of that size, model.img_size=[{size[0]},{size[1]}], or "
                f"model.kwargs.dynamic_img_size=true."
            )
        if not self.dynamic_img_pad and any(side % patch for side, patch in zip(size, self.patch_size)):
            raise ConfigError(
                f"frames are {size[0]} x {size[1]}, which patches of {self.patch_size[0]} x {self.patch_size[1]} do "
                f"not divide; pixels would be left over. Use a model.img_size that they divide."
            )


@torch.no_grad()
def inflate(kernel: Tensor, tubelet_size: int, inflation: str) -> Tensor:
    """Return the kernel (C, channels, t, p, p) of clips from one of images, (C, channels, p, p).

    Either way a clip of equal frames makes the tokens of its frame.

    Args:
        kernel: Of an image model.
        tubelet_size: Frames that a token covers, t.
        inflation: "mean": each frame has the kernel over t; "central": the middle frame has all of it.

    Source: ViViT, arXiv 2103.15691, section 3.4, which calls them filter inflation and central frame initialisation.
    """
    if inflation == "mean":
        return kernel.unsqueeze(2).repeat(1, 1, tubelet_size, 1, 1) / tubelet_size
    inflated = kernel.new_zeros((*kernel.shape[:2], tubelet_size, *kernel.shape[2:]))
    inflated[:, :, tubelet_size // 2] = kernel
    return inflated


def over_time_(embed: PatchEmbed, num_frames: int, tubelet_size: int, inflation: str) -> TubeletEmbed:
    """Turn timm's patch embedding of images into one of clips, in place."""
    image, trains = embed.proj, embed.proj.weight.requires_grad
    kernel = (tubelet_size, *embed.patch_size)
    has_bias = image.bias is not None
    proj = nn.Conv3d(image.in_channels, image.out_channels, kernel, kernel, bias=has_bias, device="meta")
    proj.weight = nn.Parameter(inflate(image.weight, tubelet_size, inflation), requires_grad=trains)
    proj.bias = image.bias
    proj.train(image.training)
    embed.__class__ = TubeletEmbed
    embed.proj, embed.tubelet_size, embed.num_times = proj, tubelet_size, num_frames // tubelet_size
    return embed
