"""How are the first few of many names told? Does not know: what they name."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], shown: int = 5) -> str:
    """Return the first few of many names, and how many more there are.

    Args:
        names: In the order in which they are told.
        shown: How many at most.
    """
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
