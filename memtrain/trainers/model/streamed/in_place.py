"""A forward pass in a module's instance, in place of its class's, which goes over a row in slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@dataclass(eq=False)
class ForwardInPlace:
    """Stand-in of the module's forward pass; with 0 tokens a slice it is the module's own."""

    module: nn.Module
    slice_tokens: int
    before: Forward | None = None
    """Forward that was in the instance before, in place of the class's method: a kernel's."""

    def plain(self, *inputs: Any, **given: Any) -> Any:
        """The module as it is without slices."""
        if self.before is not None:
            return self.before(*inputs, **given)
        # Looked up at the call: FSDP2 changes a module's class.
        return type(self.module).forward(self.module, *inputs, **given)
