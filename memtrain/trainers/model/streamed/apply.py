"""The pass over one layer at a time, on a model: in slices of a flattened row, with weights from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from memtrain.errors import LaunchError
from memtrain.trainers.model.streamed.in_place import ForwardInPlace
from memtrain.trainers.model.streamed.layer_pass import FIX, run_streamed
from memtrain.trainers.model.streamed.layer_weights import LayerWeights, Turn
from memtrain.trainers.model.streamed.row_angles import (
    RotaryForward,
    rotary_embeddings,
    with_whole_angles,
)
from memtrain.trainers.model.streamed.row_pass import row_of
from memtrain.trainers.model.streamed.row_slices import slices_of
from memtrain.trainers.model.streamed.tokenwise import TokenwiseForward

FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm")
"""Names of the norm after the layers in transformers' decoders."""

Leaving = Callable[[Tensor], AbstractContextManager[Any]]
"""Contexts in which a layer saves its input, which is given beforehand."""


@dataclass(eq=False)
class StreamedForward(ForwardInPlace):
    """A layer's forward pass, in place of its class's; without a layout of rows as usual, as where a sampler
    writes tokens."""

    leaving: Leaving = nullcontext
    turn: Turn | None = None
    """The layer's number among layers whose weights live on the host."""

    def __call__(self, x_BTW: Tensor, *others: Any, **arguments: Any) -> Any:
        """The layer's output."""
        rows = (row_of(argument) for argument in arguments.values())
        layout = next((row for row in rows if row is not None), None)
        slices = slices_of(layout, self.slice_tokens) if layout is not None and self.slice_tokens else ()
        if not slices:
            arguments = with_whole_angles(arguments)
        if not slices and self.turn is None:
            return self.plain(x_BTW, *others, **arguments)
        if others and slices:
            what = f"{type(self.module).__name__} gets positional arguments, which cannot be cut into slices"
            raise LaunchError(what, "memory.streamed_layers", FIX)
        with self.leaving(x_BTW) if torch.is_grad_enabled() else nullcontext():
            return run_streamed(
                self.module, self.plain, x_BTW, arguments, others, slices=slices, turn=self.turn
            )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model, in their order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def stream_layers(
    model: nn.Module,
    slice_tokens: int,
    leaving: Leaving = nullcontext,
    *,
    keep: int = 0,
    weights: LayerWeights | None = None,
) -> None:
    """Run all decoder layers of `model`, the norm after them, and their rotary positions in slices, with and
    without gradients.

    `leaving` surrounds the saving of the layers' inputs, but for those of the last `keep` layers. A second
    call replaces the first; 0 tokens: layers run as their class has them, or in one piece with their
    `weights` from the host.

    Raises: LaunchError when the model has no such layers.
    """
    layers = layers_of(model)
    if slice_tokens and not layers:
        raise LaunchError(
            f"the layers of {type(model).__name__} cannot be streamed", "memory.streamed_layers", FIX
        )
    holders = holders_of(model, layers)
    norms, rotary = final_norms(holders), rotary_embeddings(holders)
    for module in (*layers, *norms, *rotary):
        own = vars(module).get("forward")
        if isinstance(own, ForwardInPlace):
            del module.forward
            if own.before is not None:
                module.forward = own.before
    if not slice_tokens and weights is None:
        return
    for norm in norms if slice_tokens else ():
        norm.forward = TokenwiseForward(norm, slice_tokens, vars(norm).get("forward"))
    for embedding in rotary if slice_tokens else ():
        embedding.forward = RotaryForward(embedding, slice_tokens, vars(embedding).get("forward"))
    for number, layer in enumerate(layers):
        own_leaving = leaving if number < len(layers) - keep else nullcontext
        # The instance's attribute goes before the class's method; hooks of the module stay around it.
        turn = None if weights is None else Turn(weights, number)
        layer.forward = StreamedForward(layer, slice_tokens, vars(layer).get("forward"), own_leaving, turn)


@contextmanager
def other_slices(model: nn.Module, slice_tokens: int) -> Iterator[None]:
    """Context in which the streamed parts of `model` use slices of another length; with 0 one piece."""
    streamed = [
        own for module in model.modules() if isinstance(own := vars(module).get("forward"), ForwardInPlace)
    ]
    before = [own.slice_tokens for own in streamed]
    try:
        for own in streamed:
            own.slice_tokens = slice_tokens
        yield
    finally:
        for own, tokens in zip(streamed, before, strict=True):
            own.slice_tokens = tokens


def holders_of(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that hold a list of decoder layers: backbones."""
    own = set(map(id, layers))
    return [
        module
        for module in model.modules()
        if any(isinstance(child, nn.ModuleList) and own & set(map(id, child)) for child in module.children())
    ]


def final_norms(holders: Sequence[nn.Module]) -> list[nn.Module]:
    """The norm after the layers, by the names that transformers gives it; none where it has another."""
    return [
        norm
        for holder in holders
        for name in FINAL_NORMS
        if isinstance(norm := getattr(holder, name, None), nn.Module)
    ]
