"""The layout of a row among a layer's arguments, itself or in a sampler's pass over prompts."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from memtrain.trainers.model.attention.row_layout import Layout
from memtrain.trainers.model.context_parallel.row_slices import SlicedLayout
from memtrain.trainers.model.streamed.layer_keys import SliceLayout


@runtime_checkable
class RowPass(Protocol):
    """An argument of the layers with the row's layout for their attention: a sampler's, for prompts."""

    @property
    def row(self) -> Layout | None:
        """The layout of the row; None where the pass is over no such row."""
        ...

    def of_slice(self, layout: SliceLayout) -> object:
        """The same for one slice of the row."""
        ...


def row_of(argument: object) -> Layout | SlicedLayout | None:
    """The layout of a row, or of a rank's part of one, that an argument of the layers is, or carries."""
    if isinstance(argument, Layout | SlicedLayout):
        return argument
    return argument.row if isinstance(argument, RowPass) else None
