"""Activations of a model's layers as passes without data found them, where no formula knows the layers."""

from __future__ import annotations

from memtrain.recipes.sections.base import Section

NOT_SEEN = {"xlstm": "a step keeps several times what its passes without data find"}
"""Reasons, by model type, that layers are not passed.

Source: a trace of two small xLSTM layers needed 58 MiB, and its arithmetic by passes said 17 (torch 2.13,
transformers 5.23, CPU)."""


class Growth(Section):
    """Bytes of one row that grow with its tokens: a line, and for scores of all tokens with all a square."""

    start: float
    each: float
    square: float

    def of(self, tokens: int) -> float:
        """Bytes of a row of so many tokens."""
        return max(0.0, self.start + self.each * tokens + self.square * tokens**2)


class SeenLayer(Section):
    """Bytes of a kind of layer."""

    kept: Growth
    """Bytes from its forward to its backward pass."""
    backward: Growth
    """Peak of its passes, with all that the layer kept; gradients of its weights aside."""
    gradients: int
    """Bytes of these at that moment, as they come where there were none."""
    forward: Growth
    """Peak of a pass without gradients, with the embeddings and the residual stream."""
    recomputed: Growth
    """Peak of its backward pass where it is computed again in it, with the gradient that comes in; its input
    and gradients of its weights aside."""
    recomputed_gradients: int
    """Bytes of these at that moment."""


class SeenLayers(Section):
    """All layers of a model in one precision, under one adapter."""

    kinds: tuple[SeenLayer, ...]
    order: tuple[int, ...]
    """The kind of each layer, the first first."""
    piece: int
    """Tokens of the pieces in which the model's code takes a row: the last is padded."""
