"""Rotary positions of a row that goes in slices: made for a slice when its layer needs them, never whole.

Cosines and sines are the same for all layers, and as long as the row: 512 bytes a token of an 8B model in
bfloat16, beside some 29,000 of everything else.
"""

# B: 1 row, T: tokens of the row, S: tokens of a slice, D: width of what a rotary embedding gives for a token.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from memtrain.trainers.model.attention.own_positions import follows_row_length
from memtrain.trainers.model.streamed.in_place import Forward, ForwardInPlace


@dataclass(eq=False)
class RowAngles:
    """Argument of the layers in place of a row's cosines and sines; the last ones that were asked for stay.

    It is neither a tensor nor a container of any: nothing moves, casts or cuts it on its way to the layers.
    """

    forward: Forward
    """The rotary embedding's forward pass."""
    like: Tensor
    """Of the device and precision of the hidden states; a single number."""
    positions: Tensor
    """int [..., T]."""
    more: tuple[Any, ...]
    given: Mapping[str, Any]
    _known: tuple[tuple[int, int], Any] | None = None

    def of(self, begin: int, end: int) -> Any:
        """Cosines and sines [B, S, D] of the tokens `begin` to `end`, or what else the embedding gives."""
        if self._known is None or self._known[0] != (begin, end):
            # Gone before the next are made.
            self._known = None
            made = self.forward(self.like, self.positions[..., begin:end], *self.more, **self.given)
            self._known = (begin, end), made
        return self._known[1]

    def whole(self) -> Any:
        """The same for all tokens."""
        return self.of(0, self.positions.shape[-1])


class RotaryForward(ForwardInPlace):
    """A rotary embedding's forward pass, in place of its class's: of a row that is longer than a slice it
    gives `RowAngles`, which streamed layers understand."""

    def __call__(self, x_BTW: Tensor, position_ids: Tensor, *more: Any, **given: Any) -> Any:
        """Cosines and sines, or what stands for them."""
        if not self.slice_tokens or position_ids.shape[-1] <= self.slice_tokens:
            return self.plain(x_BTW, position_ids, *more, **given)
        return RowAngles(self.plain, x_BTW.new_empty(1, 1, 1), position_ids, more, given)


def rotary_embeddings(holders: list[nn.Module]) -> list[nn.Module]:
    """Rotary embeddings beside the decoder layers, whose angles a token's place alone decides.

    Those that follow the length of a row look at all its places: their tables stay whole.
    """
    return [
        child
        for holder in holders
        for child in holder.children()
        if "RotaryEmbedding" in type(child).__name__ and not follows_row_length(child)
    ]


def with_whole_angles(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's arguments for a row in one piece."""
    return {
        name: value.whole() if isinstance(value, RowAngles) else value for name, value in arguments.items()
    }
