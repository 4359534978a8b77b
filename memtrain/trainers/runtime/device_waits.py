"""Operators for which the host waits for the device, or whose result's shape depends on numbers there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], None]
aten = torch.ops.aten
READS = {
    "_local_scalar_dense": "reads a number",
    "item": "reads a number",
    "is_nonzero": "reads a number",
    "equal": "reads whether two tensors are equal",
    "allclose": "reads whether two tensors are close",
    "bincount": "reads the largest number",
    "nonzero": "reads how many numbers are not 0",
    "argwhere": "reads how many numbers are not 0",
    "masked_select": "reads how many numbers are chosen",
    "_unique": "reads how many numbers differ",
    "_unique2": "reads how many numbers differ",
    "unique_dim": "reads how many numbers differ",
    "unique_consecutive": "reads how many numbers differ",
    "unique_dim_consecutive": "reads how many numbers differ",
}
"""What the host waits for, by an operator's name."""
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")


@dataclass(frozen=True, slots=True, eq=False)
class HostSide:
    """What the host does around a recording: calls that parts of the pass ask for while it is recorded."""

    before_end: list[Run] = field(default_factory=list[Run])
    """Still recorded."""
    before_replay: list[Run] = field(default_factory=list[Run])
    after_replay: list[Run] = field(default_factory=list[Run])

    def start(self, replay: Run) -> None:
        """A replay, and what belongs around it."""
        for one in self.before_replay:
            one()
        replay()
        for one in self.after_replay:
            one()

    def close(self) -> None:
        """The end of the recording."""
        for one in self.before_end:
            one()


_recording: list[HostSide] = []
"""Recordings under way, the innermost last. Of the process: autograd calls from threads of its own."""


@contextmanager
def recorded_by(side: HostSide) -> Iterator[None]:
    """Passes are recorded inside."""
    _recording.append(side)
    try:
        yield
    finally:
        _recording.remove(side)


def host_side() -> HostSide | None:
    """Of the recording under way; None where a pass is computed as ever."""
    return _recording[-1] if _recording else None


def host_acts(what: str) -> None:
    """Say that the host takes part in a pass here.

    Raises: RuntimeError within a recording, which could not repeat it.
    """
    if _recording:
        raise RuntimeError(f"a recording cannot repeat what the host does: {what}")


def wait_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why the host waits for an operator, or for one that makes its result's shape; empty where it does not.

    Copies between host and device are not among them: on a CPU there are none to see.
    """
    name = func._schema.name.partition("::")[2]
    if name in READS:
        return READS[name]
    if name == "repeat_interleave" and func is aten.repeat_interleave.Tensor:
        return "" if kwargs.get("output_size") is not None else "reads how many repetitions there are"
    if name in INDEXED and any(_is_mask(one) for one in args[1]):
        return "reads how many numbers a mask chooses"
    return ""


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
