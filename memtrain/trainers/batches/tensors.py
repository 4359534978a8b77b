"""The tensors of a micro-batch, at any depth of its dataclasses and tuples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def with_tensors(value: Any, act: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a micro-batch with `act` done to each of its tensors, at any depth, and once to a tensor that
    it holds twice (a layout's positions)."""
    return _changed(value, act, {})


def _changed(value: Any, act: Callable[[Tensor], Tensor], done: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in done:
            done[id(value)] = act(value)
        return done[id(value)]
    if is_dataclass(value) and not isinstance(value, type):
        held = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        return replace(value, **{name: _changed(one, act, done) for name, one in held.items()})
    if isinstance(value, tuple):
        parts = [_changed(one, act, done) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
