"""Bring a reader's batches to its device while the device computes.

Does not know: who reads, what follows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vit_tp.data.loader import Batch


def on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches whose images are on the device; targets and seeds stay on the CPU.

    On a GPU each batch is copied on a stream of its own while the one before it is worked on, as timm's PrefetchLoader
    does it. The copy runs beside the CPU only from pinned memory, which `Loading.pin_memory` asks for.

    Args:
        batches: From a loader.
        device: Where images are wanted.
    """
    if device.type != "cuda":
        for batch in batches:
            yield batch._replace(images=batch.images.to(device))
        return
    side = torch.cuda.Stream(device)
    ahead = None
    for batch in batches:
        with torch.cuda.stream(side):
            copied = batch._replace(images=batch.images.to(device, non_blocking=True))
            done = side.record_event()
        if ahead is not None:
            yield _handed_over(*ahead)
        ahead = (copied, done)
    if ahead is not None:
        yield _handed_over(*ahead)


def _handed_over(batch: Batch, done: torch.cuda.Event) -> Batch:
    """Let the current stream wait for this copy, not for the one begun since, and keep the memory until it is done."""
    current = torch.cuda.current_stream(batch.images.device)
    current.wait_event(done)
    batch.images.record_stream(current)
    return batch
