"""Python's containers and tensors at one moment, and what grew until another, with its holder's name."""

from __future__ import annotations

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from memtrain.memory.plan.units import gib

CONTAINERS = (list, dict, set, deque)
LEAST_ENTRIES = 8
"""More entries than before that are looked at: a leak adds one in each of some two dozen steps."""
LEAST_BYTES = 2**20
"""Growth that is not told. Taste."""
SAMPLED = 16
"""Entries whose bytes are counted, of all."""
UNNAMED = "which no module names"
DEPTH = 6
"""Holders of holders that are followed to a name."""


class ObjectCensus:
    """Lengths of all containers, and the storages of all tensors; holds none of them alive."""

    def __init__(self) -> None:
        self._lengths = {id(one): (len(one), _first(one)) for one in _containers()}
        self._storages = set(_storages())

    def grown(self) -> list[str]:
        """Containers that grew since by entries, and tensors that are in none of them, the largest first."""
        found: dict[str, tuple[int, str]] = {}
        in_containers: set[int] = set()
        for one in list(_containers()):
            before, first = self._lengths.get(id(one), (len(one), 0))
            if one is self._lengths or len(one) - before < LEAST_ENTRIES:
                continue
            if first not in (0, _first(one)):
                continue  # another object at the same address
            entries = list(islice(reversed(_values(one)), len(one) - before))
            num_bytes = _mean_bytes(entries) * len(entries)
            name = _named(one) if num_bytes >= LEAST_BYTES else UNNAMED
            if name != UNNAMED or (first and num_bytes >= LEAST_BYTES):
                found[f"a {type(one).__name__}, {name}"] = (
                    num_bytes,
                    f"+{len(entries):,} entries: {_kinds(entries)}",
                )
                in_containers |= {key for entry in entries for key, _ in _tensors_in(entry)}
            del entries
        found |= self._loose_tensors(in_containers)
        return words_of_growth(found)

    def _loose_tensors(self, in_containers: set[int]) -> dict[str, tuple[int, str]]:
        """New tensors in no container that grew, by device, type and shape."""
        num_bytes: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for key, tensor in _storages().items():
            if key in self._storages or key in in_containers:
                continue
            kind = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}".removeprefix("torch.")
            num_bytes[kind] += tensor.untyped_storage().nbytes()
            count[kind] += 1
        return {
            f"tensors, {kind}": (size, f"+{count[kind]:,}")
            for kind, size in num_bytes.items()
            if size >= LEAST_BYTES and count[kind] >= LEAST_ENTRIES
        }


def _containers() -> Iterator[Any]:
    """Containers that the collector knows, and of modules those that it does not: of texts and numbers."""
    yield from (one for one in gc.get_objects() if type(one) in CONTAINERS)
    for module in list(sys.modules.values()):
        for one in list(getattr(module, "__dict__", {}).values()):
            if type(one) in CONTAINERS and not gc.is_tracked(one):
                yield one


def _storages() -> dict[int, torch.Tensor]:
    """A tensor of each storage that Python reaches."""
    found: dict[int, torch.Tensor] = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and type(one) in (torch.Tensor, torch.nn.Parameter):
            found.setdefault(one.untyped_storage().data_ptr(), one)
    return found


def _first(container: Any) -> int:
    """Identity of the first entry, which stays where others are added behind it; 0 where there is none."""
    if isinstance(container, set) or not container:
        return 0
    return id(next(iter(container)))


def _values(container: Any) -> list[Any]:
    """Entries, in the order in which they came, where there is one; of a mapping, keys with values."""
    return list(container.items()) if isinstance(container, dict) else list(container)


def _mean_bytes(entries: list[Any]) -> int:
    sampled = entries[:: max(1, len(entries) // SAMPLED)]
    return sum(_bytes_of(entry) for entry in sampled) // len(sampled)


def _bytes_of(entry: Any, depth: int = 3) -> int:
    """Bytes of an entry with what is in it."""
    if isinstance(entry, torch.Tensor):
        return entry.untyped_storage().nbytes()
    if isinstance(entry, np.ndarray):
        return int(entry.nbytes)
    size = sys.getsizeof(entry)
    if depth and isinstance(entry, dict | list | tuple | set | deque):
        size += sum(_bytes_of(inner, depth - 1) for inner in islice(_values(entry), 1000))
    return size


def _tensors_in(entry: Any, depth: int = 3) -> Iterator[tuple[int, torch.Tensor]]:
    if isinstance(entry, torch.Tensor):
        yield entry.untyped_storage().data_ptr(), entry
    elif depth and isinstance(entry, dict | list | tuple | set | deque):
        for inner in islice(_values(entry), 1000):
            yield from _tensors_in(inner, depth - 1)


def _kinds(entries: Iterable[Any]) -> str:
    """The usual type of some entries; of tensors with shape and device."""

    def kind(entry: Any) -> str:
        if isinstance(entry, torch.Tensor):
            return f"{entry.dtype} {list(entry.shape)} on {entry.device}".removeprefix("torch.")
        if isinstance(entry, np.ndarray):
            return f"numpy {entry.dtype} {list(entry.shape)}"
        if isinstance(entry, tuple) and len(entry) == 2:
            return f"{kind(entry[0])}: {kind(entry[1])}"
        return type(entry).__name__

    return Counter(map(kind, entries)).most_common(1)[0][0]


def _named(container: Any) -> str:
    """`file.py: NAME` of a container: the nearest module, class or function through which it is held."""
    ours = {id(container)}
    level: list[tuple[Any, str]] = [(container, "")]
    for _ in range(DEPTH):
        above: list[tuple[Any, str]] = []
        for held, path in level:
            for holder in gc.get_referrers(held):
                if id(holder) in ours or holder is level or holder is above:
                    continue
                ours.add(id(holder))
                name = _name_in(holder, held, path)
                if name is not None:
                    return name
                if not isinstance(holder, FrameType | tuple):
                    above.append((holder, _step(holder, held) + path))
        level = above[:200]
        del above
    return UNNAMED


def _name_in(holder: Any, held: Any, path: str) -> str | None:
    """Name of what is held, where its holder is a module's namespace, a class or a function."""
    if isinstance(holder, dict) and "__name__" in holder and "__spec__" in holder:
        key = next((key for key, value in holder.items() if value is held), None)
        file = holder.get("__file__")
        return None if key is None else f"{Path(file).name if file else holder['__name__']}: {key}{path}"
    if isinstance(holder, ModuleType):
        return None  # its namespace is found as well
    if isinstance(holder, FunctionType):
        return f"{Path(holder.__code__.co_filename).name}: {holder.__qualname__}{path}"
    if isinstance(holder, type):
        return f"{holder.__module__}.{holder.__qualname__}{_step(holder, held)}{path}"
    return None


def _step(holder: Any, held: Any) -> str:
    """Attribute or key by which a holder has a value, as Python writes it."""
    if isinstance(holder, CellType | list | set | deque):
        return ""
    if isinstance(holder, dict):
        key = next((key for key, value in holder.items() if value is held), "")
        return f"[{key!r}]"
    fields = getattr(holder, "__dict__", None)
    key = next((key for key, value in dict(fields or {}).items() if value is held), "")
    return f".{key}" if key else ""


def words_of_growth(by_owner: Mapping[str, tuple[int, str]], at_most: int = 3) -> list[str]:
    """`owner (words, bytes)` for the owners that grew most."""
    largest = sorted(by_owner.items(), key=lambda one: -one[1][0])[:at_most]
    return [f"{owner} ({text}, {gib(num_bytes)})" for owner, (num_bytes, text) in largest]
