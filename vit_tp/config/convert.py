"""A configuration as a dictionary and back, its fingerprint, its hash and its folder.

Does not know: YAML files (compose.py), nor which values make sense (checks.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, get_type_hints

from vit_tp.config.batch import batch_plan, eval_views
from vit_tp.config.folder import RunFolder
from vit_tp.config.schema import FIRST_HALF, SECOND_HALF, Config, DataConfig, list_knobs
from vit_tp.config.types import close_names, fit, show
from vit_tp.errors import ConfigError

READING = ("root", "num_workers", "prefetch", "timeout_s", "max_bad_fraction")
"""Knobs of the data group that change no sample."""
PROTOCOL = ("eval_crop", "eval_clips", "eval_crops")
"""Knobs of the data group that say how a model is judged."""
EVALUATION = tuple(f"data.{knob}" for knob in (*READING, *PROTOCOL, "decoder", "decoder_device"))
"""What an evaluation may do otherwise than its run, beside the second half."""


def to_dict(config: Config) -> dict[str, Any]:
    """Return plain nested dictionaries. *Inverse*: `from_dict`."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> Config:
    """Build a configuration; knobs that are not named keep their defaults. *Inverse*: `to_dict`.

    Raises:
        ConfigError: Every unknown knob and every value of a wrong type, at once.
    """
    complaints: list[str] = []
    config = _build(Config, values, "", complaints)
    if complaints:
        raise ConfigError(complaints)
    return config


def unknown_knob(path: str) -> str:
    """Return the complaint about a knob that does not exist, with the close ones."""
    paths = [knob.path for knob in list_knobs()]
    last = {known: known.rsplit(".", 1)[-1] for known in paths}
    # `lr` for `recipe.optimizer.lr`, and a mistyped last word, come before a whole path that merely looks alike.
    word = path.rsplit(".", 1)[-1]
    close = [known for known in paths if last[known] == word]
    close = close or close_names(path, [known for known in paths if close_names(word, [last[known]], 0.7)], 0.5)
    close = close or close_names(path, [*paths, *FIRST_HALF, *SECOND_HALF], 0.7)
    advice = f"Did you mean {' or '.join(close)}?" if close else "`vit-tp train --help` lists all knobs."
    return f"There is no knob {path}; nothing would read it. {advice}"


def wrong_type(path: str, value: Any, wanted: str, default: Any) -> str:
    """Return the complaint about a value that does not fit its knob."""
    return f"{path}={show(value)} is not {wanted}; the knob takes nothing else. Use for example {path}={show(default)}."


def run_folder(config: Config) -> RunFolder:
    """Return <run.dir>/<run.name>: no clock and no counter, so that all ranks agree."""
    return RunFolder(Path(config.run.dir) / config.run.name)


def eval_tag(config: Config) -> str:
    """Return the name of a grid, a dtype and a protocol; <run>/eval/<tag>.json holds what was measured so.

    Args:
        config: Of the evaluation, parallel.dp known.
    """
    parallel, data = config.parallel, config.data
    views = f"_{data.eval_clips}x{data.eval_crops}" if eval_views(config) > 1 else ""
    crop = "" if data.eval_crop == DataConfig().eval_crop else f"_crop{data.eval_crop:g}"
    return f"pp{parallel.pp}_dp{parallel.dp}_tp{parallel.tp}_{config.compute.dtype}{views}{crop}"


def fingerprint(config: Config, dp_size: int | None = None) -> str:
    """Hash what is learnt: two runs with one fingerprint follow one loss curve.

    Where samples of one micro-batch see one another, or random numbers are drawn per micro-batch (mixing, drop path,
    dropout), the micro-batch is part of what is learnt and joins. So does parallel.tp where masks are drawn inside
    attention or MLP, by each tensor-parallel rank for its heads and columns, and where not all channels are summed
    (recipe.sync=partial); and parallel.sequence, where dropout between blocks then draws for each token of a rank.
    data.root is left out: the same data may lie elsewhere. So is how fast and how patiently it is read, and how a
    model is judged.

    Args:
        config: The whole configuration.
        dp_size: Replicas that there really are, needed only where both parallel.dp and compute.micro_batch_size are
            null.

    Returns:
        64 hexadecimal digits.
    """
    values = _typed(config)
    learnt = {group: values[group] for group in FIRST_HALF}
    learnt["seed"] = config.run.seed
    for knob in (*READING, *PROTOCOL):
        del learnt["data"][knob]
    if is_micro_batch_learnt(config):
        learnt["micro_batch_size"] = batch_plan(config, dp_size or config.parallel.dp or 1).micro_batch_size
    draws_apart = any(config.model.kwargs.get(rate) for rate in ("attn_drop_rate", "proj_drop_rate"))
    if is_one_model(config):
        del learnt["recipe"]["sync"], learnt["recipe"]["sync_fraction"]
    if config.model.kwargs.get("proj_drop_rate") and config.parallel.tp > 1:
        learnt["sequence"] = config.parallel.sequence
    if draws_apart or not is_one_model(config):
        learnt["tp"] = config.parallel.tp
    return _digest(learnt)


def is_micro_batch_learnt(config: Config) -> bool:
    """Say whether the size of a micro-batch changes the loss curve."""
    mixing = config.recipe.mixing
    drawn = any("drop" in key and key.endswith("rate") and rate for key, rate in config.model.kwargs.items())
    return drawn or mixing.mixup_alpha > 0 or mixing.cutmix_alpha > 0 or mixing.cutmix_minmax is not None


def is_one_model(config: Config) -> bool:
    """Say whether the weights, merged, are one model on any tp; with partial sums each rank has a stream of its own."""
    recipe = config.recipe
    return recipe.sync != "partial" or recipe.sync_fraction == 1 or config.parallel.tp == 1


def config_hash(config: Config) -> str:
    """Hash everything: ranks that were started by hand compare it."""
    return _digest(_typed(config))


def _typed(config: Config) -> dict[str, Any]:
    # lr: 1 and lr: 1.0 are one value, but not one JSON text.
    return to_dict(from_dict(to_dict(config)))


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _build(schema: Any, values: Any, prefix: str, complaints: list[str]) -> Any:
    if not isinstance(values, dict):
        group = prefix.rstrip(".") or "config"
        complaints.append(
            f"{group}={show(values)} is one value, {group} a group of knobs; none of them would be set. "
            f"Use {group}.<knob>=<value>; `vit-tp train --help` lists them."
        )
        return schema()
    hints, config = get_type_hints(schema), schema()
    for key, value in values.items():
        path = f"{prefix}{key}"
        if key not in hints:
            complaints.append(unknown_knob(path))
        elif dataclasses.is_dataclass(hints[key]):
            setattr(config, key, _build(hints[key], value, path + ".", complaints))
        else:
            try:
                setattr(config, key, fit(value, hints[key]))
            except TypeError as error:
                complaints.append(wrong_type(path, value, str(error), getattr(config, key)))
    return config
