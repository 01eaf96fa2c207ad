"""What can go wrong that a user can mend, one class for each kind.

Every message is a sentence in three parts: what is wrong with its numbers, why it cannot work, what to type.
"""

from __future__ import annotations

from collections.abc import Sequence


class VitTpError(Exception):
    """Base of the errors below; the command line prints its text without a traceback and leaves with code 2."""


class ConfigError(VitTpError, ValueError):
    """The configuration cannot work. Carries every complaint of one step of checking.

    Args:
        complaints: One sentence each.
    """

    def __init__(self, complaints: str | Sequence[str]) -> None:
        self.complaints = [complaints] if isinstance(complaints, str) else list(complaints)
        super().__init__("\n".join(self.complaints))


class TopologyError(VitTpError, ValueError):
    """The processes that exist and the grid that was asked for do not fit."""


class ShardRuleError(VitTpError, TypeError):
    """A module cannot be cut: no rule names it, or a rule leaves some of it unnamed."""


class CheckpointError(VitTpError, RuntimeError):
    """Saved weights are missing, damaged, or of another model."""


class DataError(VitTpError, RuntimeError):
    """Samples are missing or cannot be read."""
