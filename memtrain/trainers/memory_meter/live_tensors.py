"""Counts tensors as they come and go: the live bytes of real, fake or meta tensors, event by event.

Every operator passes through a dispatch mode. A storage that an operator returns and that no argument holds
is an allocation; a weak reference to it tells its end. What a kernel allocates inside itself is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

Operator = torch._ops.OpOverload
_ASK_DEVICE = torch.ops.prim.device.default
_WRAPPERS = ("DTensor",)
"""Tensor subclasses that hold other tensors; they unwrap themselves before anything is counted."""


class Living(weakref.ref[UntypedStorage]):
    """A storage that is counted, not held, and what it was counted as."""

    __slots__ = ("key", "num_bytes", "serial")
    key: int
    num_bytes: int
    serial: int


class TensorPeak(TorchDispatchMode):
    """Live bytes of the tensors made inside, on one kind of device: `with TensorPeak() as counted`.

    Tensors that were there before are not counted, nor is their end. Costs some 10 microseconds an operator.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()
        self.device_type = device_type
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, Living] = {}
        me = weakref.ref(self)

        def dead(gone: Living) -> None:
            # Only weak references in here: a cycle would keep tensors alive and spoil the count.
            mode = me()
            if mode is not None:
                mode._storage_died(gone)

        self._at_death: Any = dead

    def count(self, tensor: Tensor, name: str = "") -> None:
        """Take `tensor` into account, unless its storage is known or on another device."""
        if _device_type(tensor) != self.device_type:
            return
        storage = tensor.untyped_storage()
        entry = self._known.get(storage._cdata)
        if entry is None or entry() is not storage:
            self._note(storage, storage.nbytes(), name)

    def _note(self, storage: UntypedStorage, num_bytes: int, name: str) -> None:
        """Take a storage into account, until it dies."""
        living = Living(storage, self._at_death)
        living.key, living.num_bytes = storage._cdata, num_bytes
        living.serial = self._allocated(num_bytes, name)
        self._known[living.key] = living

    def _storage_died(self, gone: Living) -> None:
        if self._known.get(gone.key) is gone:
            del self._known[gone.key]
        self._freed(gone.num_bytes, gone.serial)

    def _allocated(self, num_bytes: int, name: str) -> int:
        self.live_bytes += num_bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        return 0

    def _freed(self, num_bytes: int, serial: int) -> None:
        self.live_bytes -= num_bytes

    def _run(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _has_run(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """For subclasses: `out` is counted."""

    def __torch_dispatch__(
        self, func: Operator, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _ASK_DEVICE:
            # Fake tensors ask this for every operator; the answer allocates nothing.
            return _device(args[0])
        if types and any(kind.__name__ in _WRAPPERS for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = self._run(func, args, kwargs)
        if not _returns_alias(func):
            for tensor in (out,) if isinstance(out, Tensor) else _tensors((out,)):
                if not _is_held(tensor, args) and not (kwargs and _is_held(tensor, kwargs.values())):
                    self.count(tensor, func.__name__)
        self._has_run(func, args, kwargs, out)
        return out


class Event(NamedTuple):
    """An allocation (`num_bytes` above zero) or the end of one (zero)."""

    serial: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of an allocation."""

    num_bytes: int
    phase: str
    operator: str
    owner: str
    """Given by the caller (`weights`, ...); empty where an operator made it."""


class Recorder(TensorPeak):
    """A TensorPeak that remembers: the events in order, the peak of each phase, and who made what.

    `rules` answer operators that need data (see oracle.py); `scratch` says how many bytes an operator's
    kernel takes for itself while it runs.
    """

    def __init__(
        self,
        device_type: str = "cpu",
        rules: dict[Operator, Callable[..., Any]] | None = None,
        scratch: dict[Operator, Callable[..., int]] | None = None,
    ) -> None:
        super().__init__(device_type)
        self.rules = rules or {}
        self.scratch = scratch or {}
        self.events: list[Event] = []
        self.origins: list[Origin] = []
        self.phase = "start"
        self.phase_peaks: dict[str, int] = {}
        self.phase_peak_events: dict[str, int] = {}
        """Number of events up to and with the peak of a phase."""
        self._owner = ""
        self._relabelled: dict[int, str] = {}

    def enter(self, phase: str) -> None:
        """From now on everything belongs to `phase`."""
        self.phase = phase
        self._note_peak()

    def begin_phase_again(self) -> None:
        """Forget the need of the present phase so far."""
        self.phase_peaks.pop(self.phase, None)
        self._note_peak()

    @contextmanager
    def owned_by(self, owner: str) -> Iterator[None]:
        """Allocations inside belong to `owner`."""
        before, self._owner = self._owner, owner
        try:
            yield
        finally:
            self._owner = before

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Storages that are resized in place, as FSDP2's gathered weights are, are followed inside."""
        plain = UntypedStorage.resize_
        me = self

        def resize(storage: UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            made = plain(storage, size)
            entry = me._known.get(storage._cdata)
            if entry is not None and entry() is storage and size != before:
                me._freed(before, entry.serial)
                me._note(storage, size, "resize_")
            return made

        UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            UntypedStorage.resize_ = plain

    def own(self, tensors: Iterable[Tensor], owner: str) -> None:
        """Count existing `tensors` and give them, known or not, to `owner`."""
        for tensor in tensors:
            with self.owned_by(owner):
                self.count(tensor, owner)
            serial = self.serial_of(tensor)
            if serial >= 0:
                self._relabelled[serial] = owner

    def owner_of(self, serial: int) -> str:
        """Owner of an allocation; empty where none was given."""
        return self._relabelled.get(serial) or self.origins[serial].owner

    def owners_at_peaks(self, made_in: Callable[[str], str] = lambda phase: "") -> dict[str, dict[str, int]]:
        """Bytes by owner at the peak of each phase; they sum to it.

        What nobody claimed belongs to `made_in(the phase it was made in)`.
        """
        asked: dict[int, list[str]] = {}
        for phase, event in self.phase_peak_events.items():
            asked.setdefault(event, []).append(phase)
        live: dict[int, int] = {}
        totals: dict[str, int] = {}
        found: dict[str, dict[str, int]] = {phase: {} for phase in asked.get(0, [])}
        for number, (serial, num_bytes) in enumerate(self.events, start=1):
            owner = self.owner_of(serial) or made_in(self.origins[serial].phase)
            change = num_bytes or -live.pop(serial)
            if num_bytes:
                live[serial] = num_bytes
            totals[owner] = totals.get(owner, 0) + change
            for phase in asked.get(number, ()):
                found[phase] = {name: size for name, size in totals.items() if size}
        return found

    def serial_of(self, tensor: Tensor) -> int:
        """The allocation that holds a tensor; -1 where that is not counted."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        return -1 if entry is None else entry.serial

    def _allocated(self, num_bytes: int, name: str) -> int:
        serial = len(self.origins)
        self.origins.append(Origin(num_bytes, self.phase, name, self._owner))
        self.live_bytes += num_bytes
        if num_bytes:
            self.events.append(Event(serial, num_bytes))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._note_peak()
        return serial

    def _note_peak(self) -> None:
        if self.live_bytes > self.phase_peaks.get(self.phase, -1):
            self.phase_peaks[self.phase] = self.live_bytes
            self.phase_peak_events[self.phase] = len(self.events)

    def _freed(self, num_bytes: int, serial: int) -> None:
        self.live_bytes -= num_bytes
        if num_bytes:
            self.events.append(Event(serial, 0))

    def _run(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = self.rules.get(func)
        return func(*args, **kwargs) if rule is None else rule(func, args, kwargs)

    def _has_run(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        taken = self.scratch.get(func)
        if taken is not None:
            num_bytes = taken(args, kwargs, out)
            with self.owned_by("kernel scratch"):
                self._freed(num_bytes, self._allocated(num_bytes, f"scratch of {func.__name__}"))


def _device_type(tensor: Tensor) -> str:
    """The device a tensor stands for: fake tensors are all `meta` underneath."""
    return _device(tensor).type


def _device(tensor: Tensor) -> torch.device:
    fake = getattr(tensor, "fake_device", None)
    return tensor.device if fake is None else fake


def _returns_alias(func: Operator) -> bool:
    known = _ALIAS.get(func)
    if known is None:
        returns = func._schema.returns
        known = bool(returns) and all(r.alias_info is not None for r in returns)
        _ALIAS[func] = known
    return known


_ALIAS: dict[Operator, bool] = {}


def _is_held(tensor: Tensor, values: Iterable[Any]) -> bool:
    """Whether `values`, or the lists and tuples among them, have the tensor's storage."""
    storage = tensor.untyped_storage()._cdata
    return any(value.untyped_storage()._cdata == storage for value in _tensors(values))


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Tensors in `values` and in the lists and tuples among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def live_bytes() -> int:
    """Bytes of the storages of all tensors that Python reaches; a DTensor has none beside its rank's part."""
    found = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    return resident([one for one in found if not issubclass(type(one), DTensor)])


def resident(tensors: list[Tensor]) -> int:
    """Bytes of the storages of `tensors`, shared ones once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
