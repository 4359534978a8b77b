"""Weights of decoder layers that live in host memory: two device buffers, and the next layer on its way.

A parameter of a layer stays one object: its data is a view of the layer's block of host memory, where the
optimizer steps it and a checkpoint reads it. For the layer's turn the block travels to a buffer of the
device, and stand-ins that are views of the buffer take the parameters' places in the layer's modules. In the
backward pass the gradients travel out one layer behind, and are handed to the parameters on the host.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from memtrain.memory.plan.sizes import ALIGN_BYTES, NUM_BUFFERS
from memtrain.trainers.model.offload.copy_engines import CopyEngine, Ticket
from memtrain.trainers.model.offload.host_pool import HostPool
from memtrain.trainers.runtime.device_waits import host_acts, host_side

Gradients = list[tuple[nn.Parameter, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """The weights of one layer on the host: a block, and the first byte of each weight in it."""

    weights: tuple[nn.Parameter, ...]
    places: tuple[int, ...]
    block: Tensor
    """uint8 [bytes of the layer]."""

    def views_of(self, block: Tensor) -> list[Tensor]:
        """Views of each weight in a block of the same layout."""
        return [_view(block, place, weight) for place, weight in zip(self.places, self.weights, strict=True)]


@dataclass(slots=True, eq=False)
class Buffer:
    """Device memory for one layer's weights at a time."""

    block: Tensor
    number: int | None = None
    """The layer that is in it, or on its way."""
    back: Ticket = None


@dataclass(slots=True, eq=False)
class Leaving:
    """Gradients of a layer on their way to the host."""

    gradients: Gradients
    """On the device, until the copies are done."""
    host: Tensor
    places: list[int]
    out: list[Ticket] = field(default_factory=list[Ticket])


class LayerWeights:
    """The layers' weights on the host, and the traffic of a pass over them.

    The `chosen` weights of the layers move; the others stay where they are. Passes begin at the first layer,
    go on to the last, and come back layer by layer. Buffers that hold weights which are trained are emptied
    where a pass begins: they were stepped since.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        engine: CopyEngine,
        device: torch.device,
        chosen: Collection[nn.Parameter],
    ) -> None:
        self.back_bytes = 0
        """Bytes that came to the device so far."""
        self.out_bytes = 0
        """Bytes of gradients that left it."""
        self.pool = HostPool(engine)
        self._engine = engine
        self.device = device
        """Device on which the layers work."""
        self._layers = list(layers)
        ids = set(map(id, chosen))
        self._homes = [_moved_home(layer, engine, ids) for layer in self._layers]
        self._trains = any(one.requires_grad for home in self._homes for one in home.weights)
        self._buffers: list[Buffer] = []
        self._ends: dict[nn.Parameter, Tensor] = {}
        self._shared: set[nn.Parameter] = set()
        self._parked: dict[nn.Parameter, Tensor] = {}
        self._leaving: Leaving | None = None
        self._is_called_back = False

    @property
    def host_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in (*(home.block for home in self._homes), *self._ends.values()))

    @property
    def device_bytes(self) -> int:
        """Bytes of one buffer: the largest layer."""
        return max(home.block.nbytes for home in self._homes)

    def all_of_them(self) -> set[int]:
        """The ids of the weights that live here."""
        return {id(weight) for home in self._homes for weight in home.weights} | set(map(id, self._ends))

    def travel_by(self, engine: CopyEngine) -> None:
        """Copy by another engine from now on; nothing may be under way."""
        self._engine, self.pool, self._buffers = engine, HostPool(engine), []

    @contextmanager
    def in_place(self, number: int, step: int) -> Iterator[None]:
        """Layer `number` has its weights on the device inside; the layer `step` further is on its way."""
        if number == 0 and step > 0:
            self._begin_pass()
        buffer = self._bring(number, None)
        if 0 <= number + step < len(self._homes):
            self._bring(number + step, buffer)
        self._engine.wait(buffer.back)
        home = self._homes[number]
        views = home.views_of(buffer.block)
        stand_ins = {
            id(weight): _stand_in(weight, view) for weight, view in zip(home.weights, views, strict=True)
        }
        places = [
            (module, name, weight)
            for module in self._layers[number].modules()
            for name, weight in module._parameters.items()
            if weight is not None and id(weight) in stand_ins
        ]
        for module, name, weight in places:
            module._parameters[name] = stand_ins[id(weight)]
        try:
            yield
        finally:
            for module, name, weight in places:
                module._parameters[name] = weight

    def is_away(self, number: int, weight: nn.Parameter) -> bool:
        """Whether a weight of a layer is on the host."""
        return any(weight is one for one in self._homes[number].weights)

    def adopt(self, weight: nn.Parameter, *, is_shared: bool) -> None:
        """Let a weight outside the layers live on the host; `is_shared`: two gradients come in a pass."""
        home = self._engine.allocate_host(weight.nbytes)
        with torch.no_grad():
            view = _view(home, 0, weight)
            view.copy_(weight.data)
            weight.data = view
        self._ends[weight] = home
        if is_shared:
            self._shared.add(weight)

    def fetch(self, weight: nn.Parameter) -> Tensor:
        """A copy on the device of a weight that was adopted."""
        home = self._ends[weight]
        block = self._engine.allocate_device(home.numel(), torch.uint8, self.device)
        self._engine.wait(self._engine.copy_back(block, home, None))
        self.back_bytes += home.numel()
        return _view(block, 0, weight)

    def take(self, gradients: Gradients, *, waits: bool = False) -> None:
        """Send gradients to the host, and hand gradients sent before to their weights.

        `waits`: these too, so that none of them stays on the device.
        """
        if not gradients:
            return
        sizes = [_aligned(gradient.nbytes) for _, gradient in gradients]
        host, busy = self.pool.take(sum(sizes))
        places = [sum(sizes[:index]) for index in range(len(sizes))]
        leaving = Leaving(gradients, host, places)
        for place, (_, gradient) in zip(places, gradients, strict=True):
            leaving.out.append(self._engine.copy_out(_view(host, place, gradient), gradient, busy))
            self.out_bytes += gradient.nbytes
        self._hand_over()
        self._leaving = leaving
        if waits:
            self._hand_over()
        if not self._is_called_back:
            self._is_called_back = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # pyright: ignore

    def _begin_pass(self) -> None:
        """Nothing is under way, and nothing on the device is older than the weights."""
        if self._leaving is not None:
            # A backward pass broke off: its gradients are no gradients of a step.
            for ticket in self._leaving.out:
                self._engine.settle(ticket)
            self.pool.give_back(self._leaving.host, None)
            self._leaving = None
        self._is_called_back = False
        self._parked.clear()
        if (side := host_side()) is not None:
            # Each replay begins with buffers of which nothing is known, and so does what comes after it.
            self._forget()
            side.after_replay.append(self._forget)
            side.before_end.append(self._forget)
        if self._trains:
            for buffer in self._buffers:
                self._engine.settle(buffer.back)
                buffer.number, buffer.back = None, None

    def _forget(self) -> None:
        for buffer in self._buffers:
            buffer.number, buffer.back = None, None

    def _bring(self, number: int, keep: Buffer | None) -> Buffer:
        """The buffer with a layer's weights, there or on their way; `keep` is not given up for it."""
        if not self._buffers:
            count = min(NUM_BUFFERS, len(self._homes))
            size, device = self.device_bytes, self.device
            self._buffers = [
                Buffer(self._engine.allocate_device(size, torch.uint8, device)) for _ in range(count)
            ]
        for buffer in self._buffers:
            if buffer.number == number:
                return buffer
        # The one that was filled first; empty ones before it.
        free = [one for one in self._buffers if one is not keep]
        chosen = min(free, key=lambda one: one.number is not None)
        block = self._homes[number].block
        target = chosen.block[: block.numel()]
        chosen.back = self._engine.copy_back(target, block, chosen.back)
        chosen.number = number
        self._buffers.remove(chosen)
        self._buffers.append(chosen)
        self.back_bytes += block.nbytes
        return chosen

    def _hand_over(self) -> None:
        """Add the sent gradients to their weights' gradients, as a backward pass does."""
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            return
        host_acts("gradients of weights on the host are summed there")
        for ticket in leaving.out:
            self._engine.settle(ticket)
        for place, (weight, gradient) in zip(leaving.places, leaving.gradients, strict=True):
            self._hand(weight, _view(leaving.host, place, gradient))
        leaving.gradients.clear()
        self.pool.give_back(leaving.host, None)

    def _hand(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Give a weight its gradient; the first of a shared weight waits for the second."""
        if weight not in self._shared:
            _accumulate(weight, gradient)
        elif weight in self._parked:
            _accumulate(weight, self._parked.pop(weight).add_(gradient))
        else:
            self._parked[weight] = gradient.clone()

    def _end_backward(self) -> None:
        self._is_called_back = False
        self._hand_over()
        for weight, gradient in self._parked.items():
            _accumulate(weight, gradient)
        self._parked.clear()


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Place of a layer among `LayerWeights`."""

    owner: LayerWeights
    number: int

    def in_forward(self) -> AbstractContextManager[None]:
        """Context in which the layer has its weights, on the way to the last layer."""
        return self.owner.in_place(self.number, 1)

    def in_backward(self) -> AbstractContextManager[None]:
        """The same on the way back."""
        return self.owner.in_place(self.number, -1)


def _moved_home(layer: nn.Module, engine: CopyEngine, ids: set[int]) -> Home:
    """The home of a layer's weights that are chosen by their ids: they live there from now on."""
    weights = tuple(weight for weight in layer.parameters() if id(weight) in ids)
    sizes = [_aligned(weight.nbytes) for weight in weights]
    home = Home(
        weights, tuple(sum(sizes[:index]) for index in range(len(sizes))), engine.allocate_host(sum(sizes))
    )
    with torch.no_grad():
        for weight, view in zip(weights, home.views_of(home.block), strict=True):
            view.copy_(weight.data)
            weight.data = view
    return home


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _view(block: Tensor, place: int, like: Tensor) -> Tensor:
    """A tensor of the shape and dtype of another, from byte `place` of a block on."""
    return block[place : place + like.nbytes].view(like.dtype).view(like.shape)


def _stand_in(weight: nn.Parameter, view: Tensor) -> nn.Parameter:
    """A parameter with the data of `view`; a special kind (4-bit) keeps its own attributes.

    Its version is its own, as a parameter's is: PEFT sets an adapted router's weight to itself in every pass
    (torch's parametrizations), which would age all others of the buffer.
    """
    if getattr(weight, "quant_state", None) is None:
        return nn.Parameter(view.data, requires_grad=weight.requires_grad)
    made = copy.copy(weight)
    made.data = view
    return made


def _accumulate(weight: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient to a weight's, in the precision that it asks for, and call who waits for it."""
    if weight.grad is None:
        dtype = weight.grad_dtype or gradient.dtype
        weight.grad = gradient.to(dtype, copy=True)
    else:
        weight.grad.add_(gradient)
    hooks = weight._post_accumulate_grad_hooks  # pyright: ignore
    for hook in list((hooks or {}).values()):
        hook(weight)
