"""Weights that are made without data: of each, this rank keeps the numbers that it will hold.

A model that is made inside `kept_in_parts` has its weights on torch's `meta` device. What is written to them
(random numbers, constants, a cast) is done to one whole weight at a time, which is let go again; the random
numbers are those that the whole model would be given, because every draw is made in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Stretch = Callable[[torch.Size], range]
"""Which numbers of a weight of some shape this rank holds, counted in the flattened weight."""

_ELEMENTWISE = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
}
"""What makes another weight of a weight, number by number."""


class NeedsWhole(Exception):
    """A model cannot be made in parts: some weight is made in a way that needs all of it."""


@dataclass(slots=True)
class Kept:
    """This rank's numbers of one weight."""

    storage: torch.UntypedStorage
    """That of the weight without data; held, so that no other gets its address."""
    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[range], Tensor]
    """Numbers of a stretch, from where they are: a file, or this process's memory."""

    def numbers(self, stretch: range) -> Tensor:
        """Those of a stretch of the flattened weight, in its own precision."""
        return self.read(stretch).to(self.dtype)

    def forget(self) -> None:
        """They have been taken."""
        _KEPT.pop(self.storage._cdata, None)
        self.read = _nowhere


_KEPT: dict[int, Kept] = {}
"""What is kept of weights that have no data, by the address of their storage."""
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
    _keep(weight, read or _numbers(torch.empty(len(_MODES[-1].stretch(weight.shape)), dtype=weight.dtype)))


def kept_of(model: nn.Module) -> dict[str, Kept]:
    """What is kept of the weights of a model without data, by name."""
    found = {name: _kept(weight) for name, weight in model.named_parameters()}
    unknown = [name for name, kept in found.items() if kept is None]
    assert not unknown, f"Nobody knows the numbers of {', '.join(unknown)}."
    return cast(dict[str, Kept], found)


class _Making(TorchDispatchMode):
    """Does to a rank's numbers of a weight what is done to the weight."""

    def __init__(self, stretch: Stretch) -> None:
        super().__init__()
        self.stretch = stretch
        self.is_on = True

    def taken(self, param: nn.Parameter) -> nn.Parameter:
        """The parameter without data; its numbers are kept."""
        if param.is_meta:
            if _kept(param) is None:
                keep(param)
            return param
        mine = self.stretch(param.shape)
        numbers = param.detach().reshape(-1)[mine.start : mine.stop].clone()
        bare = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        vars(bare).update(vars(param))
        _keep(bare, _numbers(numbers))
        return bare

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.is_on or func.is_view:
            return func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        kept = [one for one in map(_kept, given) if one is not None]
        if not kept:
            return func(*args, **kwargs)
        if func in _ELEMENTWISE:
            return self._made_of(kept[0], func, args, kwargs)
        if not func._schema.is_mutable or len(kept) > 1 or _kept(args[0]) is None:
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
        _keep(made, _numbers(func(kept.numbers(mine), *args[1:], **elsewhere)))
        return made

    def _written(self, kept: Kept, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What is written to a weight, or to a view of it, is written to a whole one for a moment."""
        target: Tensor = args[0]
        mine = self.stretch(kept.shape)
        whole = torch.empty(kept.shape.numel(), dtype=kept.dtype)
        own = whole[mine.start : mine.stop]
        own.copy_(kept.numbers(mine))
        func(whole.as_strided(target.shape, target.stride(), target.storage_offset()), *args[1:], **kwargs)
        kept.read = _numbers(own.clone())


def _keep(weight: Tensor, read: Callable[[range], Tensor]) -> None:
    storage = weight.untyped_storage()
    _KEPT[storage._cdata] = Kept(storage, weight.shape, weight.dtype, read)


def _kept(tensor: Any) -> Kept | None:
    if not isinstance(tensor, Tensor) or not tensor.is_meta:
        return None
    return _KEPT.get(tensor.untyped_storage()._cdata)


def _nowhere(stretch: range) -> Tensor:
    raise AssertionError("The numbers of a weight are taken once.")


def _numbers(own: Tensor) -> Callable[[range], Tensor]:
    """They are here already."""
    return lambda stretch: own
