"""A decoder layer over a row in slices: forward without a graph, backward from the last slice on.

A layer is token-wise but for attention, and there a token needs keys and values of earlier ones only. So the
forward pass goes through the slices in order and keeps the layer's input alone. The backward pass makes keys
and values of the row once more, then goes from the last slice to the first: it recomputes the slice, takes
its gradient through it, and leaves in `LayerKeys` what belongs to earlier keys. Without slices the row is one
piece, and the layer is recomputed as it is. Weights that live on the host are brought in before, and their
gradients taken out after (`layer_weights`).

Source: StreamBP, arXiv:2506.03077; one sweep from the last slice to the first in place of its two passes.
"""

# B: 1 row, T: tokens of the row, S: tokens of a slice, W: width of the model.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from memtrain.errors import LaunchError
from memtrain.trainers.model.attention.row_layout import Layout
from memtrain.trainers.model.context_parallel.row_slices import SlicedLayout
from memtrain.trainers.model.offload.checkpointing import drops
from memtrain.trainers.model.streamed.layer_keys import KeysKnown, LayerKeys, SliceLayout
from memtrain.trainers.model.streamed.layer_weights import Turn
from memtrain.trainers.model.streamed.row_angles import RowAngles
from memtrain.trainers.model.streamed.row_pass import RowPass
from memtrain.trainers.model.streamed.row_slices import RowSlice
from memtrain.trainers.model.streamed.weight_sums import WeightSums, trained_weights
from memtrain.trainers.model.streamed.wide_products import HALF, wide_products
from memtrain.trainers.runtime.random_states import RandomStates, own_states, random_states, restored

TOKENS_AT = {"position_ids": -1, "position_embeddings": -2}
"""The axis on which each argument of a layer has the row's tokens."""

FIX = "set memory.streamed_layers: off"


@dataclass(slots=True, eq=False)
class LayerPass:
    """A layer on a row: the inputs of its slices beside the layer's own input."""

    layer: nn.Module
    plain: Callable[..., Any]
    """The layer's forward pass over a whole row."""
    slices: tuple[RowSlice, ...]
    """The row's slices; none where it is one piece, whatever its layout is."""
    arguments: Mapping[str, Any]
    """The layer's arguments for the whole row."""
    others: tuple[Any, ...] = ()
    """Arguments without a name, of a row in one piece."""
    turn: Turn | None = None
    """The layer's number among layers whose weights live on the host."""
    states: list[RandomStates] = field(default_factory=list[RandomStates])
    """The random state that each slice began with; empty where nothing is dropped."""
    is_first_of_many: bool = False
    """The layer returns a tuple with its hidden states."""

    def forward(self, x_BTW: Tensor) -> Tensor:
        """The layer's output, without a graph."""
        here: Any = nullcontext() if self.turn is None else self.turn.in_forward()
        with torch.no_grad(), here:
            if not self.slices:
                self._note_state(x_BTW)
                return self._output_whole(x_BTW)
            keys = LayerKeys(x_BTW.shape[1])
            if self.shared is not None:
                return self._forward_shared(x_BTW, keys, self.shared)
            if len(self.slices) == 1:
                self._note_state(x_BTW)
                return self._output(x_BTW, self.slices[0], keys)
            y_BTW = torch.empty_like(x_BTW)
            for part in self.slices:
                self._note_state(x_BTW)
                y_BTW[:, part.begin : part.end] = self._output(x_BTW, part, keys)
        return y_BTW

    @property
    def shared(self) -> SlicedLayout | None:
        """The layout of a rank's part of a row, some of whose keys other ranks hold."""
        found = (one for one in self.arguments.values() if isinstance(one, SlicedLayout))
        layout = next(found, None)
        return layout if layout is not None and layout.num_gathered_kv else None

    def _forward_shared(self, x_BTW: Tensor, keys: LayerKeys, layout: SlicedLayout) -> Tensor:
        """The output of a rank's part: keys of all slices first, which the ranks gather."""
        if drops(self.layer):
            self.states += [own_states(x_BTW.device) for _ in self.slices]
        with restored(x_BTW.device, is_on=bool(self.states)):
            self._keys_again(x_BTW, keys, self.slices)
            keys.gather(layout)
            y_BTW = torch.empty_like(x_BTW)
            for number, part in enumerate(self.slices):
                self._restore_state(number, x_BTW)
                y_BTW[:, part.begin : part.end] = self._output(x_BTW, part, keys)
        return y_BTW

    def backward(
        self, x_BTW: Tensor, dy_BTW: Tensor, *, needs_dx: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of the input (None where it needs none), and of the layer's trained weights, in order.

        The input's gradient takes the place of the input, slice by slice: nothing needs the input any more.
        Should anything else have saved it, autograd finds it changed and says so.
        """
        here: Any = nullcontext() if self.turn is None else self.turn.in_backward()
        with here:
            if not self.slices:
                return self._backward_whole(x_BTW, dy_BTW, needs_dx=needs_dx)
            return self._backward_in_slices(x_BTW, dy_BTW, needs_dx=needs_dx)

    def _backward_whole(
        self, x_BTW: Tensor, dy_BTW: Tensor, *, needs_dx: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The same over a row in one piece."""
        with restored(x_BTW.device, is_on=bool(self.states)), WeightSums(self.layer, is_wide=False) as sums:
            self._restore_state(0, x_BTW)
            with torch.enable_grad():
                x_BTW = x_BTW.requires_grad_(needs_dx)
                # The output itself is let go: nothing reads it a second time.
                of_output = get_gradient_edge(self._output_whole(x_BTW))
            torch.autograd.backward(of_output, dy_BTW)
            return x_BTW.grad, sums.taken()

    def _backward_in_slices(
        self, x_BTW: Tensor, dy_BTW: Tensor, *, needs_dx: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The same from the last slice to the first."""
        keys, shared = LayerKeys(x_BTW.shape[1]), self.shared
        # The input is needed again where keys' gradients come later.
        dx_BTW = None if not needs_dx else x_BTW if shared is None else torch.empty_like(x_BTW)
        with restored(x_BTW.device, is_on=bool(self.states)):
            self._keys_again(x_BTW, keys, self.slices[:-1] if shared is None else self.slices)
            if shared is not None:
                keys.gather(shared)
            is_cut = len(self.slices) > 1
            with WeightSums(self.layer, is_wide=is_cut) as sums:
                for number in reversed(range(len(self.slices))):
                    part = self.slices[number]
                    self._restore_state(number, x_BTW)
                    with torch.enable_grad(), wide_products(is_cut and x_BTW.dtype in HALF):
                        x_BSW = x_BTW[:, part.begin : part.end].detach().requires_grad_(needs_dx)
                        # The output itself is let go, as that of a whole row.
                        of_output = get_gradient_edge(self._output_of(x_BSW, part, keys))
                    torch.autograd.backward(of_output, dy_BTW[:, part.begin : part.end])
                    if dx_BTW is not None:
                        assert x_BSW.grad is not None, "A layer's output depends on its input."
                        dx_BTW[:, part.begin : part.end] = x_BSW.grad
                    del x_BSW, of_output
                if shared is not None and keys.there is not None:
                    keys.return_gradients(shared)
                    self._backward_of_keys(x_BTW, keys, dx_BTW)
                return dx_BTW, sums.taken()

    def _backward_of_keys(self, x_BTW: Tensor, keys: LayerKeys, dx_BTW: Tensor | None) -> None:
        """From gradients of keys and values, which all ranks have added to, to the input and the weights."""
        keys.stops = True
        for number, part in enumerate(self.slices):
            self._restore_state(number, x_BTW)
            with torch.enable_grad(), wide_products(x_BTW.dtype in HALF):
                x_BSW = x_BTW[:, part.begin : part.end].detach().requires_grad_(dx_BTW is not None)
                with suppress(KeysKnown):
                    self._output_of(x_BSW, part, keys)
            made, keys.met = list(keys.met), ()
            if not any(one.requires_grad for one in made):
                continue
            grads = keys.gradients(slice(part.begin, part.end), made[0].dtype)
            pairs = [(one, grad) for one, grad in zip(made, grads, strict=True) if one.requires_grad]
            torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
            if dx_BTW is not None and x_BSW.grad is not None:
                dx_BTW[:, part.begin : part.end] += x_BSW.grad
        keys.stops = False

    def _keys_again(self, x_BTW: Tensor, keys: LayerKeys, slices: tuple[RowSlice, ...]) -> None:
        """Keys and values of some slices, from the first on: each up to the layer's attention, without a
        graph."""
        keys.stops = True
        with torch.no_grad():
            for number, part in enumerate(slices):
                self._restore_state(number, x_BTW)
                try:
                    self._output(x_BTW, part, keys)
                except KeysKnown:
                    continue
                # A layer without attention is token-wise, and has no keys to know.
        keys.stops = False

    def _output_whole(self, x_BTW: Tensor) -> Tensor:
        """The plain layer on the row."""
        out = self.plain(x_BTW, *self.others, **self.arguments)
        self.is_first_of_many = not isinstance(out, Tensor)
        return _hidden(out, self.layer)

    def _output(self, x_BTW: Tensor, part: RowSlice, keys: LayerKeys) -> Tensor:
        return self._output_of(x_BTW[:, part.begin : part.end], part, keys)

    def _output_of(self, x_BSW: Tensor, part: RowSlice, keys: LayerKeys) -> Tensor:
        """The plain layer on one slice."""
        out = self.plain(x_BSW, **sliced(self.arguments, part, keys))
        self.is_first_of_many = not isinstance(out, Tensor)
        return _hidden(out, self.layer)

    def is_away(self, weight: nn.Parameter) -> bool:
        """Whether a weight of the layer lives on the host."""
        return self.turn is not None and self.turn.owner.is_away(self.turn.number, weight)

    def as_returned(self, y_BTW: Tensor) -> Tensor | tuple[Tensor]:
        """The output in the form that the layer gives it."""
        return (y_BTW,) if self.is_first_of_many else y_BTW

    def _note_state(self, x_BTW: Tensor) -> None:
        if drops(self.layer):
            self.states.append(random_states(x_BTW.device))

    def _restore_state(self, number: int, x_BTW: Tensor) -> None:
        if self.states:
            self.states[number].restore()


class StreamedLayer(torch.autograd.Function):
    """`LayerPass` in the graph: keeps the layer's input, and hands out gradients of input and weights.

    The weights are inputs of the function, so that whatever waits for a gradient (hooks of the optimizer, of
    an exchange, of shards) sees it once, whole.
    """

    @staticmethod
    def forward(ctx: Any, one_pass: LayerPass, x_BTW: Tensor, *weights: Tensor) -> Tensor:
        """The layer's output."""
        ctx.one_pass = one_pass
        ctx.save_for_backward(x_BTW)
        return one_pass.forward(x_BTW)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of each weight."""
        one_pass: LayerPass = ctx.one_pass
        # Without its history: FSDP2's hooks make the input a view, which autograd lets nobody change.
        x_BTW = ctx.saved_tensors[0].detach()
        dx_BTW, weight_grads = one_pass.backward(x_BTW, grads[0], needs_dx=ctx.needs_input_grad[1])
        return None, dx_BTW, *_for_autograd(one_pass, weight_grads)


def _inputs(one_pass: LayerPass) -> list[Tensor]:
    """The trained weights as inputs of the function, to which autograd hands gradients.

    A weight on the host is none: its gradient takes another way, and its hooks are called at the end of that.
    A leaf that nobody looks at stands for all of them, so that the output has a gradient.
    """
    here = [one for one in trained_weights(one_pass.layer) if not one_pass.is_away(one)]
    any_away = len(here) < len(trained_weights(one_pass.layer))
    return [*here, torch.empty(0, requires_grad=True)] if any_away else [*here]


def _for_autograd(one_pass: LayerPass, grads: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients of `_inputs`; gradients of weights on the host are on their way there."""
    pairs = list(zip(trained_weights(one_pass.layer), grads, strict=True))
    here = [gradient for weight, gradient in pairs if not one_pass.is_away(weight)]
    if len(here) == len(pairs):
        return here
    assert one_pass.turn is not None, "Only weights of a turn are away."
    leaving = [(one, grad) for one, grad in pairs if grad is not None and one_pass.is_away(one)]
    one_pass.turn.owner.take(leaving)
    return [*here, None]


def run_streamed(
    layer: nn.Module,
    plain: Callable[..., Any],
    x_BTW: Tensor,
    arguments: Mapping[str, Any],
    others: tuple[Any, ...] = (),
    *,
    slices: tuple[RowSlice, ...],
    turn: Turn | None = None,
) -> Tensor | tuple[Tensor]:
    """The layer's output for a row; in the graph where gradients are enabled.

    Raises: LaunchError for a row in one piece where an argument beside the input needs a gradient.
    """
    one_pass = LayerPass(layer, plain, slices, arguments, others, turn)
    if not torch.is_grad_enabled():
        return one_pass.as_returned(one_pass.forward(x_BTW))
    if not slices and any(_needs_gradient(one) for one in (*arguments.values(), *others)):
        what = f"{type(layer).__name__} gets a second input that needs a gradient"
        raise LaunchError(what, "memory.weights_offload", "set it to off")
    out: Tensor = StreamedLayer.apply(one_pass, x_BTW, *_inputs(one_pass))
    return one_pass.as_returned(out)


def _needs_gradient(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_needs_gradient(one) for one in cast(Sequence[Any], value))
    return isinstance(value, Tensor) and value.requires_grad


def sliced(arguments: Mapping[str, Any], part: RowSlice, keys: LayerKeys) -> dict[str, Any]:
    """A layer's arguments for one slice.

    Raises: LaunchError for a tensor of which it is not known where the tokens are.
    """
    own = SliceLayout(part, keys)
    return {name: _sliced(name, value, own) for name, value in arguments.items()}


def _sliced(name: str, value: Any, own: SliceLayout) -> Any:
    part = own.part
    if isinstance(value, Layout | SlicedLayout):
        return own
    if isinstance(value, RowPass) and value.row is not None:
        return value.of_slice(own)
    if isinstance(value, RowAngles):
        return value.of(part.begin, part.end)
    if isinstance(value, tuple | list) and any(isinstance(one, Tensor) for one in cast(Sequence[Any], value)):
        return tuple(_sliced(name, one, own) for one in cast(Sequence[Any], value))
    if not isinstance(value, Tensor):
        return value
    if name not in TOKENS_AT:
        what = f"the layers get `{name}`, a tensor whose token dimension is unknown"
        raise LaunchError(what, "memory.streamed_layers", FIX)
    return value.narrow(TOKENS_AT[name], part.begin, part.num_tokens)


def _hidden(out: Any, layer: nn.Module) -> Tensor:
    if isinstance(out, Tensor):
        return out
    first, *others = out
    if any(other is not None for other in others):
        what = f"{type(layer).__name__} returns more than its hidden states"
        raise LaunchError(what, "memory.streamed_layers", FIX)
    return first
