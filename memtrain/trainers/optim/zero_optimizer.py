"""The optimizer of a run under ZeRO: DeepSpeed steps flat parts, and checkpoints hold whole weights.

A checkpoint has whole states by weight, gathered, or the pieces of each rank (run/pieces.py): from either
any engine and any number of ranks goes on. A rank's flat part of a group of weights is described by its
`Piece`s.
"""

# A piece is counted in numbers of the flattened weight, not in rows.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from memtrain.trainers.optim.master_forms import MASTER

Group = dict[str, Any]
State = dict[str, Any]
ReadStates = Callable[[Mapping[int, range]], Mapping[int, State]]
"""`read(stretches)`: states of a stretch of each weight, by its number: flat tensors, and counters."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Numbers of one weight that are in a flat part."""

    weight: int
    """Number of the weight, in the order of the optimizer's groups."""
    first: int
    """First number, counted in the flattened weight."""
    place: int
    """Place in the flat part."""
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
        self._waiting: ReadStates | None = None
        self._shapes = [parameter.shape for group in groups for parameter in group["params"]]

    def give(self, flats: tuple[Flat, ...]) -> None:
        """Take the parts that DeepSpeed steps, and put loaded states in their places."""
        self._flats = flats
        if self._waiting is not None:
            wanted = {one.weight: range(one.first, one.first + one.count) for _, one in self._pieces()}
            states = self._waiting(wanted)
            for flat in flats:
                self._fill(flat, states)
            self._waiting = None

    def set_rates(self) -> None:
        """Tell the inner optimizer the rate of every group."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = outer["lr"]

    def load_state_dict(self, state_dict: State) -> None:
        """Go on from a whole state, of any engine; before the parts are made."""
        entries: dict[int, State] = state_dict["state"]

        def read(wanted: Mapping[int, range]) -> dict[int, State]:
            return {i: self._cut(entries[i], i, stretch) for i, stretch in wanted.items() if i in entries}

        self.load_pieces(read)

    def load_pieces(self, read: ReadStates) -> None:
        """Go on from what `read` gives for the stretches of weights that this rank will step."""
        assert not self._flats, "A state is loaded before DeepSpeed cuts the weights."
        self._waiting = read

    def _cut(self, entry: State, index: int, stretch: range) -> State:
        """The stretch of each whole state of a weight; counters as they are."""
        return {
            key: value.reshape(-1)[stretch.start : stretch.stop]
            if isinstance(value, Tensor) and value.shape == self._shapes[index]
            else value
            for key, value in entry.items()
        }

    def state_dict(self) -> State:
        """The whole state in host memory, on every rank; called by all of them."""
        return self.whole_state(lambda whole: whole.to("cpu", copy=True))

    @torch.no_grad()
    def whole_state(self, hold: Callable[[Tensor], Tensor]) -> State:
        """The whole state, of each gathered tensor what `hold` makes of it; called by all ranks."""
        entries: dict[int, dict[str, Any]] = {}
        for index, shape in enumerate(self._shapes):
            made = {key: hold(self._whole(index, key, shape)) for key in self._keys()}
            entries[index] = made | self._counters()
        return {"state": {i: one for i, one in entries.items() if one}, "param_groups": self._whole_groups()}

    def own_state(self, hold: Callable[[Tensor], Tensor]) -> State:
        """The state of this rank's pieces, by the number of the weight; of each tensor what `hold` makes."""
        entries: dict[int, State] = {}
        for flat, piece in self._pieces():
            held = {**self._held(flat), **({MASTER: flat.copies} if self._is_half else {})}
            numbers = {
                key: hold(value.detach().view(-1)[piece.place : piece.place + piece.count])
                for key, value in held.items()
                if isinstance(value, Tensor) and value.shape == flat.copies.shape
            }
            entries[piece.weight] = {
                "first": piece.first,
                "count": piece.count,
                "numbers": numbers,
                "counters": self._counters(),
            }
        return {"state": entries, "param_groups": self._whole_groups()}

    def own_weights(self) -> dict[int, tuple[int, Tensor]]:
        """(first number, numbers) of this rank's pieces of the weights themselves, by their number."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        found: dict[int, tuple[int, Tensor]] = {}
        for _, piece in self._pieces():
            parameter = parameters[piece.weight]
            is_cut = hasattr(parameter, "ds_tensor")
            numbers = parameter.ds_tensor if is_cut else parameter
            first = 0 if is_cut else piece.first
            found[piece.weight] = piece.first, numbers.detach().view(-1)[first : first + piece.count]
        return found

    def _whole_groups(self) -> list[State]:
        """Groups as the inner optimizer of whole weights would tell them."""
        groups: list[State] = []
        first = 0
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            count = len(outer["params"])
            groups.append(
                {key: value for key, value in inner.items() if key != "params"}
                | {"params": list(range(first, first + count))}
            )
            first += count
        return groups

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

    def _whole(self, index: int, key: str, shape: torch.Size) -> Tensor:
        """A state of one weight, summed from the parts of all ranks."""
        device = self._flats[0].copies.device
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=device)
        for flat, piece in self._pieces():
            if piece.weight == index:
                source = flat.copies if key == MASTER else self._held(flat)[key]
                part = source.detach().view(-1)[piece.place : piece.place + piece.count]
                whole[piece.first : piece.first + piece.count] = part
        whole = whole.to(_meeting_place(device))
        dist.all_reduce(whole)
        return whole.view(shape)

    def _pieces(self) -> Iterator[tuple[Flat, Piece]]:
        for flat in self._flats:
            for piece in flat.pieces:
                yield flat, piece

    @torch.no_grad()
    def _fill(self, flat: Flat, entries: Mapping[int, State]) -> None:
        """Put the states of this rank's pieces into a flat part."""
        state: State = {}
        for piece in flat.pieces:
            for key, value in entries.get(piece.weight, {}).items():
                if not isinstance(value, Tensor) or value.shape != (piece.count,):
                    state[key] = value.clone() if isinstance(value, Tensor) else value
                    continue
                target = flat.copies.view(-1)
                if key != MASTER:
                    target = state.setdefault(key, torch.zeros_like(flat.copies)).view(-1)
                target[piece.place : piece.place + piece.count] = value
        if state:
            self.inner.state[flat.copies] = state


def _meeting_place(device: torch.device) -> torch.device:
    """Device on which a sum can be made: parts that wait on the host meet on the device with NCCL."""
    if device.type == "cpu" and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return device
