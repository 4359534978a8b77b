"""Keys and values of one layer for a whole row, and the gradients that later slices leave on them."""

# T: tokens of the row, S: tokens of a slice, K: key heads, D: head width.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Rows
from memtrain.trainers.model.attention.sliced import gathered, returned
from memtrain.trainers.model.context_parallel.row_slices import SlicedLayout
from memtrain.trainers.model.context_parallel.windowed_rows import under_window
from memtrain.trainers.model.streamed.row_slices import RowSlice


class KeysKnown(Exception):  # noqa: N818 (says that all is well)
    """Raised by attention when keys and values were all that a pass over the slice was for."""


class LayerKeys:
    """Shared state of a layer's slices, from the first slice to the last.

    Gradients are summed in float32 at least, in place: in half precision a key of an early token would lose
    what hundreds of later slices add to it.
    """

    __slots__ = (
        "_num_tokens",
        "_key_TKD",
        "_value_TKD",
        "_grad_key_TKD",
        "_grad_value_TKD",
        "stops",
        "there",
        "met",
        "window",
    )

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._key_TKD: Tensor | None = None
        self._value_TKD: Tensor | None = None
        self._grad_key_TKD: Tensor | None = None
        self._grad_value_TKD: Tensor | None = None
        self.stops = False
        """A pass over a slice ends where its keys are known."""
        self.there: LayerKeys | None = None
        """Keys that ranks with other parts of the row hold, and gradients for them."""
        self.met: tuple[Tensor, ...] = ()
        """Keys and values of the slice at which a pass with gradients ended."""
        self.window: int | None = None
        """The window of the layer's attention, which its first pass over a slice meets."""

    def put(self, rows: slice, key_SKD: Tensor, value_SKD: Tensor) -> None:
        """Keep a slice's keys and values."""
        if self._key_TKD is None or self._value_TKD is None:
            self._key_TKD = key_SKD.new_empty(self._num_tokens, *key_SKD.shape[1:])
            self._value_TKD = value_SKD.new_empty(self._num_tokens, *value_SKD.shape[1:])
        self._key_TKD[rows] = key_SKD
        self._value_TKD[rows] = value_SKD

    def held(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Keys and values of some tokens whose slice was put before."""
        assert self._key_TKD is not None, "No slice has put its keys."
        assert self._value_TKD is not None, "No slice has put its values."
        return self._key_TKD[rows], self._value_TKD[rows]

    def add_gradients(self, rows: Rows, grad_key_SKD: Tensor, grad_value_SKD: Tensor) -> None:
        """Add to the gradients of some tokens' keys and values."""
        if self._grad_key_TKD is None or self._grad_value_TKD is None:
            self._grad_key_TKD, self._grad_value_TKD = (
                one.new_zeros(
                    self._num_tokens, *one.shape[1:], dtype=torch.promote_types(one.dtype, torch.float32)
                )
                for one in (grad_key_SKD, grad_value_SKD)
            )
        self._grad_key_TKD[rows] += grad_key_SKD
        self._grad_value_TKD[rows] += grad_value_SKD

    def gather(self, layout: SlicedLayout) -> None:
        """Fetch the keys and values that some rank's queries look back on; called by all ranks together."""
        if self._key_TKD is None or self._value_TKD is None:
            return
        layout = under_window(layout, self.window)
        self.there = LayerKeys(len(layout.order))
        self.there._key_TKD, self.there._value_TKD = gathered(self._key_TKD, self._value_TKD, layout)

    def return_gradients(self, layout: SlicedLayout) -> None:
        """Add the gradients of all ranks for this rank's keys; called by all ranks together, where each has
        gradients for its own."""
        there, self.there = self.there, None
        if there is None or self._grad_key_TKD is None or self._grad_value_TKD is None:
            return
        layout = under_window(layout, self.window)
        if there._grad_key_TKD is None or there._grad_value_TKD is None:
            none = [
                own.new_zeros(there._num_tokens, *own.shape[1:])
                for own in (self._grad_key_TKD, self._grad_value_TKD)
            ]
            there._grad_key_TKD, there._grad_value_TKD = none
        there._key_TKD = there._value_TKD = None
        self._grad_key_TKD = returned(self._grad_key_TKD, there._grad_key_TKD, layout)
        self._grad_value_TKD = returned(self._grad_value_TKD, there._grad_value_TKD, layout)

    def gradients(self, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The sums of some tokens, in `dtype`."""
        assert self._grad_key_TKD is not None, "No slice has left gradients."
        assert self._grad_value_TKD is not None, "No slice has left gradients."
        return self._grad_key_TKD[rows].to(dtype), self._grad_value_TKD[rows].to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class SliceLayout:
    """Layout of one slice of the row for attention, with the keys of the layer."""

    part: RowSlice
    keys: LayerKeys

    @property
    def num_tokens(self) -> int:
        """Tokens of the slice."""
        return self.part.num_tokens

    @property
    def places(self) -> Tensor:
        """int64 [S], the place of each token of the slice in its own row."""
        return self.part.places

    @property
    def longest_span(self) -> int:
        """Most tokens that a query can look back on, itself counted."""
        return self.part.longest_span

    def under(self, window: int | None) -> SliceLayout:
        """The same where a token attends to `window` tokens, itself counted."""
        return self if window is None else SliceLayout(self.part.under(window), self.keys)
