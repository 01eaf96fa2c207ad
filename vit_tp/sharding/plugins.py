"""Modules of the user that add to what can be built and cut: sharding rules, timm models.

Does not know: what they register (`register_rule`, `timm.models.register_model`).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from vit_tp.errors import ConfigError


def load_plugins(names: Sequence[str]) -> None:
    """Import the modules of `plugins=[...]`, in order. A second call finds them imported.

    They are looked for in the working directory first. Ranks are started by `python -m`, which does that already; the
    `vit-tp` command does not.

    Raises:
        ConfigError: At the first that cannot be imported, with the reason.
    """
    here = os.getcwd()
    if names and here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    for name in names:
        try:
            import_module(name)
        except (Exception, SystemExit) as error:  # somebody else's code: whatever it raises, the sentence must name it
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if isinstance(error, ModuleNotFoundError) and error.name == name.split(".")[0]:
                raise ConfigError(
                    f"plugins: {name} cannot be imported from {here} or the installed packages ({said}). Type the "
                    f"command in the folder where it lies, put that folder on PYTHONPATH, or use plugins=[<a module>]."
                ) from error
            raise ConfigError(
                f"plugins: {name} was found, but ends when it is imported{_line(error)} ({said}), so its rules and "
                f"models are not known. Mend it; python -c 'import {name}' shows where."
            ) from error


def _line(error: BaseException) -> str:
    """Return where in a plugin an error came from, as far as it is known."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "" if "importlib" in last.filename else f", in {last.filename} line {last.lineno}"
