"""What the layers of a model hold, as passes on tensors without data measured it: no formula of a family."""

from __future__ import annotations

from memtrain.recipes.sections.base import Section

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
