"""What does tp leave whole on every rank, and is anything cut at all?

Does not know: how a cut is made (convert.py), stages, groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from vit_tp.errors import ShardRuleError, TopologyError
from vit_tp.sharding.matches import Match


def require_cut(model: nn.Module, matches: Sequence[Match], tp_size: int) -> None:
    """Raise unless tensor parallelism cuts something of a model.

    Args:
        model: The whole model.
        matches: From `plan_cut`.
        tp_size: Ranks that share each weight.

    Raises:
        ShardRuleError: If the model has nothing that a rule cuts.
        TopologyError: If tp divides nothing of what it has.
    """
    if any(match.rule.cuts for match in matches):
        return
    kept = sorted({number for match in matches for number in match.kept_whole})
    if not kept:
        raise ShardRuleError(
            f"nothing in {type(model).__name__} can be cut; tensor parallelism would only copy it. "
            f"Use a model that `vit-tp doctor --models` lists."
        )
    fitting = max(tp for tp in range(1, tp_size) if any(n % tp == 0 for _, n in kept))
    raise TopologyError(
        f"parallel.tp={tp_size} divides nothing of {type(model).__name__} ({_shown(kept)}), and "
        f"parallel.indivisible=mlp_only would keep all of it whole on every rank. Use parallel.tp={fitting}."
    )


def describe_kept(matches: Sequence[Match], tp_size: int, held: int, total: int) -> str | None:
    """Return one line on what every rank holds and computes whole though others might share it, None where nothing is.

    The share is counted in parameters: what is held, and the work of linear layers, which is in proportion. Attention
    scores have no parameters and are not in it.

    Args:
        matches: From `plan_cut` of the whole model.
        tp_size: Ranks that share each weight.
        held: Parameters of the model that one tensor-parallel rank holds.
        total: Parameters of the model.
    """
    kept = [match for match in matches if match.kept_whole]
    if not kept:
        return None
    counts = Counter((type(match.module).__name__, match.kept_whole) for match in kept)
    names = ", ".join(f"{number} x {name} ({_shown(numbers)})" for (name, numbers), number in counts.items())
    surplus = sum(p.numel() for match in kept for p in match.module.parameters()) * (1 - 1 / tp_size)
    return (
        f"{names}: held and computed by every rank; each has {100 * held / total:.0f} % of the parameters "
        f"instead of {100 * (held - surplus) / total:.0f} %"
    )


def _shown(numbers: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{what}={n}" for what, n in numbers)
