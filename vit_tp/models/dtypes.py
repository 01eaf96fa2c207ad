"""What compute.dtype means in torch's words, and which models it suits."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vit_tp.errors import ConfigError

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
