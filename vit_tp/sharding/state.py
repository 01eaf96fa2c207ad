"""From slices to full tensors under timm's names."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vit_tp.errors import ShardRuleError
from vit_tp.sharding.placement import Sharded, placement_of


def full_tensor(param: nn.Parameter, local: Tensor, tp_group: ProcessGroup) -> Tensor:
    """Return the whole of one parameter on every rank. Collective over `tp_group` where the parameter is cut.

    Args:
        param: The parameter, for its placement.
        local: This rank's slice: its data, or its fp32 master.
        tp_group: The ranks that share each weight.
    """
    placement = placement_of(param)
    if not isinstance(placement, Sharded) or tp_group.size() == 1:
        return local.detach()
    local = local.detach().contiguous()
    slices = [torch.empty_like(local) for _ in range(tp_group.size())]
    dist.all_gather(slices, local, group=tp_group)
    return placement.merge(slices)


def full_state_dict(model: nn.Module, tp_group: ProcessGroup) -> dict[str, Tensor]:
    """Return the state dict that stock timm loads strictly, on every rank. Collective over `tp_group`.

    Args:
        model: A model cut by `shard_`.
        tp_group: The group it was cut over.

    Raises:
        ShardRuleError: If its ranks sum some channels only, so that stock timm would give other logits.
    """
    if hasattr(model, "tp_cut") and not model.tp_cut.region.is_one_model:
        raise ShardRuleError(
            f"this model sums {model.tp_cut.region.fraction:g} of its channels over {tp_group.size()} ranks, which "
            f"keep streams of their own; merged, its weights would be another model. Save model.state_dict() on each."
        )
    params = dict(model.named_parameters())
    return {
        name: full_tensor(params[name], params[name], tp_group).clone() if name in params else tensor.clone()
        for name, tensor in model.state_dict().items()
    }
