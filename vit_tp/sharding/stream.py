"""The stream of tokens between a model's blocks: is there one, where does it start and finish, what does a block save?

Does not know: how a module is cut (convert.py), what the exchanges are (parallel/regions.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vit_tp.config.limits import RECOMPUTE
from vit_tp.errors import ConfigError, ShardRuleError
from vit_tp.parallel.regions import Region
from vit_tp.sharding.matches import Match
from vit_tp.sharding.saving import Saving, save_less_


def blocks_of(matches: Sequence[Match]) -> dict[str, nn.Module]:
    """Return the blocks of the stream by name, in order."""
    return {match.name: match.module for match in matches if match.name and match.name == match.block}


def require_stream(model: nn.Module, matches: Sequence[Match], region: Region, recompute: str | int) -> None:
    """Raise where a region or a kind of recompute needs a stream that the model does not have.

    Args:
        model: The whole model.
        matches: From `plan_cut`, of the whole model.
        region: Where partial sums are exchanged.
        recompute: "none", "norm_act", "block" or N.

    Raises:
        ConfigError: If `recompute` is unknown.
        ShardRuleError: If blocks do not pass on one stream of tokens, or attention is kept whole inside.
    """
    if recompute not in RECOMPUTE and (isinstance(recompute, str) or recompute < 0):
        raise ConfigError(
            f"recompute={recompute!r} is not known. Use {', '.join(RECOMPUTE)}, or N for every Nth block."
        )
    if not region.has_ends and recompute != "norm_act":
        return
    asked, instead = ("compute.recompute=norm_act", "compute.recompute=block or none")
    if region.has_ends:
        asked, instead = region.knob[0], f"{region.knob[1]}, or in a loop of your own region='exact'"
    if not blocks_of(matches):
        raise ShardRuleError(
            f"the blocks of {type(model).__name__} do not pass on one stream of (B, N, C) tokens, each block a map of "
            f"single tokens around attention and MLP, and {asked} is made for those alone. Use {instead}."
        )
    kept = next((match for match in matches if match.kept_whole and match.block), None)
    if region.has_ends and kept is not None:
        raise ShardRuleError(
            f"{kept.name} is kept whole on every rank (parallel.indivisible=mlp_only), and under {asked} no rank has "
            f"the whole tokens that it needs. Use a parallel.tp that divides it, or {instead}."
        )


def join_ends_(matches: Sequence[Match], region: Region) -> None:
    """Let a whole model start its stream before the first block and finish it after the last, by hooks."""
    blocks = list(blocks_of(matches).values())
    if not region.has_ends or not blocks:
        return

    blocks[0].register_forward_pre_hook(lambda _, args: (region.start(args[0]), *args[1:]), prepend=True)
    blocks[-1].register_forward_hook(lambda _, args, x: region.finish(x))


def start_after_(embed: nn.Module, region: Region) -> None:
    """Let the stream start with what an embedding returns, by a hook."""
    if region.has_ends:
        embed.register_forward_hook(lambda _, args, x: region.start(x))


def finish_before_(head: nn.Module, region: Region) -> None:
    """Let the stream finish before a head, by a hook."""
    if region.has_ends:
        head.register_forward_pre_hook(lambda _, args: (region.finish(args[0]),))


def build_savings_(matches: Sequence[Match], region: Region, recompute: str) -> dict[str, Saving]:
    """Give each block a say in what it saves, where there is anything to save; return these by block name.

    A block that is checkpointed whole keeps its input only, and makes all else again at once.
    """
    if recompute == "block" or (recompute == "none" and not region.divides_tokens):
        return {}
    savings = {}
    for name, block in blocks_of(matches).items():
        savings[name] = Saving()
        save_less_(block, savings[name], outputs=recompute == "norm_act")
    return savings
