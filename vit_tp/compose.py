"""From overrides and conf/ to one Config, through Hydra; and a Config to a file and back.

Runs once, in the process that launches; ranks read the file. Hydra names only the first unknown key, so all are looked
for here before it is asked. Does not know: what the values mean (config/), nor how ranks are started (launch/).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vit_tp.config import Config, Knob, from_dict, list_knobs, to_dict
from vit_tp.config.atomic import create_atomically, write_atomically
from vit_tp.config.convert import unknown_knob, wrong_type
from vit_tp.config.types import close_names, fit
from vit_tp.errors import ConfigError

CONF = "vit_tp.conf"
PATTERNS = ("data.train_shards", "data.val_shards")  # of file names
FREE = "model.kwargs."  # below it any key may be named: it goes to timm


def compose(overrides: Sequence[str]) -> Config:
    """Fill the schema from conf/ and the command line.

    Args:
        overrides: As typed, for example `experiment=digits_smoke`, `parallel.tp=2`, `model.kwargs.depth=4`.

    Raises:
        ConfigError: Every unknown knob, unknown choice and value of a wrong type, at once.
    """
    _require_no_expansion(overrides)
    overrides = [_quoted(text) for text in overrides]
    ConfigStore.instance().store(name="vit_tp_schema", node=Config)
    with initialize_config_module(CONF, version_base="1.3"):
        _refuse(overrides)
        try:
            composed = hydra_compose("config", overrides=[_open_kwargs(text) for text in overrides])
            values = OmegaConf.to_container(composed, resolve=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_whole_message(error)) from None
    return from_dict(values)  # type: ignore[arg-type]


def override(config: Config, overrides: Sequence[str], groups: Sequence[str]) -> Config:
    """Change some groups of a configuration that was loaded from a file.

    A chosen group (`parallel=tp2`) replaces the whole group; a knob (`parallel.tp=2`) replaces one value.

    Args:
        config: Stays as it is.
        overrides: As typed.
        groups: Groups, and single knobs by their whole name, that may change.

    Raises:
        ConfigError: As `compose`, and for each override of another group.
    """
    other = [text for text in overrides if not {_key(text).split(".")[0], _key(text)} & set(groups)]
    if other:
        allowed = ", ".join(name if "." in name else f"{name}.*" for name in groups)
        reason = "it decided what the run has learnt, or where it lies"
        raise ConfigError([f"{text} cannot be changed here; {reason}. Change only {allowed}." for text in other])
    composed, values = to_dict(compose(overrides)), to_dict(config)
    keys = sorted((_key(text) for text in overrides), key=lambda key: key.count("."))
    for key in keys:
        *parents, leaf = key.split(".")
        source, target = composed, values
        for name in parents:
            source, target = source[name], target[name]
        target[leaf] = source[leaf]
    return from_dict(values)


def list_choices() -> dict[str, list[str]]:
    """Return the groups of conf/ and the files in each, without asking Hydra."""
    import vit_tp.conf

    folder = Path(vit_tp.conf.__path__[0])
    return {
        group.name: sorted(path.stem for path in group.glob("*.yaml"))
        for group in sorted(folder.iterdir())
        if group.is_dir() and any(group.glob("*.yaml"))
    }


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read a configuration that `save_config` wrote, or that somebody edited.

    Raises:
        ConfigError: No such file, no YAML, or unknown knobs and wrong types, all at once.
    """
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); it should hold a configuration. Use an existing config.yaml."
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML ({error}); it cannot be read. Correct the file.") from None
    try:
        return from_dict(values if values is not None else {})
    except ConfigError as error:
        raise ConfigError([f"{path}: {complaint}" for complaint in error.complaints]) from None


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write a configuration as YAML, so that a reader sees the whole file or none. *Inverse*: `load_config`."""
    write_atomically(Path(path), _as_yaml(config))


def claim_with_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write a configuration where none may be yet; of several processes that try at once, one succeeds.

    Raises:
        FileExistsError: One is there.
    """
    create_atomically(Path(path), _as_yaml(config))


def _as_yaml(config: Config) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def _refuse(overrides: Sequence[str]) -> None:
    """Raise one error with everything that Hydra would report one by one."""
    parser, knobs = OverridesParser.create(), {knob.path: knob for knob in list_knobs()}
    complaints = []
    for text in overrides:
        try:
            complaints += _complain(parser.parse_override(text), knobs)
        except HydraException as error:
            reason = str(error).split("\n")[0]
            complaints.append(f"{text!r} is not an override; {reason}. Use <knob>=<value>, in quotes for the shell.")
    if complaints:
        raise ConfigError(complaints)


def _complain(item: Override, knobs: dict[str, Knob]) -> Iterator[str]:
    key = item.key_or_group
    choices = GlobalHydra.instance().config_loader().get_group_options(key)
    sections = {path.rsplit(".", 1)[0] for path in knobs} | {FREE.rstrip(".")}
    if key.split(".")[0].split("/")[0] == "hydra":
        yield f"{item.input_line} speaks to Hydra; the run's folder and log are ours. Use run.dir, run.name or log.*."
        return
    if not key or item.is_delete():
        yield f"{item.input_line} sets nothing; each knob has a value. Use <knob>=<value>, null where a knob allows it."
        return
    if item.is_sweep_override():
        as_list = "" if choices else f", or {key}=[...] for a list"
        yield f"{item.input_line} has several values; this version trains one run at a time. Use one value{as_list}."
        return
    value = _plain(item.value())
    if choices and not isinstance(value, (dict, type(None))):
        if value not in choices:
            close = close_names(str(value), choices)
            advice = f"Did you mean {key}={close[0]}?" if close else f"Use for example {key}={choices[0]}."
            yield f"{key}={value} is not a choice; conf/{key}/ has {', '.join(choices)}. {advice}"
    elif key in knobs:
        try:
            fit(value, knobs[key].type)
        except TypeError as error:
            yield wrong_type(key, value, str(error), knobs[key].default)
    elif not choices and key not in sections and not key.startswith(FREE):
        yield unknown_knob(key)


def _plain(value: Any) -> Any:
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _quoted(text: str) -> str:
    """Put a pattern of file names in the quotes that Hydra wants around braces."""
    key, equals, value = text.partition("=")
    return f"{key}{equals}'{value}'" if _key(text) in PATTERNS and "{" in value and value[0] not in "'\"" else text


def _require_no_expansion(overrides: Sequence[str]) -> None:
    """A shell makes several words of {000..146} where nobody quoted it, and the last would win."""
    for knob in PATTERNS:
        given = [text for text in overrides if _key(text) == knob]
        if len(given) > 1:
            raise ConfigError(
                f"{knob} is given {len(given)} times ({given[0]}, {given[1]} ...); the shell has expanded its braces, "
                f"and one shard would be read. Put the word in quotes: '{knob}=train-{{000000..000146}}.tar'."
            )


def _open_kwargs(text: str) -> str:
    # The schema does not name timm's arguments: ++ sets a key whether or not a YAML has it.
    bare = text.lstrip("+")
    return "++" + bare if f"{_key(bare)}.".startswith(FREE) and not bare.startswith("~") else text


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0].strip()


def _whole_message(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__
    if cause is not None and str(cause) not in str(error):
        lines += [line.strip() for line in str(cause).splitlines() if line.strip()]
    return " ".join(lines)
