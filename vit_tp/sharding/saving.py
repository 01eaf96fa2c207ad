"""What does autograd keep of a block? Not what can be made again from less.

While a block's forward runs, its `Saving` stands between autograd and memory (`saved_tensors_hooks`). A tensor that a
module said how to make again, such as the tokens of all ranks gathered from this rank's own, is let go of, and made
once more when backward asks for it. What it is made from is kept in its place. timm's forward knows nothing of it.

Source: what to let go of, arXiv 2205.05198, section 4.2.2 (gathered tokens) and Megatron-LM's output-discarding
recompute (norms and activations); the way is ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import LayerNorm, LayerNormFp32, RmsNorm, RmsNormFp32
from timm.layers.activations import GELU, GELUTanh, QuickGELU
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

# Their output follows from their input alone, by the same kernel to the same bits. ReLU, Sigmoid and Tanh are left out:
# their backward reads the output, which is kept before it could be said to be made again.
NORMS = (LayerNorm, LayerNormFp32, RmsNorm, RmsNormFp32, nn.LayerNorm, nn.RMSNorm)
ACTIVATIONS = (GELU, GELUTanh, QuickGELU, nn.GELU, nn.SiLU, nn.Mish)


@dataclass
class _Remake:
    """How to make a tensor again, and the tensor while operations of one backward pass ask for it.

    Args:
        make: From what is kept to the tensor.
        dtype: Of the tensor.
        version: How often it had been changed in place; changed once more, it is not what would be made.
        autocast: The casting that was in force.
    """

    make: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    version: int
    autocast: AbstractContextManager[Any]
    num_saved: int = 0
    num_left: int = 0
    made: Tensor | None = None

    def again(self, source: Callable[[], Tensor]) -> Tensor:
        """Return the tensor; it is held until every operation that saved it has had it once."""
        if self.made is None:
            with torch.no_grad(), self.autocast:
                self.made = self.make(source())
            self.num_left = self.num_saved
        made = self.made
        self.num_left -= 1
        if self.num_left == 0:
            self.made = None
        return made


@dataclass(frozen=True)
class _Packed:
    """A saved tensor that was let go of.

    Args:
        remake: How to make the memory that it lay in.
        source: What autograd keeps in its place, packed.
        place: Its size, strides and offset in that memory.
    """

    remake: _Remake
    source: Any
    place: tuple[torch.Size, tuple[int, ...], int]


class Saving:
    """What one block saves. Registered on the block, and told by modules inside what they can make again."""

    def __init__(self) -> None:
        self._scopes: list[_Scope] = []

    def __deepcopy__(self, memo: dict) -> Saving:
        return Saving()

    def open(self, block: nn.Module, args: tuple) -> None:
        """Forward pre-hook of the block."""
        scope = _Scope()
        scope.hooks.__enter__()
        self._scopes.append(scope)

    def close(self, block: nn.Module, args: tuple, out: Any) -> None:
        """Forward hook of the block, called after an error too."""
        if self._scopes:
            self._scopes.pop().hooks.__exit__()

    def can_make(self, made: Tensor, make: Callable[[Tensor], Tensor], source: Tensor) -> None:
        """Say that the memory of a tensor can be made again.

        Args:
            made: The tensor, alone in its memory.
            make: Returns it, laid out alike, from `source`; the same on every rank if it exchanges.
            source: What autograd keeps instead.
        """
        if self._scopes and torch.is_grad_enabled():
            self._scopes[-1].note(made, make, source.detach())

    def can_repeat(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        """Forward hook of a module whose output follows from its input alone."""
        if len(args) == 1 and args[0].untyped_storage()._cdata != out.untyped_storage()._cdata:  # not in place
            self.can_make(out, module.forward, args[0])


class _Scope:
    """One pass of a block."""

    def __init__(self) -> None:
        self._remakes: dict[int, tuple[_Remake, Tensor]] = {}
        # Hooks do not nest by themselves: ours hand on to those outside, which may be a checkpoint's, or an offload's.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._pack_outside, self._unpack_outside = outer or (_same, _same)
        self.hooks = saved_tensors_hooks(self._pack, self._unpack)

    def note(self, made: Tensor, make: Callable[[Tensor], Tensor], source: Tensor) -> None:
        memory = made.untyped_storage()
        self._remakes[memory._cdata] = _Remake(make, made.dtype, made._version, _autocast_now(made)), source
        weakref.finalize(memory, self._remakes.pop, memory._cdata, None)  # its name may be used again

    def _pack(self, tensor: Tensor) -> Any:
        memory = tensor.untyped_storage()
        remake, source = self._remakes.get(memory._cdata, (None, None))
        if remake is None or (tensor.dtype, tensor._version) != (remake.dtype, remake.version):
            return self._pack_outside(tensor)
        remake.num_saved += 1
        return _Packed(remake, self._pack(source), (tensor.shape, tensor.stride(), tensor.storage_offset()))

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Packed):
            return self._unpack_outside(packed)
        return packed.remake.again(lambda: self._unpack(packed.source)).as_strided(*packed.place)


def _autocast_now(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context with the casting that is in force now; backward runs without."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))


def _same(value: Any) -> Any:
    return value


def save_less_(block: nn.Module, saving: Saving, outputs: bool) -> None:
    """Let a block save what its `Saving` says.

    Args:
        block: A transformer block.
        saving: Its own.
        outputs: Whether outputs of norms and activations are made again too.
    """
    block.register_forward_pre_hook(saving.open, prepend=True)
    block.register_forward_hook(saving.close, always_call=True)
    for module in block.modules() if outputs else ():
        if type(module) in NORMS or type(module) in ACTIVATIONS:
            module.register_forward_hook(saving.can_repeat)
