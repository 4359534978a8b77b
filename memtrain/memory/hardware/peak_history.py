"""Measured peaks of ended runs beside their predictions, and the correction of the next prediction.

A correction is a share of the predicted peak, bounded, shown on a line of its own. A run without a dry run
may never have met its heaviest batch: it says only how much more was needed, never how much less.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from memtrain.memory.hardware.calibration import folder, versions, write_whole
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.settings import MARKS, Settings

BOUND = 0.1
"""Most that a prediction is corrected by. Taste: beyond, something else is wrong, and is not to be hidden."""
KEPT = 5
"""Remembered runs of a kind; the largest need counts."""
FILE = "runs.json"
KIND = tuple(name for name, mark in MARKS.items() if not mark.not_of_kind)
"""Settings that change which tensors are there, or where: runs that differ in one of them err apart."""


@dataclass(frozen=True, slots=True)
class History:
    """Ratios of measured to predicted peaks, by the kind of run."""

    ratios: Mapping[str, tuple[float, ...]]

    def correction(self, kind: str, predicted_bytes: int) -> int:
        """Bytes to add to a prediction of this kind (below zero: to take off); 0 where nothing is known."""
        known = self.ratios.get(kind, ())
        if not known:
            return 0
        return round(min(BOUND, max(-BOUND, max(known) - 1)) * predicted_bytes)


EMPTY = History({})


def kind_of_run(settings: Settings, shape: ModelShape, method: str) -> str:
    """A key of runs whose predictions err alike: model, method, strategies and versions."""
    model = (shape.model_type, shape.num_layers, shape.width, shape.mlp_width, shape.vocab_size, shape.tied)
    chosen = {name: str(getattr(settings, name)) for name in KIND}
    words = repr((method, model, sorted(chosen.items()), sorted(versions().items())))
    return hashlib.sha256(words.encode()).hexdigest()[:20]


def read_history() -> History:
    """Remembered peaks; nothing where the store is off, empty or unreadable."""
    base = folder()
    if base is None:
        return EMPTY
    try:
        kept = json.loads((base / FILE).read_text())
        return History({str(kind): tuple(map(float, ratios)) for kind, ratios in kept.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return EMPTY


def note_run(kind: str, *, predicted_bytes: int, measured_bytes: int, had_preflight: bool) -> None:
    """Remember a run that ended. `predicted_bytes`: without a correction."""
    base = folder()
    if base is None or not kind or not predicted_bytes or not measured_bytes:
        return
    ratio = measured_bytes / predicted_bytes
    if not had_preflight and ratio < 1:
        return
    ratios = dict(read_history().ratios)
    ratios[kind] = (*ratios.get(kind, ()), round(ratio, 6))[-KEPT:]
    write_whole(base / FILE, json.dumps(ratios, indent=1))
