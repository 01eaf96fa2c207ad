"""Does a value fit the type of its knob, and which names are close to a mistyped one.

Does not know: which knobs there are.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from typing import Any, Union, get_args, get_origin

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}


def fit(value: Any, hint: Any) -> Any:
    """Return the value as the type says it, where nothing is lost by that.

    Args:
        value: What somebody typed, already parsed.
        hint: Annotated type of the knob: int, float, bool, str, `X | None`, list[X], dict[str, Any] or Any.

    Returns:
        The value, with `1` or `"1e-3"` made a float for a float knob and a number made text for a text knob.

    Raises:
        TypeError: The value does not fit; the text is what would fit, without the knob's name.
    """
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):
        inner = [part for part in get_args(hint) if part is not type(None)]
        return None if value is None else fit(value, inner[0])
    if origin is list and isinstance(value, (list, tuple)):
        return [fit(item, get_args(hint)[0]) for item in value]
    if origin is dict and isinstance(value, dict):
        return dict(value)
    if origin is None and isinstance(value, (str, int, float)) and (isinstance(value, bool) == (hint is bool)):
        if hint is float:
            try:
                return float(value)
            except ValueError:
                pass
        elif hint is str:
            return str(value)
        elif isinstance(value, hint):
            return value
    raise TypeError(describe(hint))


def describe(hint: Any) -> str:
    """Return what fits a type in plain words, for example "a whole number or null"."""
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):
        inner = [part for part in get_args(hint) if part is not type(None)]
        return f"{describe(inner[0])} or null"
    if origin is list:
        return {int: "a list of whole numbers", float: "a list of numbers", str: "a list of texts"}[get_args(hint)[0]]
    return WORDS[origin or hint]


def show(value: Any) -> str:
    """Return a value as it is typed in an override: null, true, [0,3]."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    return str(value)


def close_names(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return up to three known names that look like a mistyped one, closest first."""
    return difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
