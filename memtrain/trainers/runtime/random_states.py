"""States of torch's generators to which a pass returns: a recording of the pass returns to them as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memtrain.trainers.runtime.seed import seed_torch


class RandomStates(Protocol):
    """The states of the CPU's generator and of a GPU's at one place of a pass."""

    def restore(self) -> None:
        """Go on from these states."""
        ...


class NotesStates(Protocol):
    """A recording under way: it returns to states of the pass that it replays, not of the one it saw."""

    def states_here(self, device: torch.device) -> RandomStates:
        """The states at this place of the pass."""
        ...

    def states_drawn(self, device: torch.device) -> RandomStates:
        """States which a number that is drawn at this place decides."""
        ...


_noting: list[NotesStates] = []
"""The recordings under way, the innermost last. Of the process: autograd calls from threads of its own."""


@contextmanager
def noted_by(recording: NotesStates) -> Iterator[None]:
    """States are noted by `recording` inside."""
    _noting.append(recording)
    try:
        yield
    finally:
        _noting.remove(recording)


@dataclass(frozen=True, slots=True, eq=False)
class ReadStates:
    """States that were read from the generators."""

    cpu: Tensor
    device: torch.device
    cuda: Tensor | None

    def restore(self) -> None:
        """Go on from these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def read_states(device: torch.device) -> ReadStates:
    """The states of the generators now, whatever is recorded."""
    is_gpu = device.type == "cuda" and torch.cuda.is_initialized()
    cuda = torch.cuda.get_rng_state(device) if is_gpu else None
    return ReadStates(torch.get_rng_state(), device, cuda)


def drawn_states(device: torch.device) -> ReadStates:
    """States that a number drawn now decides, whatever is recorded; the generators go on after the draw."""
    seed = int(torch.randint(2**62, (1,)))
    before = read_states(device)
    seed_torch(seed)
    made = read_states(device)
    before.restore()
    return made


def random_states(device: torch.device) -> RandomStates:
    """The states as they are now."""
    return _noting[-1].states_here(device) if _noting else read_states(device)


def own_states(device: torch.device) -> RandomStates:
    """States of their own, which a number drawn now decides: for numbers that are drawn more than once."""
    return _noting[-1].states_drawn(device) if _noting else drawn_states(device)


@contextmanager
def restored(device: torch.device, *, is_on: bool) -> Iterator[None]:
    """The states after the block are those before it."""
    if not is_on:
        yield
        return
    before = random_states(device)
    try:
        yield
    finally:
        before.restore()
