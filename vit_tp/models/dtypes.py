"""What compute.dtype means in torch's words, and which models it suits."""

import torch
from timm.layers import RotaryEmbedding, RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed
from timm.layers.pos_embed_sincos import RotaryEmbeddingMRope
from timm.models.gemma4_vit import Gemma4RotaryEmbedding2D
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vit_tp.errors import ConfigError

ROTARY = (
    *(RotaryEmbedding, RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed, RotaryEmbeddingMRope),
    Gemma4RotaryEmbedding2D,
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def require_castable(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise if a model does not run with weights of that type.

    Raises:
        ConfigError: For BatchNorm in a half type.
    """
    number = sum(isinstance(module, _BatchNorm) for module in model.modules())
    if number and dtype in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"compute.dtype={'bf16' if dtype is torch.bfloat16 else 'fp16'} does not go with the {number} BatchNorm "
            f"layers of this model; their statistics stay in fp32, and torch does not mix them with half weights. "
            f"Use compute.dtype=fp32."
        )


def cast_buffers_(model: nn.Module, dtype: torch.dtype) -> None:
    """Give floating-point buffers the type of the weights that they meet, which DeepSpeed leaves as they were.

    Rotary tables stay in fp32: timm casts what it rotates, and half positions would be coarser than half weights.
    """
    for module in model.modules():
        if isinstance(module, ROTARY):
            continue
        for name, tensor in module._buffers.items():
            if tensor is not None and tensor.is_floating_point():
                module._buffers[name] = tensor.to(dtype)
