"""timm's own forward with a word of its text changed, for classes that reshape by the width of their input.

Inside a cut module the input is whole and the heads are not, so `reshape(B, N, C)` must read `reshape(B, N, -1)`. The
text is checked first: another timm that says it otherwise is refused, not guessed at. The module keeps its class.
"""

from __future__ import annotations

import inspect
import textwrap
import types
from collections.abc import Callable, Sequence
from functools import cache

from torch import nn

from vit_tp.errors import ShardRuleError
from vit_tp.sharding.rule import Edit


def edit_(module: nn.Module, edits: Sequence[Edit]) -> None:
    """Give a module, and no other of its class, its methods with the edits made.

    Raises:
        ShardRuleError: If timm's text is not the one that the edits were made for.
    """
    for method in dict.fromkeys(edit.method for edit in edits):
        own = tuple(edit for edit in edits if edit.method == method)
        setattr(module, method, types.MethodType(edited(type(module), method, own), module))


@cache
def edited(kind: type[nn.Module], method: str, edits: tuple[Edit, ...]) -> Callable:
    """Return a method of a class with its text changed.

    Raises:
        ShardRuleError: If a text to be replaced does not occur as often as expected.
    """
    original = getattr(kind, method)
    text = textwrap.dedent(inspect.getsource(original))
    for edit in edits:
        found = text.count(edit.old)
        if found != edit.count:
            raise ShardRuleError(
                f"{kind.__module__}.{kind.__qualname__}.{method} has {edit.old!r} {found} times and not {edit.count}; "
                f"this timm is not one that the sharding rule was written for. Use a timm version from setup.py."
            )
        text = text.replace(edit.old, edit.new)
    # The line numbers of the original, so that a traceback points into timm's file.
    first_line = original.__code__.co_firstlineno
    code = compile("\n" * (first_line - 1) + text, inspect.getsourcefile(original), "exec")
    defined: dict[str, Callable] = {}
    exec(code, original.__globals__, defined)  # noqa: S102 - timm's own text, checked above
    return defined[method]
