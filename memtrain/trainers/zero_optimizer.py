"""The optimizer of a run under ZeRO: DeepSpeed steps flat parts, and checkpoints hold whole weights.

A checkpoint is what one process would write (whole states by weight), so that any engine and any number of
ranks goes on from it. A rank's flat part of a group of weights is described by its `Piece`s.
"""

# A piece is counted in numbers of the flattened weight, not in rows.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from memtrain.trainers.optim_master import MASTER

Group = dict[str, Any]
State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """Numbers of one weight that are in a flat part."""

    weight: int
    """Which weight, in the order of the optimizer's groups."""
    first: int
    """First number, counted in the flattened weight."""
    place: int
    """Where it is in the flat part."""
    count: int


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat part that this rank steps: float32 copies of pieces of weights."""

    copies: Tensor
    pieces: tuple[Piece, ...]


class ZeroOptimizer(Optimizer):
    """Whole weights from outside, flat parts of them inside.

    Until `give` it holds what `load_state_dict` was given; DeepSpeed makes its parts from whole weights.
    """

    def __init__(self, groups: list[Group], inner: Optimizer, lr: float, *, is_half: bool) -> None:
        super().__init__([dict(group) for group in groups], {"lr": lr})
        self.inner = inner
        self.state = inner.state
        self._is_half = is_half
        self._flats: tuple[Flat, ...] = ()
        self._waiting: State | None = None
        self._shapes = [parameter.shape for group in groups for parameter in group["params"]]

    def give(self, flats: tuple[Flat, ...]) -> None:
        """Take the parts that DeepSpeed steps, and put what was loaded where it belongs."""
        self._flats = flats
        if self._waiting is not None:
            for flat in flats:
                self._fill(flat, self._waiting["state"])
            self._waiting = None

    def set_rates(self) -> None:
        """Tell the inner optimizer the rate of every group."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = outer["lr"]

    def load_state_dict(self, state_dict: State) -> None:
        """Go on from a whole state, of any engine; before the parts are made."""
        assert not self._flats, "A state is loaded before DeepSpeed cuts the weights."
        self._waiting = state_dict

    @torch.no_grad()
    def state_dict(self) -> State:
        """The whole state in host memory of the main rank; called by all ranks. On others it is empty."""
        entries: dict[int, dict[str, Any]] = {}
        for index, shape in enumerate(self._shapes):
            for key in self._keys():
                whole = self._whole(index, key, shape)
                if whole is not None:
                    entries.setdefault(index, {})[key] = whole
            for key, value in self._counters().items():
                entries.setdefault(index, {})[key] = value
        return {"state": entries, "param_groups": self._told_groups()}

    def _told_groups(self) -> list[State]:
        """Groups as the inner optimizer of whole weights would tell them."""
        told: list[State] = []
        first = 0
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            count = len(outer["params"])
            told.append(
                {key: value for key, value in inner.items() if key != "params"}
                | {"params": list(range(first, first + count))}
            )
            first += count
        return told

    def _keys(self) -> list[str]:
        """States that have a number for each of a weight's."""
        held = [self._held(flat) for flat in self._flats]
        found = {
            key
            for flat, state in zip(self._flats, held, strict=True)
            for key, value in state.items()
            if isinstance(value, Tensor) and value.shape == flat.copies.shape
        }
        return sorted(found) + ([MASTER] if self._is_half else [])

    def _counters(self) -> State:
        """States that are one for all: how many steps were made."""
        for flat in self._flats:
            found = {
                key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                for key, value in self._held(flat).items()
                if not isinstance(value, Tensor) or value.shape != flat.copies.shape
            }
            if found:
                return found
        return {}

    def _held(self, flat: Flat) -> State:
        return dict(self.inner.state.get(flat.copies, {}))

    def _whole(self, index: int, key: str, shape: torch.Size) -> Tensor | None:
        """A state of one weight, summed from the parts of all ranks; None beside the main one."""
        device = self._flats[0].copies.device
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=device)
        for flat, piece in self._pieces():
            if piece.weight == index:
                source = flat.copies if key == MASTER else self._held(flat)[key]
                part = source.detach().view(-1)[piece.place : piece.place + piece.count]
                whole[piece.first : piece.first + piece.count] = part
        whole = whole.to(_meeting_place(device))
        dist.all_reduce(whole)
        return whole.cpu().view(shape) if dist.get_rank() == 0 else None

    def _pieces(self) -> Iterator[tuple[Flat, Piece]]:
        for flat in self._flats:
            for piece in flat.pieces:
                yield flat, piece

    @torch.no_grad()
    def _fill(self, flat: Flat, entries: dict[int, State]) -> None:
        """Put the rank's numbers of a whole state into a flat part."""
        state: State = {}
        for piece in flat.pieces:
            for key, value in entries.get(piece.weight, {}).items():
                if not isinstance(value, Tensor) or value.shape != self._shapes[piece.weight]:
                    state[key] = value.clone() if isinstance(value, Tensor) else value
                    continue
                target = flat.copies.view(-1)
                if key != MASTER:
                    target = state.setdefault(key, torch.zeros_like(flat.copies)).view(-1)
                part = value.reshape(-1)[piece.first : piece.first + piece.count]
                target[piece.place : piece.place + piece.count] = part
        if state:
            self.inner.state[flat.copies] = state


def _meeting_place(device: torch.device) -> torch.device:
    """Where a sum can be made: parts that wait on the host meet on the device with NCCL."""
    if device.type == "cpu" and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return device
