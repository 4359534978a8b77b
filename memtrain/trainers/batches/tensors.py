"""The tensors of a micro-batch, at any depth of its dataclasses and tuples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def with_tensors(value: Any, act: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a micro-batch with `act` done to each of its tensors, at any depth."""
    if isinstance(value, Tensor):
        return act(value)
    if is_dataclass(value) and not isinstance(value, type):
        held = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        return replace(value, **{name: with_tensors(one, act) for name, one in held.items()})
    if isinstance(value, tuple):
        parts = [with_tensors(one, act) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
