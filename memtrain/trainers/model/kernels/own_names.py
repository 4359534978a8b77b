"""Names of a module of another library that mean something else for one model, and for no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any


def with_names(forward: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    """The same code as the function's, in which these global names have other values."""
    made = FunctionType(forward.__code__, forward.__globals__ | names, forward.__name__, forward.__defaults__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


@contextmanager
def unchanged(modules: list[ModuleType]) -> Iterator[None]:
    """Context inside which changes of these modules are undone at the end."""
    before = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, names in before:
            vars(module).update(names)
