"""How much memory may the tensors of one rank take? Arithmetic over what launch/memory.py read. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GB = 10**9
# What a rank takes beside its tensors, beyond what the process that launches it does: DeepSpeed, and the stacks and
# heaps of its threads. Seen in worlds of one to four on gloo, docs/measured.md.
RANK_RESIDENT_BYTES, RANK_DATA_BYTES, RANK_ADDRESS_BYTES = 200_000_000, 400_000_000, 1_600_000_000
CUDA_BYTES = 1_000_000_000  # context, communicators and workspaces, which torch does not count


@dataclass(frozen=True)
class Limit:
    """One limit, and what of it tensors cannot have.

    Args:
        name: For a person.
        num_bytes: Of the limit.
        taken: Of each rank for libraries and the like.
        is_shared: Whether all ranks of a host share it.
        counts_untouched: Whether memory counts that was allocated and not written to.
    """

    name: str
    num_bytes: int
    taken: int = 0
    is_shared: bool = False
    counts_untouched: bool = True

    def room(self, num_ranks: int) -> int:
        """Return the bytes that each of so many ranks of a host may take for tensors."""
        return max(self.num_bytes // (num_ranks if self.is_shared else 1) - self.taken, 0)

    def describe(self, num_ranks: int) -> str:
        """Return how the room comes about."""
        text = f"{self.name}: {self.num_bytes / GB:.4g} GB"
        text += f" over {num_ranks} ranks" if self.is_shared and num_ranks > 1 else ""
        return text + (f", less {self.taken / GB:.3g} GB for libraries" if self.taken else "")


@dataclass(frozen=True)
class DeviceMemory:
    """What ranks may take.

    Args:
        limits: All that there are; each must hold.
        num_ranks: Ranks on a host.
        max_ranks: Ranks that there are places for; None: any number.
    """

    limits: tuple[Limit, ...]
    num_ranks: int
    max_ranks: int | None = None


@dataclass(frozen=True)
class Process:
    """What this process has mapped by now, in bytes: libraries, and no tensors to speak of.

    Args:
        resident: Pages in memory.
        data: Of its own.
        address: All that has an address.
    """

    resident: int = 0
    data: int = 0
    address: int = 0


def gpu_limits(totals: Mapping[str, int]) -> tuple[Limit, ...]:
    """Return the limit of the smallest of the GPUs that ranks run on, given as bytes by name."""
    if not totals:
        return ()
    name = min(totals, key=totals.get)
    return (Limit(f"GPU {name}", totals[name], CUDA_BYTES),)


def cpu_limits(shared: Mapping[str, int], address: int | None, data: int | None, own: Process) -> tuple[Limit, ...]:
    """Return the limits of ranks on CPU.

    Args:
        shared: Bytes that all ranks of the host share, by name.
        address: RLIMIT_AS in bytes, of each process; None: unlimited.
        data: RLIMIT_DATA, likewise.
        own: What this process has mapped.
    """
    found = [
        Limit(name, limit, own.resident + RANK_RESIDENT_BYTES, is_shared=True, counts_untouched=False)
        for name, limit in shared.items()
    ]
    if address is not None:
        found.append(Limit("RLIMIT_AS", address, own.address + RANK_ADDRESS_BYTES))
    if data is not None:
        found.append(Limit("RLIMIT_DATA", data, own.data + RANK_DATA_BYTES))
    return tuple(found)
