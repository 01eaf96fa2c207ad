"""Tensor- and pipeline-parallel training of timm vision transformers on DeepSpeed.

The verbs for people with their own loop, imported when first used, so that `import vit_tp` is free:

    shard_(model, tp_group)              cut a timm model in place
    finish_gradients_(model)             complete partial gradients, return their true norm
    full_state_dict(model, tp_group)     full tensors under timm's names
    pipeline(model, topology, loss_fn)   a DeepSpeed PipelineModule of this rank's stages
    ShardedCrossEntropy(tp_group, K)     the loss of cut logits, with gather_logits=False in the verbs that cut
    initialize(pipe, config)             a DeepSpeed engine with a right norm
    Topology(pp, dp, tp)                 the grid of ranks
    build_groups(topology)               this rank's peers, where they are wanted before the pipeline
    register_rule(kind, ShardRule(...))  how a class of yours is cut
    video_model(model, num_frames)       a timm image model that takes clips, before it is cut
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit_tp.models.video_build import video_model
    from vit_tp.parallel.cross_entropy import ShardedCrossEntropy
    from vit_tp.parallel.groups import build_groups
    from vit_tp.parallel.topology import Topology
    from vit_tp.sharding.convert import shard_
    from vit_tp.sharding.gradients import finish_gradients_
    from vit_tp.sharding.rule import ShardRule
    from vit_tp.sharding.rules import register_rule
    from vit_tp.sharding.state import full_state_dict
    from vit_tp.train.engine import initialize
    from vit_tp.train.pipeline import pipeline

__version__ = "0.1.0"

_HOMES = {
    "ShardRule": "vit_tp.sharding.rule",
    "ShardedCrossEntropy": "vit_tp.parallel.cross_entropy",
    "Topology": "vit_tp.parallel.topology",
    "build_groups": "vit_tp.parallel.groups",
    "finish_gradients_": "vit_tp.sharding.gradients",
    "full_state_dict": "vit_tp.sharding.state",
    "initialize": "vit_tp.train.engine",
    "pipeline": "vit_tp.train.pipeline",
    "register_rule": "vit_tp.sharding.rules",
    "shard_": "vit_tp.sharding.convert",
    "video_model": "vit_tp.models.video_build",
}
__all__ = [
    "ShardRule",
    "ShardedCrossEntropy",
    "Topology",
    "build_groups",
    "finish_gradients_",
    "full_state_dict",
    "initialize",
    "pipeline",
    "register_rule",
    "shard_",
    "video_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
