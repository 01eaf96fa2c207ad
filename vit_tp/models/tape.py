"""What did a model's constructor do to each of its tensors? Recorded on meta, replayed for one tensor at a time.

timm draws first weights and computes tables in constructors, each family in its own way and some by depth. So a model
is constructed once on meta while every operation is written down; replaying those that led to one tensor gives its
first value, whatever the family, without the rest of the model.

Source: the idea of torchdistx's deferred initialisation; written anew on torch's dispatch mode.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from vit_tp.parallel.rng import seeded

OVERWRITING = ("aten::copy_", "aten::fill_", "aten::normal_", "aten::uniform_", "aten::zero_")


class Operation(NamedTuple):
    """One call into torch.

    Args:
        function: The operator.
        args: Positional arguments; tensors among them lie on meta, or are constants.
        kwargs: Named arguments.
        results: Tensors that it returned.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]


class Tape:
    """The operations that made a model on meta.

    Args:
        construct: Makes the model; called once, with meta as the default device.

    Attributes:
        model: The model made; its tensors are the ends of the tape.
    """

    def __init__(self, construct: Callable[[], nn.Module]) -> None:
        self._operations: list[Operation] = []
        with torch.device("meta"), _Constants(), _Recorder(self._operations):
            self.model = construct()
        self._ends = dict(self.model.named_parameters(remove_duplicate=False))
        self._ends |= dict(self.model.named_buffers(remove_duplicate=False))
        self._writers: dict[int, list[int]] = defaultdict(list)
        for index, operation in enumerate(self._operations):
            for memory in {_memory(tensor) for tensor in _written(operation)}:
                self._writers[memory].append(index)

    def replay(self, name: str, *seed: object) -> Tensor:
        """Return the first value of one tensor, on the CPU.

        Args:
            name: Of a parameter or buffer.
            seed: What its random numbers follow from.

        Returns:
            The tensor; unset where the constructor left memory as it found it.

        Raises:
            KeyError: If the model has no such tensor.
        """
        end = self._ends[name]
        real: dict[int, Tensor] = {}
        with torch.no_grad(), seeded(*seed):
            for operation in self.leading_to(name):
                _repeat(operation, real)
            return _resolve(end, real)

    def leading_to(self, name: str) -> list[Operation]:
        """Return the operations that the value of a tensor depends on, in order.

        An initialiser that sets all of a tensor makes what was drawn there before it vain, and that is left out.

        Args:
            name: Of a parameter or buffer.
        """
        needed, found = [(_memory(self._ends[name]), len(self._operations))], set()
        while needed:
            memory, until = needed.pop()
            writers = self._writers[memory]
            before = bisect_left(writers, until)
            if not before or writers[before - 1] in found:
                continue
            index = writers[before - 1]
            found.add(index)
            operation = self._operations[index]
            read = _tensors(operation.args, operation.kwargs)
            if _overwrites(operation):
                needed.append((memory, writers[0] + 1))  # whoever made the memory
                read = read[1:]
            needed += [(_memory(tensor), index) for tensor in read if tensor.is_meta]
        return [self._operations[index] for index in sorted(found)]


class _Constants(TorchFunctionMode):
    """Makes tensors of Python numbers on the CPU and copies them to meta, which would forget the numbers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to_meta = str(kwargs.get("device") or "meta") == "meta"
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and to_meta:
            return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        return func(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        # Holding on to every tensor keeps the names of their memories from being used twice.
        self._operations.append(Operation(func, args, kwargs or {}, _tensors(results)))
        return results


def _tensors(*values: object) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(operation: Operation) -> list[Tensor]:
    """Return what an operation made or changed: its results, and the arguments that its schema marks as written."""
    changed = [
        operation.kwargs.get(argument.name) if argument.kwarg_only else value
        for argument, value in zip(operation.function._schema.arguments, _padded(operation))
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [*operation.results, *_tensors(changed)]


def _overwrites(operation: Operation) -> bool:
    """Return whether an operation sets all of its first argument's memory, whatever it held."""
    if operation.function._schema.name not in OVERWRITING:
        return False
    target = operation.args[0]
    return target.numel() * target.element_size() == target.untyped_storage().nbytes()


def _padded(operation: Operation) -> list[object]:
    arguments = operation.function._schema.arguments
    return [*operation.args, *[operation.kwargs.get(a.name) for a in arguments[len(operation.args) :]]]


def unset_(tensor: Tensor) -> Tensor:
    """Fill memory that nobody has set with what a first value never is. Asked by `is_unset`."""
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


def is_unset(tensor: Tensor) -> bool:
    """Return whether some element was never set."""
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _repeat(operation: Operation, real: dict[int, Tensor]) -> None:
    """Do an operation again on the CPU, and note whose memory is whose."""

    def to_real(value: object) -> object:
        if isinstance(value, Tensor):
            return _resolve(value, real)
        return torch.device("cpu") if value == torch.device("meta") else value

    results = _tensors(operation.function(*tree_map(to_real, operation.args), **tree_map(to_real, operation.kwargs)))
    for recorded, repeated in zip(operation.results, results, strict=True):
        if recorded.is_meta and _memory(recorded) not in real:
            if operation.function.__name__.startswith(("empty", "new_empty")):
                unset_(repeated)
            real[_memory(recorded)] = repeated


def _resolve(tensor: Tensor, real: dict[int, Tensor]) -> Tensor:
    """Return the real tensor that lies where a recorded one lay in its memory."""
    if not tensor.is_meta:
        return tensor
    memory = real[_memory(tensor)]
    flat = torch.empty(0, dtype=tensor.dtype).set_(memory.untyped_storage(), 0, (0,), (1,))
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
