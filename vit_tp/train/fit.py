"""Does a run fit the memory of its ranks, and if not, which overrides would make it? Each is tried before it is named.

Does not know: how bytes are counted (plan/), where limits come from (launch/memory.py).
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from vit_tp.config import BatchPlan, Config, batch_plan
from vit_tp.config.types import show
from vit_tp.errors import ConfigError, VitTpError
from vit_tp.models.dtypes import DTYPES
from vit_tp.plan.held import optimizer_cost
from vit_tp.plan.limits import GB, DeviceMemory, Limit
from vit_tp.plan.peak import RankPeak, plan_peaks
from vit_tp.plan.profiles import Layout, Profiler
from vit_tp.sharding.cutting import cutting_of

SEARCH_S = 3.0  # preflight answers in ten seconds, imports included
GROWTHS = (2, 4, 8)


@dataclass(frozen=True)
class Need:
    """What a run would take, and of what.

    Args:
        peaks: Of each pipeline rank, as the tightest limit counts them.
        limit: The tightest limit; None where nothing is known.
        num_ranks: Ranks on a host.
    """

    peaks: list[RankPeak]
    limit: Limit | None
    num_ranks: int

    @property
    def worst(self) -> int:
        """Index of the fullest pipeline rank."""
        return max(range(len(self.peaks)), key=lambda rank: self.peaks[rank].peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peaks[self.worst].peak_bytes

    @property
    def room(self) -> int | None:
        return None if self.limit is None else self.limit.room(self.num_ranks)

    @property
    def fits(self) -> bool:
        return self.room is None or self.peak_bytes <= self.room


@dataclass
class Memory:
    """Estimates of one model under several configurations.

    Args:
        model: The whole model on meta.
        config: The run as it was asked for.
        device: What ranks may take; None where nothing is known.
        lay_out: From a configuration to its batches and to the bounds of its stages; raises where it cannot run.
    """

    model: nn.Module
    config: Config
    device: DeviceMemory | None
    lay_out: Callable[[Config], tuple[BatchPlan, list[int]]]
    _profiler: Profiler = field(init=False)

    def __post_init__(self) -> None:
        self._profiler = Profiler(self.model, self.config.recipe.freeze)
        self._optimizer = optimizer_cost(self.config.recipe.optimizer)

    def need(self, config: Config) -> Need:
        """Return what a run would take of its tightest limit.

        Raises:
            VitTpError: The configuration cannot run.
        """
        plan, bounds = self.lay_out(config)
        parallel = config.parallel
        dtype = DTYPES[config.compute.dtype]
        cutting = cutting_of(config)
        cutting = cutting.with_columns(cutting.require(self.model, parallel.tp), parallel.tp)
        layout = Layout(plan.micro_batch_size, parallel.tp, dtype, cutting)
        profiles = self._profiler.profile(layout, bounds[:-1])
        limits, num_ranks = self._limits(config)
        needs = [
            Need(
                plan_peaks(
                    profiles,
                    bounds,
                    plan.grad_accum_steps,
                    plan.dp_size,
                    dtype,
                    self._optimizer,
                    limit is None or limit.counts_untouched,
                    parallel.schedule,
                ),
                limit,
                num_ranks,
            )
            for limit in limits or (None,)
        ]
        return max(needs, key=lambda need: need.peak_bytes - (need.room or 0))

    def _limits(self, config: Config) -> tuple[tuple[Limit, ...], int]:
        here = 1 if self.device is None else self.device.num_ranks
        num_ranks = max(1, here * _world(config) // _world(self.config))
        if config.compute.memory_gb is not None:
            return (Limit("compute.memory_gb", round(config.compute.memory_gb * GB)),), num_ranks
        return (() if self.device is None else self.device.limits), num_ranks

    def require(self, need: Need) -> None:
        """Raise where a run does not fit.

        Raises:
            ConfigError: With what it needs, what there is, and the overrides that make it fit.
        """
        if need.fits:
            return
        rank = need.peaks[need.worst]
        plan, _ = self.lay_out(self.config)
        held = " and ".join(f"{first} to {last}" for first, last in rank.chunks)
        raise ConfigError(
            f"pipeline stage {need.worst} ({held}) would take {_gb(rank.peak_bytes)} in each rank "
            f"at the peak, {rank.moment}, and tensors have {_gb(need.room)} ({need.limit.describe(need.num_ranks)}): "
            f"{_gb(rank.model_bytes)} for weights, gradients and optimizer, {_gb(rank.activation_bytes)} for "
            f"activations of {sum(rank.micro_batches)} x {plan.micro_batch_size} samples; the first step would "
            f"run out. "
            f"{self._advice(need)}"
        )

    def _advice(self, need: Need) -> str:
        """Return what to type: each change that is enough by itself, or else several together."""
        end = time.monotonic() + SEARCH_S
        tried = [self._gentlest(self.config, kind, end) for kind in range(NUM_KINDS)]
        enough = [f"{_typed(change)} ({_gb(then.peak_bytes)})" for change, then in filter(None, tried) if then.fits]
        if enough:
            return f"Use {', '.join(enough[:-1])} or {enough[-1]}." if len(enough) > 1 else f"Use {enough[0]}."
        together, least = {}, need
        for kind in range(NUM_KINDS):
            found = self._gentlest(with_values(self.config, together), kind, end + SEARCH_S)
            if found is not None and found[1].peak_bytes < least.peak_bytes:
                together, least = together | found[0], found[1]
            if least.fits:
                together, least = self._relaxed(together, least, end + 2 * SEARCH_S)
                return f"Use {_typed(together)} together ({_gb(least.peak_bytes)})."
        best = f" (with {_typed(together)} it is {_gb(least.peak_bytes)})" if together else ""
        return f"Recompute, smaller micro-batches and more ranks are not enough{best}. Use a smaller model or image."

    def _relaxed(self, together: dict[str, Any], need: Need, end: float) -> tuple[dict[str, Any], Need]:
        """Return changes that fit together without those that are not needed, and with the largest micro-batch."""
        for path in ("parallel.sequence", "compute.recompute"):
            fewer = {name: value for name, value in together.items() if name != path}
            if path in together and time.monotonic() < end and (then := self._tried(fewer)) and then.fits:
                together, need = fewer, then
        size = together.get("compute.micro_batch_size")
        while size and time.monotonic() < end:
            size *= 2
            then = self._tried({**together, "compute.micro_batch_size": size})
            if then is None or not then.fits:
                break
            together, need = {**together, "compute.micro_batch_size": size}, then
        return together, need

    def _tried(self, changes: dict[str, Any]) -> Need | None:
        """Return what a run with some changes needs; None where it does not run."""
        with contextlib.suppress(VitTpError, RuntimeError, NotImplementedError, TypeError):
            return self.need(with_values(self.config, changes))
        return None

    def _gentlest(self, config: Config, kind: int, end: float) -> tuple[dict[str, Any], Need] | None:
        """Return the smallest change of one kind that makes a run fit, or else the largest; None where none runs."""
        changes = []
        for change in list(_changes(config, self.device and self.device.max_ranks))[kind]:
            with contextlib.suppress(VitTpError):
                self.lay_out(with_values(config, change))
                changes.append(change)
        low, high, best = 0, len(changes) - 1, None
        while low <= high and time.monotonic() < end:
            middle = (low + high) // 2 if best else high  # the largest first: most kinds have one or none that fits
            try:
                then = self.need(with_values(config, changes[middle]))
            except (VitTpError, RuntimeError, NotImplementedError, TypeError):  # no meta kernel on that path
                return best
            if best is None and not then.fits:
                return changes[middle], then
            if then.fits:
                best, high = (changes[middle], then), middle - 1
            else:
                low = middle + 1
        return best


NUM_KINDS = 6


def _changes(config: Config, max_ranks: int | None) -> Iterator[list[dict[str, Any]]]:
    """Yield, kind by kind, what may lower the need of memory and is not on already, from gentle to strong."""
    compute, parallel, dp = config.compute, config.parallel, config.parallel.dp or 1
    yield [{"compute.recompute": "block"}] if compute.recompute != "block" else []
    yield [{"parallel.sequence": True}] if parallel.tp > 1 and not parallel.sequence else []
    share = config.recipe.global_batch_size // dp
    with contextlib.suppress(ConfigError):
        share = batch_plan(config, dp).micro_batch_size
    yield [{"compute.micro_batch_size": size} for size in range(share - 1, 0, -1) if share % size == 0]
    for axis in ("tp", "pp"):
        grown = []
        for times in GROWTHS:
            left = max(dp // times, 1)
            ranks = parallel.tp * parallel.pp * times * left
            if (dp % times == 0 or times % dp == 0) and (max_ranks is None or ranks <= max_ranks):
                change = {f"parallel.{axis}": getattr(parallel, axis) * times}
                grown.append(change | ({"parallel.dp": left} if left != dp else {}))
        yield grown
    yield [{"compute.dtype": "bf16"}] if compute.dtype == "fp32" else []


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a configuration with other values of some dotted knobs."""
    config = copy.deepcopy(config)
    for path, value in values.items():
        group, name = path.split(".")
        setattr(getattr(config, group), name, value)
    return config


def _typed(values: Mapping[str, Any]) -> str:
    return " ".join(f"{path}={show(value)}" for path, value in values.items())


def _world(config: Config) -> int:
    return config.parallel.tp * config.parallel.pp * (config.parallel.dp or 1)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.3g} GB"
