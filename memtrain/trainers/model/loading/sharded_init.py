"""Weights that are made without data: of each, this rank keeps the numbers that it will hold.

A model that is made inside `kept_in_parts` has its weights on torch's `meta` device. What is written to them
(random numbers, constants, a cast) is done to one whole weight at a time, which is let go again; the random
numbers are those that the whole model would be given, because every draw is made in the same order.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Stretch = Callable[[torch.Size], range]
"""Range of a weight's numbers that this rank holds, counted in the flattened weight."""

MAPPED_BYTES = 2**16
"""Numbers that need less are not given pages of their own. Taste."""

_ELEMENTWISE = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
}
"""Operators that make another weight of a weight, number by number."""


class NeedsWhole(Exception):
    """A model cannot be made in parts: some weight is made in a way that needs all of it."""


@dataclass(slots=True)
class Kept:
    """Numbers of a weight on this rank."""

    storage: torch.UntypedStorage
    """Storage of the weight without data; held, so that no other gets its address."""
    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[range], Tensor]
    """Numbers of a stretch, from where they are: a file, or this process's memory."""
    here: Tensor | None = None
    """The numbers that are in this process's memory, flat."""

    def brought(self, stretch: range) -> Tensor:
        """The numbers of this rank, in memory from now on, where they can be written."""
        if self.here is None:
            self.here = _room(len(stretch), self.dtype).copy_(self.read(stretch))
            self.read = _stored(self.here)
        return self.here

    def numbers(self, stretch: range) -> Tensor:
        """Numbers of a stretch of the flattened weight, in its own precision."""
        return self.read(stretch).to(self.dtype)

    def forget(self) -> None:
        """Release the numbers after they have been taken."""
        _KEPT.pop(self.storage._cdata, None)
        self.read, self.here = _nowhere, None


_KEPT: dict[int, Kept] = {}
"""Kept numbers of weights that have no data, by the address of their storage."""
_MODES: list[_Making] = []


@contextmanager
def kept_in_parts(stretch: Stretch) -> Iterator[None]:
    """Weights that are made inside have no data, and this rank keeps the `stretch` of each that it will hold.

    Buffers are real. Raises: NeedsWhole.
    """
    plain = nn.Module.register_parameter
    making = _Making(stretch)

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        plain(module, name, param)
        if param is not None and making.is_on:
            module._parameters[name] = making.taken(param)

    before = set(_KEPT)
    _MODES.append(making)
    nn.Module.register_parameter = register  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with making:
            yield
    except NeedsWhole:
        for address in set(_KEPT) - before:
            _KEPT[address].forget()
        raise
    finally:
        nn.Module.register_parameter = plain
        _MODES.pop()


def is_keeping() -> bool:
    """Whether weights that are made now have no data."""
    return bool(_MODES)


@contextmanager
def not_drawn() -> Iterator[None]:
    """Weights made inside are given no numbers: they are read later."""
    making = _MODES[-1]
    making.is_on = False
    try:
        yield
    finally:
        making.is_on = True


def keep(weight: Tensor, read: Callable[[range], Tensor] | None = None) -> None:
    """Remember where the numbers of a weight without data are; without `read` they are written to it."""
    if read is None:
        hold(weight, _room(len(_MODES[-1].stretch(weight.shape)), weight.dtype))
    else:
        _keep(weight, read)


def kept_of(model: nn.Module) -> dict[str, Kept]:
    """Kept numbers of the weights of a model without data, by name."""
    found = {name: known_of(weight) for name, weight in model.named_parameters()}
    unknown = [name for name, kept in found.items() if kept is None]
    assert not unknown, f"Nobody knows the numbers of {', '.join(unknown)}."
    return cast(dict[str, Kept], found)


class _Making(TorchDispatchMode):
    """Applies a weight's initialisation to a rank's numbers of it."""

    def __init__(self, stretch: Stretch) -> None:
        super().__init__()
        self.stretch = stretch
        self.is_on = True
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def taken(self, param: nn.Parameter) -> nn.Parameter:
        """The parameter without data; its numbers are kept."""
        if param.is_meta:
            if known_of(param) is None:
                keep(param)
            return param
        mine = self.stretch(param.shape)
        own = param.detach().reshape(-1)[mine.start : mine.stop]
        bare = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        vars(bare).update(vars(param))
        hold(bare, _room(len(mine), param.dtype).copy_(own))
        return bare

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.is_on or func.is_view:
            return func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        kept = [one for one in map(known_of, given) if one is not None]
        if not kept:
            return func(*args, **kwargs)
        if func in _ELEMENTWISE:
            return self._made_of(kept[0], func, args, kwargs)
        if not func._schema.is_mutable or len(kept) > 1 or known_of(args[0]) is None:
            raise NeedsWhole(f"{func} needs a whole weight")
        self._written(kept[0], func, args, kwargs)
        return args[0]

    def _made_of(self, kept: Kept, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A weight that is made of another one, number by number."""
        if args[0].shape != kept.shape:
            raise NeedsWhole(f"{func} of a part of a weight")
        made: Tensor = func(*args, **kwargs)
        mine = self.stretch(kept.shape)
        elsewhere = {key: value for key, value in kwargs.items() if key not in ("device", "memory_format")}
        own: Tensor = func(kept.numbers(mine), *args[1:], **elsewhere)
        hold(made, _room(len(mine), own.dtype).copy_(own))
        return made

    def _written(self, kept: Kept, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Writes to a weight, or to a view of it, go to a whole weight for a moment."""
        target: Tensor = args[0]
        mine = self.stretch(kept.shape)
        whole, own = self._whole(kept.shape.numel(), kept.dtype), kept.brought(mine)
        inside = whole[mine.start : mine.stop]
        inside.copy_(own)
        func(whole.as_strided(target.shape, target.stride(), target.storage_offset()), *args[1:], **kwargs)
        own.copy_(inside)

    def _whole(self, count: int, dtype: torch.dtype) -> Tensor:
        """Room for a whole weight, the same for all: as large as the largest so far."""
        if self._scratch.nbytes < count * dtype.itemsize:
            self._scratch = _room(count * dtype.itemsize, torch.uint8)
        return self._scratch[: count * dtype.itemsize].view(dtype)


def hold(weight: Tensor, own: Tensor) -> None:
    """Keep this rank's numbers of a weight without data, which are in this process's memory."""
    _keep(weight, _stored(own)).here = own


def _keep(weight: Tensor, read: Callable[[range], Tensor]) -> Kept:
    storage = weight.untyped_storage()
    kept = _KEPT[storage._cdata] = Kept(storage, weight.shape, weight.dtype, read)
    return kept


def _room(count: int, dtype: torch.dtype) -> Tensor:
    """Flat memory that the system has back as soon as it is let go: the allocator would keep it, in holes."""
    num_bytes = count * dtype.itemsize
    if num_bytes < MAPPED_BYTES:
        return torch.empty(count, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype)


def own_stretch(shape: torch.Size) -> range:
    """Range of the numbers of a weight of such a shape that this rank keeps."""
    return _MODES[-1].stretch(shape)


def known_of(tensor: Any) -> Kept | None:
    """Kept numbers of a weight without data; None of any other tensor."""
    if not isinstance(tensor, Tensor) or not tensor.is_meta:
        return None
    return _KEPT.get(tensor.untyped_storage()._cdata)


def _nowhere(stretch: range) -> Tensor:
    raise AssertionError("The numbers of a weight are taken once.")


def _stored(own: Tensor) -> Callable[[range], Tensor]:
    return lambda stretch: own
