"""The answer of `memtrain.inspect_lengths` as a notebook shows it."""

from __future__ import annotations

from memtrain.trainers.data.length_report.html import page
from memtrain.trainers.data.length_report.result import Inspection
from memtrain.trainers.pages.page import framed


class ShownInspection(Inspection):
    """An Inspection whose display in a notebook is the page of `--html`."""

    def _repr_html_(self) -> str:
        return framed(page(self))
