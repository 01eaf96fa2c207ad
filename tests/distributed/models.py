"""Small timm models and batches, and their single-process training with stock timm and stock torch: the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import timm.optim
import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALL: dict[str, Any] = {
    "img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4, "num_classes": 10,
}  # fmt: skip
RICH: dict[str, Any] = {**SMALL, "qk_norm": True, "init_values": 0.5, "reg_tokens": 2, "class_token": True}
LR = 1e-3
WEIGHT_DECAY = 0.05


def small_vit(device: str = "cpu", **kwargs: Any) -> nn.Module:
    """A small stock timm model, the same in every process."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        return timm.create_model("vit_tiny_patch16_224", **{**SMALL, **kwargs})


def randomise_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter a random value, so that no zero bias or unit scale hides a fault."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_((param + noise * 0.1).to(param.dtype))
    return model


def batches(steps: int, global_batch_size: int, seed: int = 0, num_classes: int = 10, size: int = 32) -> list:
    """Global batches (images, targets) of random pixels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(global_batch_size, 3, size, size, generator=generator),
            torch.randint(0, num_classes, (global_batch_size,), generator=generator),
        )
        for _ in range(steps)
    ]


def own_micro_batches(images: Tensor, targets: Tensor, dp_rank: int, dp_size: int, grad_accum_steps: int) -> list:
    """One replica's micro-batches of a global batch, in order."""
    pieces = list(zip(images.chunk(dp_size * grad_accum_steps), targets.chunk(dp_size * grad_accum_steps)))
    return pieces[dp_rank * grad_accum_steps : (dp_rank + 1) * grad_accum_steps]


def stock_training(
    state: dict[str, Tensor],
    data: list,
    kwargs: dict[str, Any],
    clip: float | None = 1.0,
    grad_accum_steps: int = 1,
    dtype: torch.dtype = torch.float32,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train with stock timm, timm's decay groups and torch's AdamW; return losses, norms and final weights.

    In bf16 as common practice has it: bf16 weights and activations, fp32 gradient sums and master weights.
    """
    model = small_vit(**kwargs)
    model.load_state_dict(state, strict=True)
    masters = small_vit(**kwargs)
    masters.load_state_dict(state, strict=True)
    model = model.to(dtype)
    groups = timm.optim.param_groups_weight_decay(masters, WEIGHT_DECAY, no_weight_decay_list=masters.no_weight_decay())
    optimizer = torch.optim.AdamW(groups, lr=LR)
    losses, norms = [], []
    for images, targets in data:
        total = 0.0
        for x, y in zip(images.chunk(grad_accum_steps), targets.chunk(grad_accum_steps)):
            loss = loss_fn(model(x.to(dtype)).float(), y) / grad_accum_steps
            loss.backward()
            total += loss.item()
            for master, param in zip(masters.parameters(), model.parameters()):
                master.grad = param.grad.float() if master.grad is None else master.grad + param.grad.float()
                param.grad = None
        norms.append(nn.utils.clip_grad_norm_(masters.parameters(), clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, param in zip(masters.parameters(), model.parameters()):
                param.copy_(master)
        losses.append(total)
    return losses, norms, {name: p.detach().clone() for name, p in masters.named_parameters()}
