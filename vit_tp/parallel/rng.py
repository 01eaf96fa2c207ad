"""Which random numbers? The only place where seeds are set.

Nothing here evolves from step to step. Weights are drawn from (seed, name); everything else from (seed, step,
micro-batch, block), so it is the same for every pp and dp and replays by itself. Dropout on *cut* activations must
differ between tensor-parallel ranks while everything on whole activations must not: `PrivateStream` switches the
default generator between the two at the ends of a region.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor


def seed_from(*parts: object) -> int:
    """Return 63 bits that depend on every part and on their order."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def default_generator(device: torch.device) -> Generator:
    """Return the generator that dropout and `bernoulli_` use on a device."""
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


@contextmanager
def seeded(*parts: object, device: torch.device = torch.device("cpu")) -> Iterator[None]:
    """Seed the default generator of a device by `parts` for a while; put its state back afterwards."""
    generator = default_generator(device)
    state = generator.get_state()
    generator.manual_seed(seed_from(*parts))
    try:
        yield
    finally:
        generator.set_state(state)


@dataclass
class Clock:
    """Where training stands: which step, which of its micro-batches (numbered over all replicas).

    Owned by the pipeline of one rank; advanced by its engine and read by its stages. Where a rank holds two runs of
    stages (chunks) that take turns, each of them meets every micro-batch and counts its own.
    """

    seed: int = 0
    step: int = 0
    micro_batch: int = 0
    _before: int = 0
    _met: dict[int, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict) -> Clock:
        return self  # a stage that is copied to be made real keeps its pipeline's time

    def start_step(self, step: int, first_micro_batch: int) -> None:
        """Stand before the first micro-batch that this replica has in a step."""
        self.step, self._before = step, first_micro_batch - 1
        self._met.clear()

    def next_micro_batch(self, chunk: int = 0) -> None:
        """Stand at the next micro-batch of a chunk."""
        self._met[chunk] = self._met.get(chunk, 0) + 1
        self.micro_batch = self._before + self._met[chunk]

    @contextmanager
    def standing_at(self, step: int, micro_batch: int) -> Iterator[None]:
        """Stand at an earlier moment for a while, to recompute what was random then."""
        now = self.step, self.micro_batch
        self.step, self.micro_batch = step, micro_batch
        try:
            yield
        finally:
            self.step, self.micro_batch = now

    @contextmanager
    def randomness(self, device: torch.device, stage: str) -> Iterator[None]:
        """Seed the default generator for one stage's pass over the current micro-batch; put its state back after."""
        with seeded(self.seed, self.step, self.micro_batch, stage, device=device):
            yield


class PrivateStream:
    """Random numbers of one tensor-parallel rank alone, between the two ends of a region.

    The private seed is a digest of the shared generator's state, so it is new in every pass and known to no one else.

    Args:
        name: Name of the cut module: two modules in the same pass must not share masks.
        tp_rank: This rank.
    """

    def __init__(self, name: str, tp_rank: int) -> None:
        self.name, self.tp_rank = name, tp_rank
        self._shared: Tensor | None = None
        self._private: Tensor | None = None

    def enter(self, device: torch.device) -> None:
        """Leave the shared stream. Inverse: `leave`."""
        generator = default_generator(device)
        torch.rand(1, device=device)  # moves the shared stream on, or a model without shared draws would repeat itself
        self._shared = generator.get_state()
        digest = hashlib.blake2b(self._shared.numpy().tobytes(), digest_size=16).hexdigest()
        generator.manual_seed(seed_from(digest, self.name, self.tp_rank))

    def leave(self, device: torch.device) -> None:
        """Return to the shared stream as it was, where it was left at all. Inverse: `enter`."""
        if self._shared is not None:
            default_generator(device).set_state(self._shared)
            self._shared = None

    def forget(self) -> None:
        """Be outside, wherever an earlier pass broke off: a recompute stops once it has all that backward wants."""
        self._shared = None

    def pause(self, device: torch.device) -> None:
        """Go back to the shared stream for what all ranks must draw alike inside. Inverse: `resume`."""
        if self._shared is not None:
            generator = default_generator(device)
            self._private = generator.get_state()
            generator.set_state(self._shared)

    def resume(self, device: torch.device) -> None:
        """Take up the private stream where it was paused. Inverse: `pause`."""
        if self._shared is not None:
            generator = default_generator(device)
            self._shared = generator.get_state()
            generator.set_state(self._private)
