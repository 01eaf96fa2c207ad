"""How many bytes are alive, now and at most, while code runs? Every storage that an operation makes is followed.

On meta nothing is computed and nothing takes memory, yet tensors are made and let go of in the same order as on a
device: Python, autograd and timm's forward are the real ones. Does not know: stages, what a kernel takes for itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Follows what is made inside a `with` block until it is let go of, there or later.

    Args:
        known: Tensors that were there before, such as weights; they count nothing.

    Attributes:
        now: Bytes alive.
        peak: The most that `now` has been since `restart`.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, tuple[weakref.ref, int]] = {}
        for tensor in known:
            self.weigh(tensor, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, Tensor):
                self._note(made.untyped_storage(), None)
            elif isinstance(made, (tuple, list)):
                for tensor in made:
                    self._note(tensor.untyped_storage(), None)
        return out

    def weigh(self, tensor: Tensor, num_bytes: int) -> int:
        """Let a tensor's memory count so many bytes from now on; return what it counted."""
        storage = tensor.untyped_storage()
        _, before = self._alive.pop(storage._cdata, (None, 0))
        self.now -= before
        self._note(storage, num_bytes)
        return before

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def _note(self, storage: torch.UntypedStorage, num_bytes: int | None) -> None:
        name = storage._cdata
        if name in self._alive:
            return
        num_bytes = storage.nbytes() if num_bytes is None else num_bytes
        self._alive[name] = weakref.ref(storage, lambda _: self._forget(name)), num_bytes
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def _forget(self, name: int) -> None:  # at once: the next storage may get the same name
        _, num_bytes = self._alive.pop(name, (None, 0))
        self.now -= num_bytes


class FusedAttention(TorchFunctionMode):
    """Lets attention make and save what fused kernels do; on meta there is none, and it would save its N x N scores."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and kwargs.get("attn_mask") is None:
            return _SaveAsFused.apply(*args[:3])
        return func(*args, **kwargs)


def fused(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a forward whose attention is fused, also where backward runs it again."""

    def run(x: Tensor) -> Tensor:
        with FusedAttention():
            return forward(x)

    return run


class _SaveAsFused(Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Laid out as q is: of a slice of q, k and v together, so that joining the heads copies nothing; else it does.
        out = torch.empty_like(q if q.shape[-1] == v.shape[-1] else v)  # (B, H, N, D)
        log_sum = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
