"""The random numbers of a slice, drawn again when the slice is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memtrain.trainers.runtime.seed import seed_torch


@dataclass(frozen=True, slots=True, eq=False)
class RandomStates:
    """The states of the CPU's generator and of a GPU's."""

    cpu: Tensor
    device: torch.device
    cuda: Tensor | None

    def restore(self) -> None:
        """Go on from these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def random_states(device: torch.device) -> RandomStates:
    """The states as they are now."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RandomStates(torch.get_rng_state(), device, cuda)


def own_states(device: torch.device) -> RandomStates:
    """States of their own, which a number drawn now decides: for numbers that are drawn more than once."""
    seed = int(torch.randint(2**62, (1,)))
    with restored(device, is_on=True):
        seed_torch(seed)
        return random_states(device)


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


DRAWN_BY = ("attention_dropout", "dropout_p", "jitter_noise", "router_jitter_noise")
"""Attributes of transformers' modules that draw without a module of their own."""


def drops(layer: nn.Module) -> bool:
    """Whether a pass over `layer` draws random numbers now."""
    return any(one.training and _draws(one) for one in layer.modules())


def _draws(module: nn.Module) -> bool:
    if isinstance(module, nn.Dropout):
        return module.p > 0
    found = (getattr(module, name, 0) for name in DRAWN_BY)
    return any(isinstance(one, int | float) and one > 0 for one in found)
