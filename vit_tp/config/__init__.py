"""Every knob, what may not be combined, and what the knobs say about batches and run folders.

    schema     the dataclasses: name, type, default and one line of text of each knob
    types      does a value fit its knob's type
    convert    dictionaries, fingerprint, hash, run folder
    folder     where everything of a run lies
    atomic     files that are there whole or not at all
    batch      how a global batch is made of micro-batches
    limits     names and ranges that a knob takes
    checks     check(): all complaints at once

Does not know: torch, timm, DeepSpeed, Hydra, nor what a model looks like inside (train/preflight.py asks timm).
"""

from vit_tp.config.batch import BatchPlan, batch_plan, eval_batch_plan, eval_views
from vit_tp.config.checks import check
from vit_tp.config.convert import (
    EVALUATION,
    config_hash,
    eval_tag,
    fingerprint,
    from_dict,
    is_one_model,
    run_folder,
    to_dict,
)
from vit_tp.config.folder import RunFolder
from vit_tp.config.schema import (
    FIRST_HALF,
    SECOND_HALF,
    ClusterConfig,
    ComputeConfig,
    Config,
    DataConfig,
    Knob,
    LogConfig,
    MixingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RecipeConfig,
    RunConfig,
    ScheduleConfig,
    TaskConfig,
    list_knobs,
)

__all__ = [
    "EVALUATION",
    "FIRST_HALF",
    "SECOND_HALF",
    "BatchPlan",
    "ClusterConfig",
    "ComputeConfig",
    "Config",
    "DataConfig",
    "Knob",
    "LogConfig",
    "MixingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RecipeConfig",
    "RunConfig",
    "RunFolder",
    "ScheduleConfig",
    "TaskConfig",
    "batch_plan",
    "check",
    "config_hash",
    "eval_batch_plan",
    "eval_tag",
    "eval_views",
    "fingerprint",
    "from_dict",
    "is_one_model",
    "list_knobs",
    "run_folder",
    "to_dict",
]
