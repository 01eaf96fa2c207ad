"""Who reads samples, and who receives them?

One process of each data-parallel replica reads: tensor-parallel rank 0 of its first pipeline stage. Images go from
there to its tp peers as uint8, and each normalises, erases and mixes them alike; targets go straight to the stage that
has the loss, one send for each micro-batch. A small header once a step tells the receivers the shapes, so a wrong size
is an error and not a stale buffer.

Does not know: models, losses, where batches come from.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from vit_tp.data.loader import Batch
from vit_tp.errors import DataError
from vit_tp.parallel.groups import Groups, feed_ranks
from vit_tp.train.prepare import Preparation

WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64)
MAX_DIMS = 5
RECORD_SIZE = 2 + MAX_DIMS  # dtype, number of dims, shape
HEADER_SIZE = 2 * RECORD_SIZE


class Feed:
    """Turns the reader's batches into what each rank's engine asks for.

    Args:
        groups: This rank's peers.
        device: Where images are wanted; targets travel on the CPU.
        loss_rank: Pipeline rank that has the loss: the last one, or the first where the pipeline is folded.

    Attributes:
        waited_s: How long this rank has waited for its loader so far.
    """

    def __init__(self, groups: Groups, device: torch.device, loss_rank: int) -> None:
        topology, place = groups.topology, groups.place
        self.groups, self.device = groups, device
        self.reader = topology.rank(0, place.dp, 0)
        self.is_reader = groups.rank == self.reader
        self.is_first, self.has_loss = place.pp == 0, place.pp == loss_rank
        self.receivers = [
            rank
            for rank in feed_ranks(topology, place.dp)
            if rank != self.reader and topology.coordinates(rank).pp in (0, loss_rank)
        ]
        self.image_ranks = [rank for rank in self.receivers if topology.coordinates(rank).pp == 0]
        self.target_ranks = [rank for rank in self.receivers if topology.coordinates(rank).pp == loss_rank]
        self.waited_s = 0.0
        self._sends: list[tuple[dist.Work, Tensor]] = []  # a tensor must live until its send is done

    def step(
        self, batches: Iterator[Batch] | None, num_micro_batches: int, preparation: Preparation
    ) -> Iterator[tuple[Tensor, Tensor]] | None:
        """Return what `train_batch` or `eval_batch` draws from, for one step. Collective over the receivers.

        Args:
            batches: On the reader, its micro-batches, their images on the device; None elsewhere.
            num_micro_batches: How many the step takes.
            preparation: What is done to them.

        Returns:
            (images, targets) pairs, with an empty tensor in place of what this stage does not need; None on a middle
            stage.
        """
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()
        if not (self.is_first or self.has_loss):
            return None
        if self.is_reader:
            return self._read(batches, num_micro_batches, preparation)
        return self._receive(num_micro_batches, preparation)

    def _read(
        self, batches: Iterator[Batch], num_micro_batches: int, preparation: Preparation
    ) -> Iterator[tuple[Tensor, Tensor]]:
        sizes = None
        for index in range(num_micro_batches):
            asked = time.perf_counter()
            batch = next(batches, None)
            self.waited_s += time.perf_counter() - asked
            if batch is None:
                raise DataError(
                    f"the loader of rank {self.reader} ran out at micro-batch {index} of {num_micro_batches}; the step "
                    f"cannot be completed. Give it as many micro-batches as steps take."
                )
            images = batch.images.contiguous()
            targets = preparation.targets(batch.targets, images, index).contiguous()
            header = encode(images, targets)
            if sizes is None:
                sizes = header
                self._send(header, self.receivers)
            elif not torch.equal(header, sizes):
                raise DataError(
                    f"micro-batch {index} is {tuple(images.shape)}, unlike the first of its step; what receives it has "
                    f"room for one shape. Make all micro-batches of a step alike."
                )
            if preparation.needs_seeds:  # before targets: a rank that needs both receives them in this order
                self._send(batch.seeds, self.image_ranks)
            self._send(targets, self.target_ranks)
            yield preparation.images(self._share(images), batch.seeds, index), targets

    def _share(self, images: Tensor) -> Tensor:
        """Give the tp peers of the first stage the reader's images."""
        if self.groups.topology.tp > 1:
            dist.broadcast(images, src=self.reader, group=self.groups.image_group)
        return images

    def _send(self, tensor: Tensor, ranks: list[int]) -> None:
        """Send without waiting: a last stage asks for targets only after its activations, which come from here."""
        self._sends += [(dist.isend(tensor, rank, group=self.groups.target_group), tensor) for rank in ranks]

    def _receive(self, num_micro_batches: int, preparation: Preparation) -> Iterator[tuple[Tensor, Tensor]]:
        header = torch.empty(HEADER_SIZE, dtype=torch.int64)
        dist.recv(header, self.reader, group=self.groups.target_group)
        (image_shape, image_dtype), (target_shape, target_dtype) = decode(header)
        for index in range(num_micro_batches):
            images = targets = torch.empty(0)
            if self.is_first:
                seeds = torch.empty(image_shape[0], dtype=torch.int64)
                if preparation.needs_seeds:
                    dist.recv(seeds, self.reader, group=self.groups.target_group)
                pixels = self._share(torch.empty(image_shape, dtype=image_dtype, device=self.device))
                images = preparation.images(pixels, seeds, index)
            if self.has_loss:
                targets = torch.empty(target_shape, dtype=target_dtype)
                dist.recv(targets, self.reader, group=self.groups.target_group)
            yield images, targets


def encode(*tensors: Tensor) -> Tensor:
    """Return shapes and dtypes of two tensors as HEADER_SIZE integers. Inverse: `decode`."""
    numbers: list[int] = []
    for tensor in tensors:
        shape = [*tensor.shape, *[0] * (MAX_DIMS - tensor.dim())]
        numbers += [WIRE_DTYPES.index(tensor.dtype), tensor.dim(), *shape]
    return torch.tensor(numbers)


def decode(header: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return (shape, dtype) of the two tensors in a header. Inverse: `encode`."""
    records = [record.tolist() for record in header.split(RECORD_SIZE)]
    return [(tuple(shape[:ndim]), WIRE_DTYPES[dtype]) for dtype, ndim, *shape in records]
