"""A tape of operators on a CPU that acts as a CUDA graph does, for tests of captured passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from memtrain.trainers.runtime.cuda_graphs import Run, recorded
from memtrain.trainers.runtime.device_waits import HostSide, recorded_by, wait_of
from memtrain.trainers.runtime.random_states import (
    RandomStates,
    ReadStates,
    drawn_states,
    noted_by,
    read_states,
)

PUTS = (torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)
"""Indexed writes. A number of Python (`x[rows, places] = True`) reaches them as a tensor of the host, which
torch copies to the device, and waits; elsewhere such a number is an argument of the kernel."""
MADE_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
"""Operators that start no kernel: their memory holds what the replay before left there."""
HOST_READS = (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__)
"""What reads a tensor of the device and is no operator on a CPU."""

SENDS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
"""What sends Python's numbers to the device that it is given; `full` has them as arguments of a kernel."""


class OperatorTape:
    """Tapes of the operators on a CPU, with the very tensors, for tests of CUDA graphs' effects.

    A number that Python changes between two starts, a tensor that is made anew or was let go, one that is
    read before the first replay, a wait for the device, or a number that the host would have to send shows
    here as it would there. Random numbers are drawn by the generators as they stand at a replay.
    """

    def __init__(self) -> None:
        self.num_records = 0
        self.num_starts = 0
        self.pool: list[Tape] = []
        """What was recorded; it holds its memory until it is released."""

    def rehearse(self, run: Run) -> str:
        """Nothing is found: the tape itself breaks off without harm."""
        run()
        return ""

    def recording(self) -> Tape:
        """A tape of the operators between its beginning and end."""
        return Tape(self)

    def record(self, run: Run) -> Run:
        """A tape of the operators of `run`, whose writes are undone."""
        return recorded(self.recording(), run)

    def release(self) -> None:
        """Free the memory of the tapes: none can be started any more."""
        for one in self.pool:
            one.free()
        self.pool.clear()


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor that was there before the recording: its place, for a graph keeps nobody's memory alive."""

    storage: StorageWeakRef
    address: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor.

        Raises: RuntimeError when its memory was let go since.
        """
        found: Any = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)  # pyright: ignore
        if found is None or found.data_ptr() != self.address:
            raise RuntimeError(
                f"a recording reads a tensor {list(self.size)} that was let go: its memory is another's"
            )
        return torch.empty(0, dtype=self.dtype).set_(found, self.offset, self.size, self.stride)


class Tape(TorchDispatchMode):
    """The operators of one recording."""

    def __init__(self, owner: OperatorTape) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self.made: dict[int, Tensor] = {}
        """A tensor of each storage that the recording made, by the storage."""
        self.host = HostSide()
        self._owner = owner
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._of_python: dict[int, Tensor] = {}
        """Tensors that torch made of Python's numbers."""
        self._generators: dict[torch.Generator, Tensor] = {}
        self._inside = ExitStack()
        self._is_whole = False

    @property
    def num_operators(self) -> int:
        """Operators that a replay starts."""
        return len(self.steps)

    def begin(self) -> None:
        """Record from here on."""
        self._generators[torch.default_generator] = torch.default_generator.get_state()
        modes = (_disable_current_modes(), _HostReads(self), self)
        for context in (noted_by(self), recorded_by(self.host), *modes):
            self._inside.enter_context(context)

    def end(self) -> None:
        """Record no more: what was written is undone, and what was made holds no numbers."""
        try:
            self.host.close()
        finally:
            self.abandon()
        with torch.no_grad(), _disable_current_modes():
            for one in self.made.values():
                _spoil(one)
        self._is_whole = True
        self._owner.num_records += 1
        self._owner.pool.append(self)

    def abandon(self) -> None:
        """Record no more: what was written is undone."""
        self._inside.close()
        with torch.no_grad(), _disable_current_modes():
            for tensor, held in reversed(self._before.values()):
                # Behind autograd's back, as the device writes in a replay.
                tensor.data.copy_(held)
        for generator, state in self._generators.items():
            generator.set_state(state)
        self._before.clear()

    def replay(self) -> None:
        """Compute everything again, into the tensors of the recording."""
        if not self._is_whole:
            raise RuntimeError("a recording that was not ended, or whose memory was released, was started")
        self._owner.num_starts += 1
        self.host.start(self._start)

    def _start(self) -> None:
        with torch.no_grad(), _disable_current_modes():
            for step in self.steps:
                step()

    def free(self) -> None:
        """Let go of the memory."""
        self._is_whole = False
        self.steps.clear()
        self.made.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._refuse_waits(func, args, kwargs)
        for written in _written(func, args, kwargs):
            if not self._is_made(written):
                self._before.setdefault(id(written), (written, written.clone()))
        for generator in (one for one in kwargs.values() if isinstance(one, torch.Generator)):
            self._generators.setdefault(generator, generator.get_state())
        made = func(*args, **kwargs)
        self._take(func, args, kwargs, made)
        return made

    def states_here(self, device: torch.device) -> RandomStates:
        """The states at this place of every replay."""
        return self._noted(lambda: read_states(device))

    def states_drawn(self, device: torch.device) -> RandomStates:
        """States that a replay draws at this place."""
        return self._noted(lambda: drawn_states(device))

    def then(self, step: Callable[[], None]) -> None:
        """Do something at this place of every replay."""
        self.steps.append(step)

    def refuse_read(self, tensor: Tensor, name: str) -> None:
        """Break the recording off where the host reads a tensor that is no number of Python's."""
        if id(tensor) not in self._of_python:
            raise RuntimeError(f"a recording cannot wait for the device: {name} reads a tensor")

    def _noted(self, read: Callable[[], ReadStates]) -> RandomStates:
        def note() -> None:
            found.states = read()

        with _disable_current_modes():
            found = TapeStates(self, read())
        self.then(note)
        return found

    def _refuse_waits(self, func: Any, args: Any, kwargs: Any) -> None:
        if wait := wait_of(func, args, kwargs):
            raise RuntimeError(f"a recording cannot wait for a number: {func._schema.name} {wait}")
        is_sent = func in PUTS and id(args[2]) in self._of_python
        if func is torch.ops.aten.lift_fresh.default:
            self._of_python[id(args[0])] = args[0]
            is_sent = args[0].dim() > 0
        if is_sent:
            raise RuntimeError("a recording cannot wait for the host to send numbers")

    def _take(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Note an operator: its arguments by their places, its results where they are."""
        if func is torch.ops.aten.lift_fresh.default:
            self._of_python[id(made)] = made
            return
        given = {_storage(one) for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        results = [one for one in tree_iter(made) if isinstance(one, Tensor) and _storage(one) not in given]
        for one in results:
            self.made.setdefault(_storage(one), one)
        if func.is_view or func._schema.name.partition("::")[2] in MADE_EMPTY:
            return
        args, kwargs = tree_map_only(Tensor, self._place, (args, kwargs))

        def again() -> None:
            own_args, own_kwargs = tree_map_only(Outside, Outside.tensor, (args, kwargs))
            found = func(*own_args, **own_kwargs)
            if not results:
                return
            here = [one for one in tree_iter(found) if isinstance(one, Tensor)]
            there = [one for one in tree_iter(made) if isinstance(one, Tensor)]
            for old, new in zip(there, here, strict=True):
                if _storage(old) in self.made and _storage(old) != _storage(new):
                    old.data.copy_(new)

        self.steps.append(again)

    def _is_made(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self.made

    def _place(self, tensor: Tensor) -> Tensor | Outside:
        if self._is_made(tensor) or id(tensor) in self._of_python:
            return tensor
        storage = tensor.untyped_storage()
        return Outside(
            StorageWeakRef(storage),
            storage.data_ptr(),
            tensor.dtype,
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
        )


@dataclass(slots=True, eq=False)
class TapeStates:
    """Random states at a place of the newest replay; those of the recording before the first."""

    tape: Tape
    states: ReadStates

    def restore(self) -> None:
        """Go on from them, in every replay as well."""
        self.states.restore()
        self.tape.then(lambda: self.states.restore())


class _HostReads(TorchFunctionMode):
    """Sees reads of a tensor, and numbers sent to a device, that are no operators on a CPU."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_READS:
            self._tape.refuse_read(args[0], func.__name__)
        # Without a device a single number stays with the host, as an argument of kernels.
        if func in SENDS and (func is Tensor.new_tensor or (kwargs or {}).get("device") is not None):
            raise RuntimeError(f"a recording cannot wait for the host to send numbers: {func.__name__}")
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes into: one, or several of a list."""
    found: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return [one for one in tree_iter(found) if isinstance(one, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _spoil(tensor: Tensor) -> None:
    """Fill a whole storage with no numbers. Places and counts stay: a recording that follows reads them."""
    if tensor.is_floating_point() or tensor.is_complex():
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        tensor.data.as_strided((size,), (1,), 0).fill_(torch.nan)
