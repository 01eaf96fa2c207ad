"""Which of timm's names can be cut, and why not the others?

timm files its models by module: one for each family. `REFUSED` holds every module that is not cut; the tests hold those
that are, and find a family that a new release brings in neither. Does not know: how a class is cut (rules_*.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import timm
import timm.models
from torch import nn

from vit_tp.errors import ConfigError

HIERARCHICAL = (
    "hierarchical, and as width and number of tokens change from stage to stage there is no one list of equal blocks "
    "to share out"
)
HYBRID = (
    "a hybrid, and as its stages of convolutions, recurrences or attention differ from one another there is no one "
    "list of equal blocks to share out"
)
CONVOLUTIONAL = "a convolutional network, without attention heads or transformer MLPs to share out"

REFUSED: dict[str, tuple[str, ...]] = {
    HIERARCHICAL: (
        *("coat", "davit", "gcvit", "hiera", "hieradet_sam2", "levit", "maxxvit", "mvitv2", "nest", "pit", "pvt_v2"),
        *("swin_transformer", "swin_transformer_v2", "swin_transformer_v2_cr", "tiny_vit", "twins", "visformer"),
        "volo",
    ),
    HYBRID: (
        *("byoanet", "cpubone", "csatv2", "edgenext", "efficientformer", "efficientformer_v2", "efficientvim"),
        *("efficientvit_mit", "efficientvit_msra", "fastvit", "focalnet", "iformer", "lowformer", "metaformer"),
        *("mobilenetv5", "mobilevit", "nextvit", "repvit", "sequencer", "shvit", "swiftformer"),
    ),
    CONVOLUTIONAL: (
        *("byobnet", "convmixer", "convnext", "cspnet", "cspnext", "densenet", "dla", "dpn", "efficientnet"),
        *("fasternet", "ghostnet", "hardcorenas", "hgnet", "hrnet", "inception_next", "inception_resnet_v2"),
        *("inception_v3", "inception_v4", "lcnetv2", "mambaout", "mobilenetv3", "nasnet", "nfnet", "pnasnet", "rdnet"),
        *("regnet", "repghost", "res2net", "resnest", "resnet", "resnetv2", "rexnet", "selecsls", "senet", "sknet"),
        *("starnet", "tresnet", "vgg", "vovnet", "xception", "xception_aligned"),
    ),
}
"""Why a family is refused -> its modules."""


def list_cuttable(patterns: Iterable[str] = ()) -> list[str]:
    """Return the names of models that can be cut, those of plugins included, in timm's order.

    Args:
        patterns: Shell patterns, any of which a name is to fit; none: all names.

    Raises:
        ConfigError: For each pattern that fits nothing, with the reason.
    """
    refused = {module for modules in REFUSED.values() for module in modules}
    names = [
        name for module in timm.list_modules() if module not in refused for name in timm.list_models(module=module)
    ]
    patterns = list(patterns)
    if not patterns:
        return names
    chosen = {pattern: set(timm.list_models(pattern.split(".")[0])) for pattern in patterns}
    complaints = [_nothing(pattern, found) for pattern, found in chosen.items() if found.isdisjoint(names)]
    if complaints:
        raise ConfigError(complaints)
    return [name for name in names if any(name in found for found in chosen.values())]


def require_cuttable(name: str) -> None:
    """Raise if a name belongs to a family of timm that is not cut.

    Raises:
        ConfigError: With the reason, and a name to use.
    """
    bare = name.split(".")[0]
    for reason, modules in REFUSED.items():
        if timm.models.is_model_in_modules(bare, modules):
            raise ConfigError(f"model.timm={name} {_cannot(reason)}")


def why_refused(kind: type[nn.Module]) -> str | None:
    """Return the end of a sentence on a class of a family that is not cut, None for any other."""
    module = kind.__module__.removeprefix("timm.models.")
    reason = next((reason for reason, modules in REFUSED.items() if module in modules), None)
    return None if reason is None else _cannot(reason)


def _cannot(reason: str) -> str:
    return (
        f"cannot be cut: it is {reason}. Use an isotropic model, such as vit_small_patch16_224; "
        f"`vit-tp doctor --models` lists them all."
    )


def _nothing(pattern: str, found: set[str]) -> str:
    if found:
        first = min(found)
        reasons = [reason for reason, modules in REFUSED.items() if timm.models.is_model_in_modules(first, modules)]
        return f"{first if len(found) > 1 else pattern} {_cannot(*reasons)}"
    close = difflib.get_close_matches(pattern, list_cuttable(), n=4, cutoff=0.5)
    hint = f"Did you mean {', '.join(close)}?" if close else "Use a shell pattern, such as 'vit_base*'."
    return f"{pattern} fits no model of timm {timm.__version__}. {hint}"
