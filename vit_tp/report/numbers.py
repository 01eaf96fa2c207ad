"""How are figures written as JSON that every reader accepts?

JSON knows no NaN or infinity, and a diverged run is exactly the one whose log must be readable: these become the
strings "nan", "inf" and "-inf", which float() turns back. Does not know: which figures there are.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

_NOT_FINITE = ("nan", "inf", "-inf")


def to_plain(value: Any) -> Any:
    """Return a value that json.dumps writes as valid JSON.

    Args:
        value: A number (also a scalar of numpy or torch), or text, None, lists and dicts of such.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, dict):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(entry) for entry in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else str(number)


def from_plain(value: Any) -> Any:
    """Turn "nan", "inf" and "-inf" back into numbers. *Inverse*: to_plain."""
    if isinstance(value, dict):
        return {key: from_plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [from_plain(entry) for entry in value]
    return float(value) if value in _NOT_FINITE else value
