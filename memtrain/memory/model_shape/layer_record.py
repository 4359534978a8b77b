"""What the layers of a model hold, as passes on tensors without data measured it: no formula of a family."""

from __future__ import annotations

from typing import Literal

from memtrain.recipes.sections.base import Section

Treatment = Literal["slices", "travelling"]
"""What else is measured than layers that are kept or computed again: a row in slices, all that layers keep on
its way to the host."""

NOT_MEASURED = {"xlstm": "a step keeps several times what its passes without data find"}
"""Reasons, by model type, that layers are not passed.

Source: a trace of two small xLSTM layers needed 58 MiB, and its arithmetic by passes said 17 (torch 2.13,
transformers 5.23, CPU)."""


class Moment(Section):
    """Bytes at a moment of a pass: they grow with the tokens of a row, and for scores of all tokens with all
    with their square."""

    start: float
    """Bytes that no token adds: weights that are unpacked for a product."""
    each: float
    square: float = 0.0
    gradients: int = 0
    """Gradients of the layer's weights that are there besides, where there were none before."""

    def of(self, rows: int, tokens: float) -> float:
        """Bytes of some rows of so many tokens each."""
        return max(0.0, self.start + rows * (self.each * tokens + self.square * tokens**2))


class Peak(Section):
    """The moments of which one is the highest, each at some lengths of a row."""

    moments: tuple[Moment, ...]
    in_kernel: tuple[Moment, ...] = ()
    """Moments at which a kernel has memory of its own besides, which is not among these bytes."""

    def highest(self, rows: int, tokens: float, *, with_gradients: bool = False) -> tuple[int, int]:
        """(bytes at the highest moment, gradients of weights at it)."""
        return _highest(self.moments, rows, tokens, with_gradients=with_gradients)

    def highest_in_kernel(self, rows: int, tokens: float) -> int:
        """Bytes beside a kernel's own; 0 where no kernel has any."""
        return _highest(self.in_kernel, rows, tokens)[0] if self.in_kernel else 0


def _highest(
    moments: tuple[Moment, ...], rows: int, tokens: float, *, with_gradients: bool = False
) -> tuple[int, int]:
    found = ((round(one.of(rows, tokens)), one.gradients) for one in moments)
    return max(found, key=lambda pair: pair[0] + with_gradients * pair[1])


class LayerRecord(Section):
    """Bytes of a kind of layer."""

    kept: Moment
    """From its forward to its backward pass, with its output where the next layer keeps that; without where
    the norm after the layers does."""
    backward: Peak
    """Of its passes, with all that the layer kept."""
    forward: Peak
    """Of a pass without gradients, with the embeddings and the residual stream."""
    recomputed: Peak
    """Of its backward pass where it is computed again in it, with the gradient that comes in; its input
    aside."""


class SliceMoment(Section):
    """Bytes at the highest moment of a layer that goes over a row in slices: they grow with the tokens of the
    row, with those of a slice, and for scores with the square of these."""

    start: float
    """Sums of weights' gradients."""
    row: float
    slice: float
    square: float = 0.0

    def of(self, row: int, part: int) -> int:
        """Bytes of a row of so many tokens, in slices of `part` tokens."""
        return round(max(0.0, self.start + self.row * row + self.slice * part + self.square * part**2))


class SlicedLayers(Section):
    """Layers that go over a row in slices: the most of any kind, without the layer's input."""

    backward: tuple[SliceMoment, ...]
    """Of the backward pass of each kind, with the sums of its weights' gradients; the gradient of its output
    aside."""
    in_kernel: tuple[SliceMoment, ...]
    """The same while a kernel has memory of its own besides."""
    forward: tuple[SliceMoment, ...]
    """Of a pass without gradients, with the embeddings."""
    tables: SliceMoment
    final_backward: SliceMoment
    """Of the norm after the layers, beside its input."""


class TravellingLayers(Section):
    """Layers of which all that they keep travels to the host, as `depth` of them hold it; without tables."""

    depth: int
    stays: Moment
    """What is too small to travel, of each layer."""
    waiting: Moment
    """On the device when all layers are through: the newest that they keep, and what stays."""
    forward: Peak
    backward: Peak
    """Of all layers but the first."""
    first: Peak
    """Of the first, the last in the backward pass."""


class ModelRecord(Section):
    """All layers of a model in one precision, with one kind of kernels, under one adapter."""

    kinds: tuple[LayerRecord, ...]
    order: tuple[int, ...]
    """The kind of each layer, the first first. That is a kind of its own, since its input may need no
    gradient, and so is the last: what keeps its output is the norm after it."""
    piece: int
    """Tokens of the pieces in which the model's code takes a row, the last of them padded; 1: it takes it
    whole."""
    tables: Moment
    """What a pass makes once for all layers, and keeps: cosines and sines."""
    embedded: Moment
    """The embeddings' output, where the first layer keeps it."""
    final_norm: Moment
    """Kept by the norm after the layers, its input too."""
    final_backward: Peak
    """Of that norm's backward pass, over what it kept."""
    sliced: SlicedLayers | None = None
    """None where layers cannot go over a row in slices, or that was not asked."""
    travelling: TravellingLayers | None = None
    """None where layers carry a state from token to token, or that was not asked."""
